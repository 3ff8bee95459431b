"""Law 36 with a third axis: slices of leaves, along with pipelines and ZeRO, are the single-device step."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm, transforms
from functional_ds import pipelining as pp
from functional_ds.step.axes import axis
from tests.transforms.rules import assert_close

TOLERANCE = 2e-5
DIMS = {"up": 1, r"\.bias$": 0, "down": 0}


def _params() -> list[Any]:
    generator = torch.Generator().manual_seed(1)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / 2

    return [{"scale": leaf(6), "up": leaf(6, 12), "bias": leaf(12), "down": leaf(12, 6)} for _ in range(4)]


def _trained(group: comm.Group | None, schedule: pp.Schedule, *strategy: fds.Transform, part: tuple[int, int] = (0, 1)) -> Any:
    def layer(p: Any, x: Tensor) -> Tensor:
        x = x * p["scale"]
        hidden = torch.tanh((x if group is None else comm.copy_to(x, group)) @ p["up"] + p["bias"])
        out = hidden @ p["down"]
        return x + (out if group is None else comm.reduce_from(out, group))

    params = _params()[: schedule.stages]
    model = pp.stages([layer] * schedule.stages, params, loss=lambda y, batch: (y - batch[1]).square().mean())
    strategy = tuple(each(schedule, model) if getattr(each, "__name__", "") == "piped" else each for each in strategy)
    step = fds.compose(*strategy)(fds.train_step(model, fds.adamw(1e-2, eps=1e-4)))
    state = step.init(params)
    whole = torch.linspace(-1, 1, 48).view(8, 6), torch.linspace(1, -2, 48).view(8, 6)
    batch = tuple(x.tensor_split(part[1])[part[0]] for x in whole)
    found = []
    for _ in range(2):
        state, metrics = step(state, batch)
        found.append({name: value.item() for name, value in metrics.items()})
    return found, step.evaluate(state, batch).item(), step.params(state)


@pytest.mark.law(36)
@settings(max_examples=settings.default.max_examples // 3)
@given(
    schedule=st.sampled_from((None, pp.one_f_one_b(2, 4), pp.zbv(2, 4), pp.interleaved_one_f_one_b(2, 2))),
    zero=st.sampled_from((None, 0, 1, 2, 3)),
    tp=st.sampled_from((1, 2, 3)),
    dp=st.sampled_from((1, 2)),
)
def test_three_axes_are_one_device(schedule: pp.Schedule | None, zero: int | None, tp: int, dp: int) -> None:
    """Pipeline × ZeRO-k × tensor parallel, on any mesh: losses, norms, params."""
    dp = dp if zero is not None else 1
    stages = schedule or pp.gpipe(1, 1)

    def program() -> Any:
        mesh = comm.mesh(dp=dp, pp=1 if schedule is None else schedule.ranks, tp=tp)

        def piped(schedule: pp.Schedule, model: pp.Stages) -> fds.Transform:
            return transforms.pipeline(schedule, model, mesh["pp"])

        return _trained(
            mesh["tp"],
            stages,
            *([] if zero is None else [transforms.zero(zero, mesh["dp"])]),
            *([] if schedule is None else [piped]),
            transforms.tensor_parallel(DIMS, mesh["tp"]),
            transforms.clip(0.1),
            part=(mesh["dp"].rank, dp),
        )

    expected = _trained(None, stages, transforms.clip(0.1))
    for found in comm.simulate(program, world_size=dp * tp * stages.ranks):
        for ours, theirs in zip(found[0], expected[0], strict=True):
            assert ours == pytest.approx(theirs, rel=TOLERANCE, abs=TOLERANCE)
        assert found[1] == pytest.approx(expected[1], rel=TOLERANCE)
        assert_close(found[2], expected[2], TOLERANCE)


@pytest.mark.parametrize("zero", [1, 3])
def test_units_of_slices_travel_as_whole_ones(zero: int) -> None:
    """A unit has slices and whole leaves, and is gathered as one: as often as without slices."""

    def program(tp: int) -> tuple[int, int]:
        mesh = comm.mesh(dp=2, tp=tp)
        net = nn.Sequential(*(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(5)))
        apply, params = fds.functional(net)
        plan = {"*.1": "colwise", "*.2": "rowwise"}
        strategy = transforms.zero(zero, mesh["dp"]), transforms.tensor_parallel(plan, mesh["tp"])
        step = fds.compose(*strategy)(fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.1)))
        state = step.init(params)
        for _ in range(2):
            state, _ = step(state, torch.ones(2, 8))
        with comm.ledger() as book:
            step(state, torch.ones(2, 8))
        gathers = [row for row in book.rows if row.collective == "all_gather" and row.group == "dp"]
        return sum(row.calls for row in gathers), sum(row.elements for row in gathers)

    (calls, elements), (calls_of_slices, elements_of_slices) = (
        comm.simulate(program, tp, world_size=2 * tp)[0] for tp in (1, 2)
    )
    assert calls_of_slices == calls
    assert elements / 2 < elements_of_slices < elements


@pytest.mark.parametrize("zero", [1, 3])
def test_slices_of_leaves_that_are_read_later(zero: int) -> None:
    """Deferred leaves give the slices, and the shards of slices, of the same leaves with values."""

    def program() -> Any:
        mesh = comm.mesh(dp=2, tp=2)
        strategy = transforms.zero(zero, mesh["dp"]), transforms.tensor_parallel(DIMS, mesh["tp"])
        step = fds.compose(*strategy)(fds.train_step(lambda p, x: p[0]["up"].sum(), fds.sgd(0.1)))
        whole = _params()
        deferred = fds.from_source(whole, dict(fds.tree.named(whole)).__getitem__)
        return step.params(step.init(deferred)), whole

    for found, whole in comm.simulate(program, world_size=4):
        assert_close(found, whole, 0.0)


@pytest.mark.parametrize("zero", [None, 1])
def test_optimizers_that_look_at_whole_leaves_refuse_slices(zero: int | None) -> None:
    """Alone or in shards; what is routed elsewhere is no matter."""

    def begin(rule: Any) -> None:
        mesh = comm.mesh(dp=2, tp=2)
        chain = [*([] if zero is None else [transforms.zero(zero, mesh["dp"])]), transforms.tensor_parallel(DIMS, mesh["tp"])]
        fds.compose(*chain)(fds.train_step(lambda p, x: p[0]["up"].sum(), rule)).init(_params())

    for name, rule in (("lamb", fds.lamb(0.1)), ("muon", fds.muon(0.1, fds.adamw(0.1)))):
        with pytest.raises(
            ValueError, match=rf"{name}: '0.\w+' is the slice (.|\n)* over 2 ranks, but {name} looks at whole leaves"
        ):
            comm.simulate(lambda rule=rule: begin(rule), world_size=4)
        comm.simulate(lambda rule=rule: begin(fds.param_groups(dict.fromkeys(DIMS, fds.adamw(0.1)), rule)), world_size=4)


class Mlp(nn.Module):
    """A projection that packs blocks of 8 and of 4 features, and one back."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        gates = hidden[..., : hidden.shape[-1] // 3 * 2].unflatten(-1, (-1, 2))
        return self.down(gates.prod(-1) + hidden[..., hidden.shape[-1] // 3 * 2 :])  # type: ignore[no-any-return]


class Layer(nn.Module):
    """A norm and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(6), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))  # type: ignore[no-any-return]


def on_processes(group: bool = True) -> Any:
    """Two steps of a small model: fused projections, a vocabulary, a norm on slices of the sequence."""
    torch.manual_seed(0)
    layers = nn.Sequential(Layer(), Layer())
    named = OrderedDict(embed=nn.Embedding(8, 6), layers=layers, head=nn.Linear(6, 8))
    apply, params = fds.functional(nn.Sequential(named))

    def loss(p: Any, ids: Tensor) -> Any:
        logits = apply(p, ids)
        if not group:
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.roll(1, 1).flatten())
        return fds.tp.cross_entropy(logits, ids.roll(1, 1))

    plan = {"embed": "vocab", "head": "vocab", "layers": "sequence_parallel", "up": fds.tp.Packed([8, 4]), "down": "rowwise"}
    strategy = [transforms.tensor_parallel(plan)] if group else []
    step = fds.compose(*strategy, transforms.clip(0.1))(fds.train_step(loss, fds.adamw(1e-2)))
    state, ids = step.init(params), torch.arange(8).view(2, 4)
    for _ in range(2):
        state, metrics = step(state, ids)
    return metrics["loss"].item(), metrics["grad_norm"].item(), step.params(state)


@pytest.mark.law(40)
def test_processes_give_the_bits_of_the_simulator() -> None:
    """Two Gloo processes and two simulated ranks end with the same bits, which are one device's up to rounding."""
    alone = on_processes(group=False)
    for here, there in zip(comm.simulate(on_processes, world_size=2), comm.spawn(on_processes, world_size=2), strict=True):
        assert here[:2] == there[:2]
        assert here[:2] == pytest.approx(alone[:2], rel=TOLERANCE)
        for name, leaf in alone[2].items():
            assert torch.equal(here[2][name], there[2][name])
            assert_close(here[2][name], leaf, TOLERANCE)


def draws_agree(tp: int, dp: int, sequence: bool, accumulate: int) -> None:
    """Law 49."""
    generator = torch.Generator().manual_seed(4)
    params = {"up": torch.randn(8, 4, generator=generator), "down": torch.randn(4, 8, generator=generator)}
    batch = torch.randn(4, 4, 4, generator=generator)

    def loss(p: Any, x: Tensor, key: fds.Key | None) -> Tensor:
        """Residual dropout between blocks, and dropout of hidden features."""
        cut: dict[str, Any] = {"sequence_dim": 1} if sequence else {}
        group = None if comm.world().size > 1 else comm.world()
        here = comm.world() if group else axis("tp")
        x = x.chunk(here.size, 1)[here.rank] if sequence else x
        between = fds.tp.places(x, 1, group=group) if sequence else None
        x = x if key is None else key.dropout(x, 0.5, "x", places=between)
        hidden = fds.tp.column(x, p["up"], group=group, **cut)
        hidden = hidden if key is None else key.dropout(hidden, 0.5, "hidden", places=fds.tp.places(hidden, -1, group=group))
        y = fds.tp.row(hidden.tanh(), p["down"], group=group, **cut)
        y = y if key is None else key.dropout(x + y, 0.5, "y", places=between)
        return (comm.gather_from(y, here, dim=1) if sequence else y).square().mean()

    def program(*, alone: bool = False) -> Any:
        mesh = comm.mesh(dp=1 if alone else dp, tp=1 if alone else tp)
        plan = {"up": "colwise", "down": "rowwise"}
        strategy = (
            transforms.zero(2, mesh["dp"]),
            transforms.accumulate(accumulate),
            transforms.tensor_parallel(plan, mesh["tp"]),
        )
        step = fds.compose(*([] if alone else strategy))(fds.train_step(loss, fds.sgd(0.1), seed=7))
        state, found = step.init(params), []
        for _ in range(2):
            state, metrics = step(state, batch if alone else batch.chunk(dp)[mesh["dp"].rank])
            found.append(metrics["loss"].item())
        return found, step.params(state)

    expected = program(alone=True)
    for found, params_of_rank in comm.simulate(program, world_size=dp * tp):
        assert found == pytest.approx(expected[0], rel=TOLERANCE)
        assert_close(params_of_rank, expected[1], TOLERANCE)


@pytest.mark.law(49)
@settings(max_examples=settings.default.max_examples // 2)
@given(tp=st.sampled_from((1, 2, 4)), dp=st.sampled_from((1, 2)), sequence=st.booleans(), accumulate=st.sampled_from((1, 2)))
def test_draws_on_slices_are_one_devices(tp: int, dp: int, sequence: bool, accumulate: int) -> None:
    """Dropout of features that are cut, and of activations between blocks, whole or cut along the sequence."""
    draws_agree(tp, dp, sequence, accumulate)


def ranks_may_begin_otherwise() -> None:
    """``init`` takes rank 0's leaves."""

    def program() -> Any:
        params = {"w": torch.arange(4.0) + 10 * comm.world().rank, "b": torch.ones(1) * comm.world().rank}
        step = transforms.tensor_parallel({"w": 0})(fds.train_step(lambda p, x: p["w"].sum(), fds.sgd(0.1)))
        return step.params(step.init(params))

    for found in comm.simulate(program, world_size=2):
        assert found["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
        assert found["b"].tolist() == [0.0]


def test_ranks_begin_with_rank_0s_leaves() -> None:
    """As under ZeRO."""
    ranks_may_begin_otherwise()


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("other", [{"w": torch.ones(2), "b": torch.ones(1)}, {"w": torch.ones(4)}], ids=["shape", "leaf"])
def test_ranks_with_other_leaves_are_named(other: Any, zero: bool) -> None:
    """Before rank 0's are sent, with and without ZeRO."""

    def program() -> None:
        mesh = comm.mesh(dp=2, tp=2)
        params = other if comm.world().rank == 3 else {"w": torch.arange(4.0), "b": torch.ones(1)}
        cut = [transforms.zero(1, mesh["dp"])] * zero + [transforms.tensor_parallel({"w": 0}, mesh["tp"])]
        fds.compose(*cut)(fds.train_step(lambda p, x: p["w"].sum(), fds.sgd(0.1))).init(params)

    with pytest.raises(ValueError, match=r"params: ranks \[3\] of group 'tp' have other leaves, shapes, dtypes or frozen"):
        comm.simulate(program, world_size=4)


def test_what_does_not_divide_or_match() -> None:
    step = fds.train_step(lambda p, x: p[0]["up"].sum(), fds.sgd(0.1))

    def init(dims: dict[str, int]) -> Any:
        return comm.simulate(lambda: transforms.tensor_parallel(dims)(step).init(_params()), world_size=5)

    with pytest.raises(ValueError, match=r"'0.up' of shape \[6, 12\] does not divide along dim 1 by the 5 ranks"):
        init({"up": 1})
    with pytest.raises(ValueError, match=r"'upp' matches no path; the nearest is '\d\.up'"):
        init({"upp": 1})
    with pytest.raises(ValueError, match="along dim 2"):
        init({"up": 2})
    with pytest.raises(ValueError, match=r"split '0.up' in different ways: '0.up' by 'up': 0, '0.up' by 'u': 1"):
        transforms.tensor_parallel({"up": 0, "u": 1})(step).init(_params())
    with pytest.raises(TypeError, match="is not a group"):
        transforms.tensor_parallel({"up": 0}, 3)  # type: ignore[arg-type]
