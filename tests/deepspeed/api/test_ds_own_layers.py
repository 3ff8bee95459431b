"""A ``PipelineModule`` of several stages has the values of its rank's own layers, and they are those of the whole row."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from functional_ds import comm
from functional_ds.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from functional_ds.deepspeed.pipe.pipeline_engine import pipeline_engine
from tests.planting import Bug, planted

WIDTH = 4
SGD = {"type": "SGD", "params": {"lr": 0.1}}


def double(x: torch.Tensor) -> torch.Tensor:
    """A layer without params."""
    return x * 2


MAKE: dict[str, Callable[[], Any]] = {
    "linear": lambda: LayerSpec(nn.Linear, WIDTH, WIDTH),
    "norm": lambda: LayerSpec(nn.LayerNorm, WIDTH),
    "tied": lambda: TiedLayerSpec("tied", nn.Linear, WIDTH, WIDTH),
    "given": lambda: nn.Linear(WIDTH, WIDTH),
    "double": lambda: double,
}


def drawn(kinds: list[str], stages: int, method: str = "uniform", seeds: bool = False) -> tuple[PipelineModule, float]:
    """A row, and what is drawn after it."""
    torch.manual_seed(5)
    layers = [MAKE[kind]() for kind in kinds]
    module = PipelineModule(layers, stages, seed_layers=seeds, partition_method=method, loss_fn=nn.functional.mse_loss)
    return module, torch.rand(()).item()


def own_layers(kinds: list[str], stages: int, copies: int, method: str, seeds: bool) -> None:
    """Each rank has the whole row's values of what its stage runs and of what is given, and draws what that draws after it."""
    ((whole, after),) = comm.simulate(lambda: drawn(kinds, 1, method, seeds), world_size=1)
    expected = dict(whole.named_parameters())

    def program() -> None:
        module, then = drawn(kinds, stages, method, seeds)
        assert then == after
        mine = dict(module.stage(module.stage_id).named_parameters())
        assert dict(module.named_parameters()).keys() == expected.keys()
        for name, p in module.named_parameters():
            everywhere = not name.startswith("tied") and kinds[int(name.split(".")[0])] == "given"
            assert p.is_meta != (name in mine or everywhere), name
            assert (comm.world().rank in module.holders(name)) != p.is_meta
            assert p.is_meta or torch.equal(p, expected[name]), name

    comm.simulate(program, world_size=stages * copies)


@pytest.mark.law(36)
@given(
    kinds=st.lists(st.sampled_from([*MAKE]), min_size=3, max_size=6),
    stages=st.integers(2, 3),
    copies=st.integers(1, 2),
    method=st.sampled_from(["uniform", "parameters"]),
    seeds=st.booleans(),
)
def test_own_layers_are_the_whole_rows(kinds: list[str], stages: int, copies: int, method: str, seeds: bool) -> None:
    own_layers(kinds, stages, copies, method, seeds)


def trained(kinds: list[str], stages: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and params; ranks begin with other draws, and the first holder's count."""
    module = drawn(kinds, stages)[0]
    if comm.world().rank >= stages:  # the second of each stage: topology's axis "pipe" is the outer one
        with torch.no_grad():
            for p in module.parameters():
                p.zero_()
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "optimizer": SGD}
    engine = pipeline_engine(module, config)
    data = [(torch.arange(2.0 * WIDTH).view(2, WIDTH) / 8 + each, torch.full((2, WIDTH), 1.0 * each)) for each in range(2)]
    return [engine.train_batch(iter(data)).item() for _ in range(3)], dict(engine.module_state_dict())


def trains(kinds: list[str]) -> None:
    """An engine trains from the whole row's values, whatever a rank has of others' layers."""
    ((losses, params),) = comm.simulate(lambda: trained(kinds, 1), world_size=1)
    for found, weights in comm.simulate(lambda: trained(kinds, 2), world_size=2):
        assert found == pytest.approx(losses, rel=1e-5)
        for name, value in params.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


def test_an_engine_trains_from_the_whole_rows_values() -> None:
    trains(["tied", "linear", "given", "norm", "linear", "tied"])


def test_first_holders_count() -> None:
    """Data-parallel ranks take the params of the first rank with their stage."""

    def program() -> None:
        module = drawn(["tied", "linear", "given", "linear", "tied"], 2)[0]
        before = {name: p.detach().clone() for name, p in module.named_parameters()}
        if comm.world().rank in (1, 3):
            with torch.no_grad():
                for p in module.parameters():
                    p.mul_(3.0)
        config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "optimizer": SGD}
        for name, p in pipeline_engine(module, config).module_state_dict().items():
            assert before[name].is_meta or torch.equal(p, before[name]), name

    comm.simulate(program, world_size=4)


class Heavy(nn.Linear):
    """A layer whose weights' memory is counted while it exists."""

    alive = most = 0

    def __init__(self) -> None:
        super().__init__(64, 64)
        Heavy.alive += 1
        Heavy.most = max(Heavy.most, Heavy.alive)
        weakref.finalize(self.weight.untyped_storage(), self.gone)

    @classmethod
    def gone(cls) -> None:
        cls.alive -= 1


def memory(method: str) -> None:
    """Beside its own layers a rank has one at a time."""

    def program() -> int:
        Heavy.alive = Heavy.most = 0
        module = PipelineModule([LayerSpec(Heavy) for _ in range(12)], 3, partition_method=method, loss_fn=nn.functional.mse_loss)
        assert [p.is_meta for p in module[0].parameters()] if False else True
        return Heavy.most if module.stage_id == 2 else 0

    assert comm.simulate(program, world_size=3)[2] <= 5


@pytest.mark.parametrize("method", ["uniform", "parameters", "type:heavy"])
def test_other_layers_have_no_memory(method: str) -> None:
    memory(method)


def test_shared_params_are_kept_or_refused() -> None:
    """What a spec is given stays on all ranks; what layers of two stages share by themselves is refused by name."""
    common = nn.Linear(WIDTH, WIDTH)

    class Borrows(nn.Module):
        def __init__(self, lender: nn.Linear | None = None) -> None:
            super().__init__()
            self.inner = common if lender is None else lender

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)  # type: ignore[no-any-return]

    def given_to() -> bool:
        lender = nn.Linear(WIDTH, WIDTH)
        module = PipelineModule([LayerSpec(Borrows, lender), LayerSpec(Borrows, lender)], 2, partition_method="uniform")
        return all(not p.is_meta for p in module.parameters())

    def by_itself() -> None:
        PipelineModule([LayerSpec(Borrows), LayerSpec(Borrows)], 2, partition_method="uniform")

    assert comm.simulate(given_to, world_size=2) == [True, True]
    with pytest.raises(ValueError, match=r"'inner.weight' of layer \d belongs to a layer of another stage, too"):
        comm.simulate(by_itself, world_size=2)


MODULE, ENGINE = "deepspeed.pipe.pipeline_module", "deepspeed.pipe.pipeline_engine"
ROW = partial(own_layers, ["tied", "linear", "norm", "given", "linear", "tied"], 2, 2)


@pytest.mark.parametrize(
    ("law", "bug"),
    [
        (partial(ROW, "parameters", False), Bug("counting draws", MODULE, "with torch.random.fork_rng(), kept_rng():", "if True:")),
        (partial(ROW, "uniform", False), Bug("a tied layer has its first stage alone", MODULE,
            "return sorted({self.stage_owner(index) for index in same})", "return [self.stage_owner(same[0])]")),
        (partial(ROW, "uniform", False), Bug("all layers stay", MODULE, "freed.free(module)", "pass")),
        (partial(memory, "parameters"), Bug("memory stays", MODULE, "p.data = p.data.new_empty(0)", "pass")),
        (test_first_holders_count, Bug("each rank has its own values", ENGINE, "mine.data.copy_(first)", "pass")),
    ],
    ids=lambda each: each.name if isinstance(each, Bug) else "",
)  # fmt: skip
def test_a_bug_breaks_its_law(law: Callable[[], None], bug: Bug) -> None:
    law()
    with planted(bug), pytest.raises(bug.shows):
        law()
