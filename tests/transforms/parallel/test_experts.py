"""Law 47: experts over some of the data-parallel ranks are the single-device step, in every stage, beside other transforms."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.step.axes import axis
from functional_ds.transforms.zero.process_groups import ProcessGroups
from tests.transforms.parallel.mixture import PATTERN, batch, loss, params

TOLERANCE = 2e-5
STEPS = 3


def by_torch(rows: int, limit: float) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, norms and params of plain PyTorch on one device."""
    leaves = {path: leaf.clone().requires_grad_() for path, leaf in params().items()}
    optimizer, losses, norms = torch.optim.AdamW(leaves.values(), 1e-2, eps=1e-4), [], []
    for _ in range(STEPS):
        found = loss(leaves, batch(rows))
        optimizer.zero_grad()
        (found.sum / found.weight).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(leaves.values(), limit).item())
        optimizer.step()
        losses.append((found.sum / found.weight).item())
    return losses, norms, {path: leaf.detach() for path, leaf in leaves.items()}


def trained(
    strategy: Sequence[fds.Transform], rows: int, part: tuple[int, int] = (0, 1), *, rule: Any = None, loss_fn: Any = loss
) -> Any:
    """Metrics and params of the library's step on a part of the batch."""
    step = fds.compose(*strategy)(fds.train_step(loss_fn, rule or fds.adamw(1e-2, eps=1e-4)))
    state, found = step.init(params()), []
    mine = tuple(x.tensor_split(part[1])[part[0]] for x in batch(rows))
    for _ in range(STEPS):
        state, metrics = step(state, mine)
        found.append({name: value.item() for name, value in metrics.items()})
    averaged = T.averaged(step, state) if "ema" in state.slots else None
    return found, step.params(state), averaged, step.evaluate(state, mine).item()


def on_ranks(before: Sequence[fds.Transform], zero: Any, after: Sequence[fds.Transform], edp: int, ep: int, **rest: Any) -> Any:
    """The same with ``zero``, and experts over ep; the loss finds the group through the step."""

    def with_axis(p: Any, given: Any) -> Any:
        found = axis("ep")
        return loss(p, given, None if found.group.size == 1 else found.group)

    def program() -> Any:
        mesh = comm.mesh(dp=edp * ep).split("dp", edp=edp, ep=ep)
        dp, experts = mesh["edp", "ep"], T.experts(PATTERN, mesh["ep"], edp=mesh["edp"])
        made = zero(dp, mesh) if callable(zero) and not isinstance(zero, T.Zero) else zero
        return trained([*before, made, experts, *after], part=(dp.rank, dp.size), loss_fn=with_axis, **rest)

    return program


def assert_same(found: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    for ours, theirs in zip(found[0], expected[0], strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance, abs=tolerance)
    for ours, theirs in zip(found[1:3], expected[1:3], strict=True):
        assert fds.tree.structure(ours) == fds.tree.structure(theirs)
        for (path, one), other in zip(fds.tree.named(ours), fds.tree.leaves(theirs), strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, msg=lambda m, path=path: f"{path}: {m}")
    assert found[3] == pytest.approx(expected[3], rel=tolerance)


@pytest.mark.law(47)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_experts_are_plain_pytorch(stage: int) -> None:
    """AdamW and a clipped norm on 2 x 2 ranks, against torch on the whole batch."""
    losses, norms, leaves = by_torch(8, 0.5)
    program = on_ranks([], lambda dp, mesh: T.zero(stage, dp), [T.clip(0.5)], 2, 2, rows=8)
    for metrics, found, _, _ in comm.simulate(program, world_size=4):
        assert [m["loss"] for m in metrics] == pytest.approx(losses, rel=TOLERANCE)
        assert [m["grad_norm"] for m in metrics] == pytest.approx(norms, rel=TOLERANCE)
        for path, leaf in leaves.items():
            torch.testing.assert_close(found[path], leaf, rtol=TOLERANCE, atol=TOLERANCE)


@cache
def alone(names: tuple[str, ...]) -> Any:
    return trained([AROUND[name][1] for name in names], rows=16)


AROUND: dict[str, tuple[bool, fds.Transform]] = {  # whether it stands before zero
    "ema": (True, T.ema(0.9)),
    "fp32 reduce": (True, T.mixed_precision("params=f32,compute=f32,reduce=f32,output=f32", 2.0**10)),
    "accumulate": (False, T.accumulate(2)),
    "clip": (False, T.clip(0.5)),
    "remat": (False, T.remat("")),
}


@pytest.mark.law(47)
@settings(max_examples=settings.default.max_examples // 2)
@given(
    stage=st.sampled_from((0, 1, 2, 3)),
    sizes=st.sampled_from(((1, 2), (2, 1), (2, 2), (1, 4), (4, 2), (2, 4))),
    names=st.sets(st.sampled_from(sorted(AROUND))).map(lambda s: tuple(sorted(s))),
    kind=st.sampled_from(("plain", "intra_node", "owner", "all_reduce", "predivide", "persistent", "hpz", "leaf units")),
    seed=st.integers(0, 99),
)
def test_any_composition_is_the_single_device_step(
    stage: int, sizes: tuple[int, int], names: tuple[str, ...], kind: str, seed: int
) -> None:
    """zero of any stage and kind, over edp x ep, with any of the transforms around it."""
    given: dict[str, Any] = {
        "plain": {},
        "intra_node": {"intra_node": 2} if stage else {},
        "owner": {"aggregate": "owner"} if stage else {},
        "all_reduce": {"aggregate": "all_reduce"} if stage else {},
        "predivide": {"gradient_predivide_factor": 4.0},
        "persistent": {"persistence_threshold": 40} if stage == 3 else {},
        "hpz": {"intra_node": 2, "hpz": True} if stage == 3 else {},
        "leaf units": {"unit_of": lambda path: path},
    }[kind]
    before = [AROUND[name][1] for name in names if AROUND[name][0]]
    after = [AROUND[name][1] for name in names if not AROUND[name][0]]
    program = on_ranks(before, lambda dp, mesh: T.zero(stage, dp, **given), after, *sizes, rows=16)
    for found in comm.simulate(program, world_size=sizes[0] * sizes[1], seed=seed):
        assert_same(found, alone(names))


# -- what is sent and held -----------------------------------------------------------------------------------------------


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: comm.Group) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


def exchanged(x: Tensor) -> Tensor:
    """The identity, which stands in a graph where a collective over ep would."""
    return _Exchanged.apply(x, axis("ep").group)  # type: ignore[no-any-return, no-untyped-call]


def local(p: Any, x: Tensor) -> Tensor:
    """A loss without communication that uses every leaf."""
    return exchanged(sum((leaf.square().sum() * x.mean() for leaf in p.values()), torch.zeros(())))


@pytest.mark.sample(11)
@pytest.mark.law(21)
@pytest.mark.parametrize("kind", ["plain", "owner", "all_reduce", "intra_node"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("sizes", [(1, 4), (2, 2)])
def test_bytes_are_those_of_the_report(sizes: tuple[int, int], stage: int, kind: str) -> None:
    """What a step sends by collective and group, and what it stores: the report's, and Ψ 2 (d-1)/d for Ψ of experts."""
    if kind != "plain" and (stage == 0 or sizes[0] == 1):
        pytest.skip("nothing more is sent")
    given = {"intra_node": 2} if kind == "intra_node" else {} if kind == "plain" else {"aggregate": kind}

    def program() -> Any:
        mesh = comm.mesh(dp=4).split("dp", edp=sizes[0], ep=sizes[1])
        zero = T.zero(stage, mesh["edp", "ep"], reshard_last_units=stage == 3, **given)
        experts = T.experts(PATTERN, mesh["ep"], edp=mesh["edp"])
        step = fds.compose(zero, experts)(fds.train_step(local, fds.sgd(0.1)))
        state = step.init(params())
        for _ in range(2):
            state, _ = step(state, torch.ones(2))
        with comm.ledger() as book:
            state, _ = step(state, torch.ones(2))
        report = zero.cost_report(experts.cut(params()))
        rank = ProcessGroups.by(zero).shards.rank
        sent = report.sent(rank=rank)
        found = {(r.collective, r.group): r.bytes for r in book.rows if (r.collective, r.group) in sent or "sharers" in r.group}
        return sent, found, sum(leaf.nbytes for leaf in state.params), report.held(rank)

    for sent, found, held, expected in comm.simulate(program, world_size=4):
        assert (found, held) == (sent, expected)
        of_experts = sum(size for (_, group), size in found.items() if "sharers" in group)
        if sizes[0] == 1:
            assert not of_experts
        elif kind == "plain":
            psi = sum(leaf.numel() for path, leaf in params().items() if path[2:] in ("up", "bias", "down")) // sizes[1]
            assert of_experts == pytest.approx((3 if stage == 3 else 2) * 4 * psi * (sizes[0] - 1) / sizes[0], rel=0.02)


@pytest.mark.sample(3)
@pytest.mark.law(20)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["bf16", None])
def test_predicted_memory_is_measured(stage: int, precision: str | None) -> None:
    def make() -> fds.Step:
        mesh = comm.mesh(dp=4).split("dp", edp=2, ep=2)
        chain = [] if precision is None else [T.mixed_precision(precision)]
        chain += [T.zero(stage, mesh["edp", "ep"]), T.experts(PATTERN, mesh["ep"], edp=mesh["edp"])]
        return fds.compose(*chain)(fds.train_step(local, fds.adamw(0.1)))

    def program() -> Any:
        step = make()
        state = step.init(params())
        for _ in range(2):
            state, _ = step(state, torch.ones(2))
        return fds.memory.measured(state)

    for rank, found in enumerate(comm.simulate(program, world_size=4)):
        expected = fds.memory.predicted(make, params(), world_size=4, rank=rank)
        kinds = ("params", "masters", "optimizer", "buffers")
        assert [getattr(found, kind) for kind in kinds] == [getattr(expected, kind) for kind in kinds]


# -- beside other transforms ---------------------------------------------------------------------------------------------


@pytest.mark.law(47)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_replicas_of_the_shards(stage: int) -> None:
    """HSDP: experts lie within the ranks that shard the state, and replicas sum their gradients."""

    def program() -> Any:
        mesh = comm.mesh(replica=2, dp=4).split("dp", edp=2, ep=2)
        zero = T.zero(stage, mesh["edp", "ep"], replicate=mesh["replica"])
        experts = T.experts(PATTERN, mesh["ep"], edp=mesh["edp"])
        own = comm.world().rank, comm.world().size
        return trained([zero, experts, T.clip(0.5)], 16, own, loss_fn=lambda p, b: loss(p, b, mesh["ep"]))

    expected = trained([T.clip(0.5)], 16)
    for found in comm.simulate(program, world_size=8):
        assert_same(found, expected)


@pytest.mark.sample(2)
@pytest.mark.law(47)
@pytest.mark.parametrize("order", ["experts first", "slices first"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_experts_that_are_cut_over_two_axes(stage: int, order: str) -> None:
    """Experts over ep, the width of each over tp: norms count every element once, and params come back whole."""

    def program() -> Any:
        mesh = comm.mesh(dp=4, tp=2).split("dp", edp=2, ep=2)
        dp = mesh["edp", "ep"]
        cuts = [
            T.experts(PATTERN, mesh["ep"], edp=mesh["edp"]),
            T.tensor_parallel({"up": 2, "bias": 1, "down": 1}, mesh["tp"]),
        ]
        chain = [T.zero(stage, dp), *(cuts if order == "experts first" else cuts[::-1]), T.clip(0.5)]
        return trained(chain, 8, (dp.rank, dp.size), loss_fn=lambda p, b: loss(p, b, mesh["ep"], mesh["tp"]))

    expected = trained([T.clip(0.5)], 8)
    for found in comm.simulate(program, world_size=8):
        assert_same(found, expected)


@pytest.mark.law(25)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_overflow_in_one_expert_skips_the_step_on_all_ranks(stage: int) -> None:
    def program() -> Any:
        mesh = comm.mesh(dp=4).split("dp", edp=2, ep=2)
        here = comm.world().rank

        def bad(p: Any, x: Tensor) -> Tensor:
            return local(p, x) + (exchanged(p["0.up"].sum()) * torch.inf if here == 3 else 0.0)

        chain = [
            T.mixed_precision("fp16", 2.0),
            T.zero(stage, mesh["edp", "ep"]),
            T.experts(PATTERN, mesh["ep"], edp=mesh["edp"]),
        ]
        step = fds.compose(*chain)(fds.train_step(bad, fds.adamw(0.1)))
        state, metrics = step(step.init(params()), torch.ones(2))
        return metrics["skipped"].item(), step.params(state)

    for skipped, found in comm.simulate(program, world_size=4):
        assert skipped == 1.0
        for path, leaf in params().items():
            assert torch.equal(found[path], leaf), path


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_experts_that_no_token_reaches(stage: int) -> None:
    """Those whose leaf some rank uses move by momentum alone; leaves that no rank uses stay, as on one device."""

    def of_the_first(p: Any, x: Tensor) -> Tensor:
        return p["head"].sum() * x.mean() + (exchanged(p["0.up"].square().sum()) if axis("ep").group.rank == 0 else 0.0)

    def program() -> Any:
        mesh = comm.mesh(dp=2).split("dp", edp=1, ep=2)
        chain = T.zero(stage, mesh["edp", "ep"]), T.experts(PATTERN, mesh["ep"])
        step = fds.compose(*chain)(fds.train_step(of_the_first, fds.adamw(0.1, weight_decay=0.5)))
        state = step.init(params())
        for _ in range(2):
            state, _ = step(state, torch.ones(2))
        return step.params(state)

    found = comm.simulate(program, world_size=2)
    for path, leaf in params().items():
        for ours in found:
            assert torch.equal(ours[path], found[0][path]), path
        if path in ("0.down", "1.up", "embed"):
            assert torch.equal(found[0][path], leaf), path
        if path == "0.up":  # decay moves the experts of the rank that used none, as of any leaf that is used
            assert not torch.equal(found[0][path][2:], leaf[2:])


def test_layers_that_are_no_stack_of_experts_are_refused() -> None:
    """Routers and shared experts, which a wide pattern matches."""

    def program() -> None:
        mesh = comm.mesh(dp=2).split("dp", edp=1, ep=2)
        _, params = fds.functional(nn.ModuleDict({"experts": nn.Linear(2, 4)}))
        step = fds.compose(T.zero(1, mesh["edp", "ep"]), T.experts("experts", mesh["ep"]))
        step(fds.train_step(lambda p, x: x, fds.sgd(0.1))).init(params)

    with pytest.raises(ValueError, match=r"belongs to an nn\.Linear, which is not a stack of experts"):
        comm.simulate(program, world_size=2)
