"""Law 58 for experts: their exchange is a call in the graph, forward and backward, with equal bits and bytes."""

import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import functional_ds as fds
from functional_ds import comm, moe
from functional_ds import transforms as T
from functional_ds.compiling import JitWarning
from functional_ds.compiling.graphs.eager_calls import RUN, RUN_BACKWARD, _Kept
from functional_ds.compiling.graphs.graph_collectives import START, WAIT, carrying_out
from functional_ds.dry_run.operations import OperationCounter
from functional_ds.step.axes import axis
from tests.compiling.test_graph_live import Measuring
from tests.planting import Bug, planted

WIDE = 8
Found = tuple[list[str], list[Tensor], list[Any], list[str]]


def stepped(jits: bool, stage: int, more: Any, way: Any, capacity: Any, backend: str) -> Found:
    mesh = comm.mesh(dp=comm.world().size).split("dp", edp=1, ep=comm.world().size)

    def block(p: Any, x: Tensor) -> Tensor:
        routing = moe.route(x @ p["router"].T, 2, capacity=capacity)
        own = moe.gated_mlp(p["up"], p["down"])
        return x + moe.exchange(own, x, routing=routing, way=way, shared=lambda x: torch.tanh(x * p["scale"]))

    def loss(p: Any, x: Tensor) -> Tensor:
        return block(p["b"], block(p["a"], x)).square().mean()

    draws = torch.Generator().manual_seed(0)
    shapes = {"router": (4, WIDE), "up": (4, 8, WIDE), "down": (4, WIDE, 4), "scale": (WIDE,)}
    params = {layer: {name: torch.randn(shape, generator=draws) / 2 for name, shape in shapes.items()} for layer in "ab"}
    chain = fds.compose(*(each() for each in more), T.zero(stage, mesh["edp", "ep"]), T.experts("up|down", mesh["ep"]))
    step: Any = chain(fds.train_step(loss, fds.adamw(0.01)))
    step = fds.jit(step, backend=backend) if jits else step
    state, told = step.init(params), []
    with comm.ledger() as book, warnings.catch_warnings():
        warnings.simplefilter("ignore", JitWarning)
        for i in range(3):
            state, metrics = step(state, torch.randn(8, WIDE, generator=draws) * (1 + comm.world().rank) + i)
            told.append(repr(metrics["loss"].item()))
    rows = [row for row in book.rows if not row.group.endswith(("/control", "/jit"))]
    return told, [x for x in fds.tree.leaves(state) if isinstance(x, Tensor)], rows, step.reasons if jits else []


def both(*given: Any) -> tuple[Found, Found]:
    return stepped(True, *given), stepped(False, *given)


def assert_same(found: Found, expected: Found) -> None:
    assert found[3] == []
    assert found[0] == expected[0]
    assert all(map(torch.equal, found[1], expected[1]))
    assert found[2] == expected[2]


@pytest.mark.law(58)
@settings(max_examples=settings.default.max_examples // 3, deadline=None)
@given(
    stage=st.integers(0, 3),
    more=st.sampled_from([[], [lambda: T.mixed_precision("bf16")]]),
    way=st.sampled_from(["auto", "all_to_all", "gather", "by_rank"]),
    capacity=st.sampled_from([None, moe.Capacity(1.0, rows=8), moe.Capacity(4.0, rows=8, drop="error")]),
    backend=st.sampled_from(["fx", "aot_eager"]),
    ranks=st.integers(1, 2),
)
def test_a_step_with_experts(stage: int, more: Any, way: Any, capacity: Any, backend: str, ranks: int) -> None:
    for found, expected in comm.simulate(both, stage, more, way, capacity, backend, world_size=ranks):
        assert_same(found, expected)


def exchanged() -> tuple[Found, Found]:
    return both(3, [], "auto", None, "fx")


@pytest.mark.law(58)
def test_on_real_processes() -> None:
    for found, expected in comm.spawn(exchanged, world_size=2):
        assert_same(found, expected)


def on_two() -> None:
    for found, expected in comm.simulate(exchanged, world_size=2):
        assert_same(found, expected)


def traced(f: Callable[..., Any]) -> tuple[fds.compiling.JitStep, Any]:
    params = {"router": torch.randn(4, WIDE), "up": torch.randn(4, WIDE, WIDE), "down": torch.randn(4, WIDE, WIDE)}
    step = fds.jit(
        fds.train_step(
            lambda p, x: moe.exchange(f(p), x, routing=moe.route(x @ p["router"].T, 2)).square().mean(), fds.sgd(0.1)
        )
    )
    return step, step(step.init(params), torch.randn(6, WIDE))[0]


def test_the_graph_has_a_node_each_way() -> None:
    step, state = traced(lambda p: moe.mlp(p["up"], p["down"]))
    graph = step.graph(state, torch.randn(6, WIDE))
    targets = [node.target for node in graph.module.graph.nodes]
    assert (targets.count(RUN), targets.count(RUN_BACKWARD)) == (1, 1)


def evenly(ranks: int, way: Any, kept: list[tuple[weakref.ref[Any], int]]) -> None:
    """What a graph says of a step that gives each expert as many rows is what the step does."""
    mesh = comm.mesh(dp=ranks).split("dp", edp=1, ep=ranks)

    def loss(p: Any, x: Tensor) -> Tensor:
        for name in "ab":
            own = moe.gated_mlp(p[name]["up"], p[name]["down"])
            routing = moe.Routing(torch.arange(len(x)).reshape(-1, 1) % 4, x[:, :1].sigmoid(), 4)
            x = torch.tanh(moe.exchange(own, x, routing=routing, way=way))
        return x.square().mean()

    shapes = {"up": (4, 8, WIDE), "down": (4, WIDE, 4)}
    params = {name: {leaf: torch.randn(shape) for leaf, shape in shapes.items()} for name in "ab"}
    step = fds.compose(T.zero(3, mesh["edp", "ep"]), T.experts("up|down", mesh["ep"]))(fds.train_step(loss, fds.adamw(0.01)))
    jitted, x = fds.jit(step), torch.randn(8, WIDE)
    state, _ = jitted(jitted.init(params), x)
    graph = jitted.graph(state, x)
    cost = graph.cost(fds.scaling.Machine("mine", 1e9, 1e9, 1e9, link_bandwidth=1e9))
    with comm.ledger() as book, OperationCounter() as counter:
        step(state, x, donate=False)
    assert cost.sent == [row for row in book.rows if not row.group.endswith("/control")]
    assert cost.flops == counter.flops > 0
    assert cost.seconds == pytest.approx(cost.compute + cost.host + sum(cost.exposed.values()))

    run, held, told = Measuring(graph), graph.live(), list[tuple[str, int, int]]()
    kept.clear()
    on_the_way, beside, run_node = 0, dict[Any, int](), run.run_node

    def measured(n: Any) -> Any:
        nonlocal on_the_way
        found = run_node(n)
        beside[n] = sum(size for alive, size in kept if alive() is not None)
        on_the_way += sum(x.nbytes for x in next(iter(n.users)).meta["val"]) if n.target is START else 0
        on_the_way -= sum(x.nbytes for x in n.meta["val"]) if n.target is WAIT else 0
        told.append((n, run.found[n][0] + beside[n] + on_the_way, held[n].bytes))
        return found

    run.run_node = measured  # type: ignore[method-assign]
    with torch.no_grad(), carrying_out(graph.sites):
        run.run(*fds.tree.leaves((state, x)))
    assert max(beside.values()) > 0
    for node, found, counted in told:
        assert found <= counted if node.target is RUN_BACKWARD else found == counted, node


@pytest.mark.law(58)
@pytest.mark.parametrize(("ranks", "way"), [(1, "auto"), (2, "all_to_all"), (2, "gather")])
def test_a_graph_counts_what_even_exchanges_do(ranks: int, way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = threading.local()
    pack = _Kept._pack

    def noting(self: Any, x: Tensor) -> Any:
        found = pack(self, x)
        if isinstance(found, Tensor) and id(storage := x.untyped_storage()) not in {id(ref()) for ref, _ in kept.found}:
            kept.found.append((weakref.ref(storage), storage.nbytes()))
        return found

    def program() -> None:
        kept.found = []
        evenly(ranks, way, kept.found)

    monkeypatch.setattr(_Kept, "_pack", noting)
    comm.simulate(program, world_size=ranks)


class Holding:
    """An expert function whose tensors are attributes."""

    def __init__(self, p: Any) -> None:
        self.own = moe.mlp(p["up"], p["down"])

    def __call__(self, rows: Tensor, groups: Any) -> Tensor:
        return self.own(rows, groups)


def drawing(p: Any) -> Callable[..., Tensor]:
    return moe.mlp(p["up"], p["down"], activation=torch.nn.functional.dropout)


@pytest.mark.parametrize(("f", "reason"), [(Holding, "are not variables of it"), (drawing, "draws by torch's generator")])
def test_what_a_call_cannot_do_stays_eager(f: Callable[..., Any], reason: str) -> None:
    step, state = traced(f)
    with pytest.warns(JitWarning, match=reason):
        step(state, torch.randn(6, WIDE))


def of_other_losses(case: str) -> None:
    """Two ranks: a function that asks for an axis of the step, which a graph lacks; and a rank without rows."""
    mesh, rank = comm.mesh(dp=2).split("dp", edp=1, ep=2), comm.world().rank

    def loss(p: Any, x: Tensor) -> Tensor:
        up, down = p["up"], p["down"]

        def asking(rows: Tensor, groups: Any) -> Tensor:
            return moe.mlp(up, down)(rows, groups) * (1.0 if axis("ep") else 2.0)

        y = moe.exchange(asking if case == "axis" else moe.mlp(up, down), x, routing=moe.route(x @ p["router"].T, 2))
        return y.square().mean() if len(x) else p["router"].sum() * 0  # reaches the exchange in no other way

    def run(jits: bool) -> Found:
        draws = torch.Generator().manual_seed(0)
        params = {"router": torch.randn(4, WIDE, generator=draws)}
        params |= {name: torch.randn(4, WIDE, WIDE, generator=draws) for name in ("up", "down")}
        chain = fds.compose(T.zero(3, mesh["edp", "ep"]), T.experts("up|down", mesh["ep"]))
        step: Any = chain(fds.train_step(loss, fds.adamw(0.01), unused="zeros"))
        step = fds.jit(step) if jits else step
        state, told, rows = step.init(params), [], 0 if case == "no rows" and rank else 6
        with comm.ledger() as book, warnings.catch_warnings():
            warnings.simplefilter("ignore", JitWarning)
            for _ in range(3):
                state, metrics = step(state, torch.randn(rows, WIDE, generator=draws))
                told.append(repr(metrics["loss"].item()))
        sent = [row for row in book.rows if not row.group.endswith(("/control", "/jit"))]
        return told, [x for x in fds.tree.leaves(state) if isinstance(x, Tensor)], sent, step.reasons if jits else []

    (*found, reasons), expected = run(True), run(False)
    assert [case == "axis" and "axis 'ep'" in reason for reason in reasons] == [True] * (case == "axis")
    assert_same((*found, []), expected)


@pytest.mark.law(58)
@pytest.mark.parametrize("case", ["axis", "no rows"])
def test_another_loss(case: str) -> None:
    comm.simulate(of_other_losses, case, world_size=2)


class Block(torch.nn.Module):
    """Experts in a module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = torch.nn.Linear(WIDE, 4)
        self.up, self.down = (torch.nn.Parameter(torch.randn(4, WIDE, WIDE) / 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + moe.exchange(moe.mlp(self.up, self.down), x, routing=moe.route(self.router(x), 2))


@pytest.mark.law(58)
@pytest.mark.parametrize("policy", ["recompute", "offload"])
def test_recomputed_exchanges_stay_eager(policy: str) -> None:
    def program(jits: bool) -> Found:
        mesh = comm.mesh(dp=2).split("dp", edp=1, ep=2)
        apply, params = fds.functional(torch.nn.Sequential(Block(), Block()))
        chain = fds.compose(T.zero(3, mesh["edp", "ep"]), T.experts("up|down", mesh["ep"]), T.remat("*", policy=policy))
        step: Any = chain(fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.adamw(0.05)))
        step = fds.jit(step) if jits else step
        state, told = step.init(params), []
        warnings.simplefilter("ignore", JitWarning)
        for i in range(3):
            state, metrics = step(state, torch.full((4, WIDE), 1.0 + i).cumsum(1).sin() + comm.world().rank)
            told.append(repr(metrics["loss"].item()))
        return told, [x for x in fds.tree.leaves(state) if isinstance(x, Tensor)], [], step.reasons if jits else []

    for found, expected in zip(*(comm.simulate(program, jits, world_size=2) for jits in (True, False)), strict=True):
        assert "recomputed or offloaded" in found[3][0]
        assert_same((*found[:3], []), expected)


CALLS = "compiling.graphs.eager_calls"
EXCHANGE = "parallel.experts.token_exchange"
BUGS: list[tuple[Callable[[], Any], Bug]] = [
    (
        lambda: comm.simulate(of_other_losses, "axis", world_size=2),
        Bug("a call has no axes", "compiling.graphs.eager_calls:_AxesOutside.get", "name in self", "False", Exception),
    ),
    (
        lambda: comm.simulate(of_other_losses, "no rows", world_size=2),
        Bug(
            "a rank without rows stays away",
            "parallel.experts.token_exchange:exchange",
            "size > 1 and (not len(rows))",
            "False",
            Exception,
        ),
    ),
    (
        on_two,
        Bug(
            "gradients are mixed up",
            "compiling.graphs.eager_calls:_Kept.gradients",
            "torch.autograd.grad([out], self.edges, [grad], allow_unused=True)",
            "torch.autograd.grad([out], self.edges[::-1], [grad], allow_unused=True)",
            Exception,
        ),
    ),
    (
        on_two,
        Bug(
            "what was given is kept at another place",
            "compiling.graphs.eager_calls:_Kept.of",
            "(place, x.detach())",
            "(0, x.detach())",
            Exception,
        ),
    ),
]


@pytest.mark.parametrize(("law", "bug"), BUGS, ids=[bug.name for _, bug in BUGS])
def test_a_bug_is_seen(law: Callable[[], Any], bug: Bug) -> None:
    with planted(bug), pytest.raises(bug.shows):
        law()
