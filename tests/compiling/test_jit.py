"""Law 58: a jitted step is the step; what cannot be traced runs eagerly, and says why."""

import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.compiling import JitWarning, StepGraph, UntraceableError, bucketing, regather, schedule
from tests.planting import Bug, planted

WIDTH = 4
Run = tuple[list[dict[str, str]], list[Tensor], list[str], list[Any]]


def blocks(*more: nn.Module, count: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), *more, nn.Tanh()) for _ in range(count)))


def squared(apply: Any) -> Callable[..., Any]:
    return lambda params, batch: apply(params, batch).square().mean()


def own_batch(i: int, rows: int = 4) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(10 * i + comm.world().rank))


def run(
    jits: bool,
    transforms: Sequence[Any],
    make: Callable[[], nn.Module] = blocks,
    loss: Callable[[Any], Callable[..., Any]] = squared,
    unused: str = "skip",
    **options: Any,
) -> Run:
    """What three steps and evaluations give, the state's leaves, why something ran eagerly, and the ledger's rows."""
    apply, params = fds.functional(make())
    step: Any = fds.compose(*transforms)(fds.train_step(loss(apply), fds.adamw(0.05), unused=unused))
    step = fds.jit(step, **options) if jits else step
    state, told = step.init(params), []
    with comm.ledger() as book:
        for i in range(3):
            batch = own_batch(i)
            state, metrics = step(state, batch)
            told.append({name: repr(value.item()) for name, value in metrics.items()})
        told.append({"evaluated": repr(step.evaluate(state, batch).item())})
    rows = [row for row in book.rows if not row.group.endswith(("/control", "/jit"))]
    return told, fds.tree.leaves(T.offloading.fetched(state)), step.reasons if jits else [], rows


def assert_same(found: Run, expected: Run, *, sent: bool = True) -> None:
    """Bit for bit; ``sent``: the ranks send the same, too, but for the few bytes by which they agree."""
    assert found[0] == expected[0]
    for leaf, other in zip(found[1], expected[1], strict=True):
        assert torch.equal(leaf, other) if isinstance(leaf, Tensor) else leaf == other
    assert found[3] == expected[3] or not sent


STRATEGIES: dict[str, Sequence[Callable[[], Any]]] = {
    "stage 0": (lambda: T.zero(0), lambda: T.clip(1.0)),
    "stage 1 in bf16": (lambda: T.mixed_precision("bf16"), lambda: T.zero(1), lambda: T.accumulate(2)),
    "stage 2 with ema": (lambda: T.ema(0.9), lambda: T.zero(2), lambda: T.accumulate(2), lambda: T.clip(1.0)),
    "stage 3, resharded": (lambda: T.zero(3, reshard_last_units=True, prefetch=2), lambda: T.accumulate(2)),
    "stage 3 by owners": (lambda: T.zero(3, aggregate="owner"),),
    "stage 3 in fp16, overflowing": (lambda: T.mixed_precision("fp16"), lambda: T.zero(3), lambda: T.accumulate(2)),
}


@pytest.mark.sample(2)
@pytest.mark.law(58)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_jitted_step_is_the_step(name: str) -> None:
    def program() -> tuple[Run, Run]:
        return tuple(run(jits, [make() for make in STRATEGIES[name]]) for jits in (True, False))  # type: ignore[return-value]

    for found, expected in comm.simulate(program, world_size=2):
        assert found[2] == []
        assert_same(found, expected)


def checkpointed(apply: Any) -> Callable[..., Any]:
    return lambda params, batch: checkpoint(apply, params, batch, use_reentrant=False).square().mean()


def drawing(apply: Any) -> Callable[..., Any]:
    def loss(params: Any, batch: Tensor, key: fds.Key | None) -> Any:
        out = apply(params, batch)
        out = out if key is None else key.dropout(out, 0.5, "out")
        return fds.Weighted(out.square().sum(), (batch > 0).sum()), {"large": fds.Weighted((out > 0.5).sum(), out.numel())}

    return loss


@pytest.mark.sample(2)
@pytest.mark.law(58)
@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (lambda: blocks(nn.BatchNorm1d(WIDTH)), squared),
        (lambda: blocks(nn.Dropout(0.5)), squared),
        (blocks, checkpointed),
        (blocks, drawing),
    ],
    ids=["buffers", "torch's generator", "torch's checkpoint", "key, Weighted and metrics"],
)
def test_buffers_draws_and_weights(make: Callable[[], nn.Module], loss: Any) -> None:
    def program() -> tuple[Run, Run]:
        return tuple(run(jits, [T.zero(3)], make, loss) for jits in (True, False))  # type: ignore[return-value]

    for found, expected in comm.simulate(program, world_size=2):
        assert found[2] == []
        assert_same(found, expected, sent=False)  # the eager step gathers units once more to look what the modules write


def on_processes() -> list[tuple[Run, Run]]:
    joined = {"passes": (regather(live=2), schedule(ahead=1), bucketing(1 << 20))}
    return [
        (run(True, [T.zero(stage), T.clip(1.0)], **more), run(False, [T.zero(stage), T.clip(1.0)]))
        for stage, more in ((1, {}), (3, {}), (3, joined))
    ]


@pytest.mark.law(58)
def test_on_real_processes() -> None:
    for runs in comm.spawn(on_processes, world_size=2):
        for number, (found, expected) in enumerate(runs):
            assert found[2] == []
            assert_same(found, expected, sent=number < 2)  # the last has fewer calls


# -- passes ------------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Blocks between two uses of one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.ends = blocks(count=3), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.ends(self.blocks(self.ends(x)))
        return found


@pytest.mark.law(58)
@pytest.mark.parametrize(("make", "live"), [(lambda: blocks(count=5), 1), (Tied, 2)])
def test_no_more_whole_units_than_in_the_eager_step(make: Callable[[], nn.Module], live: int) -> None:
    """At most ``max_live_units + prefetch`` at any node, however many blocks there are."""

    def program() -> tuple[int, int, str]:
        apply, params = fds.functional(make())
        step = fds.jit(T.zero(3, max_live_units=live)(fds.train_step(squared(apply), fds.adamw(0.1))))
        state, _ = step(step.init(params), own_batch(0))
        whole = max(now.units for now in step.graph(state, own_batch(1)).live().values())
        plain = fds.jit(step, passes=()).graph(state, own_batch(1))
        return whole, max(now.units for now in plain.live().values()), str(plain)

    whole, without_passes, shown = comm.simulate(program, world_size=2)[0]
    assert whole <= live + 1
    assert without_passes >= 4  # all that the backward pass uses
    assert "wait reduce_scatter of " in shown
    assert [line for line in shown.splitlines() if not line.startswith(" ")][:2] == ["forward:", "backward:"]


def tied_run() -> tuple[Run, Run]:
    return run(True, [T.zero(3)], Tied), run(False, [T.zero(3)], Tied)


@pytest.mark.law(58)
def test_gathers_are_those_of_the_eager_step() -> None:
    for found, expected in comm.simulate(tied_run, world_size=2):
        assert_same(found, expected)


@pytest.mark.law(58)
@pytest.mark.parametrize("passes", [(schedule(ahead=3), regather(live=1)), (schedule(ahead=0),)])
def test_passes_change_no_value(passes: Any) -> None:
    def program() -> tuple[Run, Run]:
        return run(True, [T.zero(3)], passes=passes), run(False, [T.zero(3)])

    for found, expected in comm.simulate(program, world_size=2):
        assert found[2] == []
        assert_same(found, expected, sent=False)


def test_a_pass_leaves_the_graph_that_it_is_given() -> None:
    def program() -> bool:
        apply, params = fds.functional(blocks())
        step = fds.jit(T.zero(3)(fds.train_step(squared(apply), fds.adamw(0.1))), passes=())
        state, _ = step(step.init(params), own_batch(0))
        graph = step.graph(state, own_batch(1))
        before = str(graph), len(graph.sites)
        again = schedule(ahead=2)(regather(live=1, reshard=True)(graph))
        return (str(graph), len(graph.sites)) == before and str(again) != str(graph)

    assert all(comm.simulate(program, world_size=2))


def test_a_pass_of_ones_own() -> None:
    seen: list[StepGraph] = []

    def mine(graph: StepGraph) -> StepGraph:
        seen.append(graph)
        return graph

    found, expected = run(True, [], passes=[mine]), run(False, [])
    assert_same(found, expected)
    assert [repr(graph)[:10] for graph in seen] == ["StepGraph("]


# -- what runs eagerly -------------------------------------------------------------------------------------------------


def branching(apply: Any) -> Callable[..., Any]:
    return lambda params, batch: apply(params, batch).square().mean() * (2.0 if batch.sum().item() > 0 else 1.0)


def with_constant(apply: Any) -> Callable[..., Any]:
    scale = torch.full((), 2.0)
    return lambda params, batch: apply(params, batch).square().mean() * scale


def by_address(apply: Any) -> Callable[..., Any]:
    return lambda params, batch: apply(params, batch).square().mean() * (1.0 + (batch.data_ptr() == 0))


class _Redrawing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * torch.rand_like(grad)


def redrawing(apply: Any) -> Callable[..., Any]:
    return lambda params, batch: _Redrawing.apply(apply(params, batch)).sum()


def on_one_rank_alone(apply: Any) -> Callable[..., Any]:
    return branching(apply) if comm.world().rank else squared(apply)


class Noting(nn.Module):
    """Sets attributes in its forward pass: a tensor, a number or an object, and computes with them in the next step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.kind = nn.Linear(WIDTH, WIDTH), kind
        self.last: Any = {"tensor": torch.zeros(()), "number": 0, "object": {1}}[kind]

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x)
        before = len(self.last) if isinstance(self.last, set) else self.last
        found = found * (1.0 + before)
        self.last = {
            "tensor": lambda: found.detach().mean(),
            "number": lambda: before + 1,
            "object": lambda: {*range(before + 1)},
        }[self.kind]()
        return found


@pytest.mark.law(58)
@pytest.mark.parametrize("kind", ["tensor", "number", "object"])
def test_attributes_that_a_forward_pass_sets(kind: str) -> None:
    """A tensor is a result of the graph; a number makes another kind of state, and an object an eager step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", JitWarning)
        found, expected = (run(jits, [], lambda: Noting(kind)) for jits in (True, False))
    assert_same(found, expected)
    assert bool(found[2]) == (kind == "object")


@pytest.mark.law(58)
@pytest.mark.parametrize(
    ("transforms", "loss", "reason"),
    [
        ([], branching, "reads a value on the host"),
        ([], with_constant, "neither in the state nor in the batch"),
        ([], by_address, "data_ptr"),
        ([], redrawing, "draws random numbers anew"),
        ([], on_one_rank_alone, "on rank 1, the step reads a value on the host"),
    ],
)
def test_what_cannot_be_traced_runs_eagerly(transforms: Any, loss: Any, reason: str) -> None:
    def program() -> tuple[Run, Run]:
        made = [[T.zero(3), *(make() for make in transforms)] for _ in range(2)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", JitWarning)
            return run(True, made[0], loss=loss), run(False, made[1], loss=loss)

    for found, expected in comm.simulate(program, world_size=2):
        assert len(found[2]) == 1
        assert reason in found[2][0]
        assert_same(found, expected)


def without_first_block(apply: Any) -> Callable[..., Any]:
    rank = comm.world().rank
    return lambda params, batch: apply.within(params, lambda net: net[1:](batch) if rank else net(batch)).square().mean()


@pytest.mark.parametrize(
    ("unused", "reason"),
    [("skip", "on rank 1, RuntimeError: the loss does not use '0.0.bias'"), ("zeros", "ranks 0 and 1 start other collectives")],
)
def test_ranks_whose_graphs_differ_stay_eager(unused: str, reason: str) -> None:
    """Rank 0 would wait in a gather that rank 1's graph lacks."""

    def program() -> tuple[Run, Run]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", JitWarning)
            found, expected = (run(jits, [T.zero(3)], loss=without_first_block, unused=unused) for jits in (True, False))
            return found, expected

    for found, expected in comm.simulate(program, world_size=2):
        assert len(found[2]) == 1
        assert reason in found[2][0]
        assert_same(found, expected)


def test_shapes_that_change_on_one_rank() -> None:
    """The ranks decide together, so a rank with a new shape leaves none in a collective."""

    def program(jits: bool) -> tuple[list[float], list[str]]:
        apply, params = fds.functional(blocks(count=2))
        step: Any = T.zero(3)(fds.train_step(squared(apply), fds.adamw(0.1)))
        step = fds.jit(step, max_graphs=2) if jits else step
        state, losses = step.init(params), []
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", JitWarning)
            for rows in (4, 4, 5, 4, 6, 7):
                state, metrics = step(state, own_batch(rows, rows if comm.world().rank else 4))
                losses.append(metrics["loss"].item())
        return losses, [str(each.message) for each in told]

    found, expected = (comm.simulate(program, jits, world_size=2) for jits in (True, False))
    assert [losses for losses, _ in found] == [losses for losses, _ in expected]
    assert any("2 kinds of states and batches were traced already" in text for text in found[0][1])


@pytest.mark.parametrize("known", [True, False])
def test_modes_of_modules_are_looked_at(known: bool) -> None:
    """Also those of modules whose params came to the state without a mark."""
    apply, params = fds.functional(blocks(nn.Dropout(0.9)))
    params = params if known else {name: leaf.detach().clone() for name, leaf in params.items()}
    step = fds.jit(fds.train_step(squared(apply), fds.sgd(0.0)))
    state = step.init(params)
    for _ in range(2):
        state, _ = step(state, own_batch(0))
    apply.module.eval()
    for _ in range(3):
        state, metrics = step(state, own_batch(0))
        assert torch.equal(metrics["loss"], step.evaluate(state, own_batch(0)))
    apply.module.train()
    assert not torch.equal(step(state, own_batch(0))[1]["loss"], metrics["loss"])
    assert step.reasons == []


# -- states ------------------------------------------------------------------------------------------------------------


def shared_batches() -> list[Any]:
    """One tensor at two places, then two of its shape; parts of one tensor."""
    x, y = own_batch(0), own_batch(1)
    both = torch.cat([x, y])
    return [{"x": x, "y": x}, {"x": x, "y": x}, {"x": x, "y": y}, {"x": both[:4], "y": both[4:]}, {"x": y, "y": y}]


def alternating_signs() -> list[Any]:
    return [{"x": own_batch(0), "y": number} for number in (0.0, 0.0, -0.0, 1.0, float("nan"))]


def conjugates() -> list[Any]:
    z = torch.complex(own_batch(0), own_batch(1))
    return [{"x": own_batch(0), "y": y} for y in (z, z, z.conj(), z.conj().imag, z.resolve_conj())]


def differing(params: Any, batch: Any) -> Tensor:
    y = batch["y"] if isinstance(batch["y"], Tensor) else torch.full((), math.copysign(1.0, batch["y"]))
    return (batch["x"] @ params["w"] - y).abs().square().sum()


def writing(params: Any, batch: Any) -> Tensor:
    x = batch["x"].clone()
    batch["x"].mul_(2)
    result = (x @ params["w"] - batch["y"]).square().sum()
    batch["x"].div_(2)
    return result


def runs_on(batches: Callable[[], list[Any]], loss: Callable[..., Any] = differing) -> None:
    def program(jits: bool) -> list[Any]:
        step: Any = T.zero(1)(fds.train_step(loss, fds.sgd(0.01)))
        step = fds.jit(step) if jits else step
        state, told = step.init({"w": torch.eye(WIDTH)}), []
        for batch in batches():
            state, metrics = step(state, batch)
            told.append(repr(metrics["loss"].item()))
        return [*told, repr(step.params(state)["w"].tolist())]

    eager, jitted = (comm.simulate(program, jits, world_size=2) for jits in (False, True))
    assert jitted == eager


@pytest.mark.law(58)
@pytest.mark.parametrize("batches", [shared_batches, alternating_signs, conjugates])
def test_what_a_batch_has_at_its_places(batches: Callable[[], list[Any]]) -> None:
    """A tensor at two places, 0.0 and -0.0, and tensors whose conjugation is delayed."""
    runs_on(batches)


@pytest.mark.law(58)
def test_a_batch_that_the_loss_writes_into() -> None:
    runs_on(shared_batches, writing)


@pytest.mark.parametrize(
    ("batches", "bug"),
    [
        (
            shared_batches,
            Bug("one input for two places", "compiling.graphs.graph_trace:_at_places", "first[id(leaf)] != place", "False"),
        ),
        (
            alternating_signs,
            Bug(
                "0.0 is -0.0",
                "compiling.jitted.graph_kind:leaf_kind",
                "repr(leaf) if isinstance(leaf, float | complex) else leaf",
                "leaf",
            ),
        ),
    ],
    ids=lambda case: getattr(case, "name", None),
)
def test_a_planted_bug_is_seen(batches: Callable[[], list[Any]], bug: Bug) -> None:
    with planted(bug), pytest.raises(AssertionError):
        runs_on(batches)


def stepped() -> tuple[fds.compiling.JitStep, fds.State]:
    apply, params = fds.functional(blocks(count=2))
    step = fds.jit(fds.train_step(squared(apply), fds.adamw(0.1)))
    state, _ = step(step.init(params), own_batch(0))
    return step, state


def test_a_donated_state_is_spent() -> None:
    step, state = stepped()
    alias, memory = state.put(), fds.tree.leaves(state.params)[0]
    new, _ = step(state, own_batch(1))
    assert fds.tree.leaves(new.params)[0].data_ptr() == memory.data_ptr()
    with pytest.raises(fds.DonatedStateError):
        step(state, own_batch(1))
    with pytest.raises(fds.DonatedStateError):
        step(alias, own_batch(1))


def test_a_kept_state_stays() -> None:
    step, state = stepped()
    before = [leaf.clone() for leaf in fds.tree.leaves(state)]
    one, _ = step(state, own_batch(1), donate=False)
    assert all(map(torch.equal, before, fds.tree.leaves(state)))
    other, _ = step(state, own_batch(1))
    assert not all(map(torch.equal, before, fds.tree.leaves(one)))
    assert all(map(torch.equal, fds.tree.leaves(one), fds.tree.leaves(other)))


def test_several_states_share_a_graph() -> None:
    step, state = stepped()
    apply_state, _ = step(state.clone(), own_batch(1))
    other, _ = step(state, own_batch(1))
    assert all(map(torch.equal, fds.tree.leaves(apply_state), fds.tree.leaves(other)))


def test_a_checkpoint_in_between(tmp_path: Path) -> None:
    step, state = stepped()
    state, _ = step(state, own_batch(1))
    fds.save(state, tmp_path)
    apply, params = fds.functional(blocks(count=2))
    again = fds.jit(fds.train_step(squared(apply), fds.adamw(0.1)))
    loaded = fds.load(tmp_path, like=again.init(params))
    for i in (2, 3):
        state, loaded = step(state, own_batch(i))[0], again(loaded, own_batch(i))[0]
    assert all(map(torch.equal, fds.tree.leaves(state), fds.tree.leaves(loaded)))
    assert again.reasons == []


def test_a_jitted_step_is_composed_further() -> None:
    found, expected = run(True, []), run(False, [T.clip(0.1)])
    apply, params = fds.functional(blocks())
    step = T.clip(0.1)(fds.jit(fds.train_step(squared(apply), fds.adamw(0.05))))
    state = step.init(params)
    for i in range(3):
        state, metrics = step(state, own_batch(i))
    assert isinstance(step, fds.compiling.JitStep)
    assert repr(metrics["loss"].item()) == expected[0][2]["loss"] != found[0][2]["loss"]


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: fds.jit(lambda state, batch: state), TypeError, "is not a Step"),  # type: ignore[arg-type]
        (lambda: fds.jit(stepped()[0], max_graphs=0), ValueError, "max_graphs=0"),
        (lambda: regather(live=0), ValueError, "live=0"),
        (lambda: schedule(ahead=-1), ValueError, "ahead=-1"),
        (lambda: stepped()[0].graph(stepped()[0].init({"w": torch.ones(2)}), torch.ones(2)), UntraceableError, "no step yet"),
    ],
)
def test_bad_arguments(make: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_a_graph_that_fails_leaves_the_state() -> None:
    step, state = stepped()
    before = [leaf.clone() for leaf in fds.tree.leaves(state)]

    def failing(graph: StepGraph) -> StepGraph:
        first = next(node for node in graph.module.graph.nodes if node.op == "call_function")
        with graph.module.graph.inserting_before(first):
            graph.module.graph.call_function(_fail, ())
        graph.module.recompile()
        return graph

    broken = fds.jit(step, passes=[failing])
    with pytest.raises(ArithmeticError, match="planted"):
        broken(state, own_batch(1))
    assert all(map(torch.equal, before, fds.tree.leaves(state)))


def _fail() -> None:
    raise ArithmeticError("planted")
