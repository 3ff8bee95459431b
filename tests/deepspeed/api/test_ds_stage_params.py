"""A rank's ``PipelineModule`` has the params of its own stage alone, with the values that the whole row would have."""

import weakref
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from functional_ds import comm
from functional_ds.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from functional_ds.deepspeed.pipe.pipeline_engine import pipeline_engine

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}


class Drawing(nn.Module):
    """Has a drawn buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift  # type: ignore[operator]


def row(widths: list[int], tied: bool) -> list[Any]:
    """Layers, the first of which may be the last one, too; one has a buffer."""
    ends = [TiedLayerSpec("end", nn.Linear, 3, 3)] * 2 if tied else [LayerSpec(nn.Linear, 3, 3), nn.ReLU()]
    middle = [LayerSpec(nn.Linear, a, b) for a, b in zip([3, *widths], [*widths, 3], strict=True)]
    return [ends[0], nn.Tanh(), LayerSpec(Drawing), *middle, ends[1]]


def whole(layers: list[Any], seeds: bool) -> dict[str, Tensor]:
    """Each layer built in its turn, as without a pipeline; and what is drawn next."""
    held, tied = nn.Module(), nn.ModuleDict()
    held.tied_modules = tied
    for index, spec in enumerate(layers):
        if seeds:
            torch.manual_seed(1234 + index)
        if not isinstance(spec, TiedLayerSpec):
            held.add_module(str(index), spec.build() if isinstance(spec, LayerSpec) else spec)
        elif spec.key not in tied:
            tied[spec.key] = spec.build()
    return {**held.state_dict(), "next": torch.rand(1)}


@given(
    stages=st.sampled_from([1, 2, 4]),
    widths=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    tied=st.booleans(),
    seeds=st.booleans(),
    method=st.sampled_from(["uniform", "parameters", "type:Linear"]),
)
@example(stages=2, widths=[4, 2], tied=True, seeds=False, method="parameters")
def test_own_params_are_the_whole_rows(stages: int, widths: list[int], tied: bool, seeds: bool, method: str) -> None:
    def program() -> None:
        torch.manual_seed(7)
        expected = whole(row(widths, tied), seeds)
        torch.manual_seed(7)
        module = PipelineModule(row(widths, tied), num_stages=stages, seed_layers=seeds, partition_method=method)
        assert torch.equal(expected.pop("next"), torch.rand(1))
        found = module.state_dict()
        assert found.keys() == expected.keys()
        own = module.stage(module.stage_id).state_dict().keys()
        for name, value in expected.items():
            assert (found[name].shape, found[name].dtype) == (value.shape, value.dtype)
            assert found[name].is_meta != (name in own or name.endswith("shift"))
            assert found[name].is_meta or torch.equal(found[name], value)

    comm.simulate(program, world_size=4)


@pytest.mark.parametrize("method", ["uniform", "parameters"])
def test_beside_its_own_a_rank_has_one_layer_that_is_built(method: str) -> None:
    def program() -> None:
        made, most = list[weakref.ref[nn.Parameter]](), 0

        class Counted(nn.Linear):
            def __init__(self) -> None:
                nonlocal most
                super().__init__(8, 8)
                made.extend(map(weakref.ref, self.parameters()))
                most = max(most, sum(p.untyped_storage().nbytes() for p in (each() for each in made) if p is not None))

        module = PipelineModule([LayerSpec(Counted) for _ in range(8)], num_stages=4, partition_method=method)
        assert module.parts == [0, 2, 4, 6, 8]
        assert most == (2 if module.stage_id == 3 else 3) * (8 * 8 + 8) * 4  # stage 3 builds no layer after its own

    comm.simulate(program, world_size=4)


def test_of_ranks_with_one_stage_the_first_ones_params_count() -> None:
    """Also those of a tied layer, on all stages that have it, while each rank draws others."""
    data = [(torch.randn(2, 3, generator=torch.Generator().manual_seed(each)), torch.zeros(2, 3)) for each in range(4)]

    def drawn(rank: int, stages: int) -> PipelineModule:
        torch.manual_seed(rank)
        return PipelineModule(row([4], True), num_stages=stages, loss_fn=nn.functional.mse_loss, partition_method="uniform")

    def program() -> list[float]:
        engine = pipeline_engine(drawn(comm.world().rank, 2), CONFIG)
        mine = data[engine._parts.data.rank :: engine._parts.data.size]
        return [engine.train_batch(iter(mine)).item() for _ in range(2)]

    def alone() -> list[float]:
        first, second = drawn(0, 1), drawn(2, 1)  # the ranks 2 and 3 have the second stage
        first.load_state_dict({name: x for name, x in second.state_dict().items() if name[0] in "345"}, strict=False)
        optimizer, found = torch.optim.SGD(first.parameters(), 0.1), []
        for _ in range(2):
            optimizer.zero_grad()
            loss = torch.stack([nn.functional.mse_loss(first(x), y) for x, y in data]).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            found.append(loss.item())
        return found

    ((expected,), every) = comm.simulate(alone, world_size=1), comm.simulate(program, world_size=4)
    assert every[0] == pytest.approx(expected, rel=1e-5)
    assert every == [every[0]] * 4


def test_a_module_without_some_values_moves_and_is_emptied() -> None:
    def program() -> None:
        module = PipelineModule(row([4], False), num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
        module.double().float().to("cpu")
        names = {name for name, p in module.named_parameters() if not p.is_meta}
        engine = pipeline_engine(module, CONFIG)
        shown = engine.module.state_dict()
        for name, value in engine.module_state_dict().items():
            if name in names or name.endswith("shift"):
                assert torch.equal(shown[name], value)
            else:
                assert (shown[name].numel(), shown[name].device.type, value.numel() > 0) == (0, "cpu", True)

    comm.simulate(program, world_size=2)


class Borrowing(nn.Module):
    """A layer over another one."""

    def __init__(self, lender: nn.Module) -> None:
        super().__init__()
        self.inner = lender


def test_params_of_layers_in_two_stages() -> None:
    """What a spec is given stays on all ranks; what layers of two stages share by themselves is refused on every rank."""

    def program() -> None:
        lender = nn.Linear(3, 3)

        class Sharing(Borrowing):
            def __init__(self) -> None:
                super().__init__(lender)

        lent = PipelineModule([LayerSpec(Borrowing, lender)] * 3, num_stages=3, partition_method="uniform")
        assert not any(p.is_meta for p in lent.parameters())
        with pytest.raises(ValueError, match=r"'inner.weight' of layer 2 belongs to a layer of another stage"):
            PipelineModule([LayerSpec(Sharing), nn.Tanh(), LayerSpec(Sharing)], num_stages=3, partition_method="uniform")

    comm.simulate(program, world_size=3)
