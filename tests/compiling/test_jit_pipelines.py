"""Law 58 for pipelines: each rank's graph has the messages of its row; ranks that would not meet stay eager, by name."""

import gc
import warnings
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm, compiling, moe
from functional_ds import pipelining as pp
from functional_ds import transforms as T
from functional_ds.comm.table.errors import DeadlockError
from functional_ds.compiling import JitWarning, StepGraph
from functional_ds.compiling.graphs.graph_collectives import START, WAIT
from tests.compiling.test_graph_live import counted
from tests.planting import Bug, planted

WIDTH = 4
ROWS = (6, 6, 6, 7, 7)
Told = tuple[list[Any], list[Any], list[str], list[Any]]


class Block(nn.Module):
    """With a buffer that a forward pass counts up."""

    def __init__(self, *more: nn.Module) -> None:
        super().__init__()
        self.linear, self.more = nn.Linear(WIDTH, WIDTH), nn.Sequential(*more)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + x.detach().mean()
        y: Tensor = self.more(self.linear(x).tanh())
        return y


def frozen(stages: int) -> tuple[pp.Stages, Any]:
    """No gradients go back to the first stage."""
    params = [{"w": torch.eye(WIDTH) + i / 8} for i in range(stages)]
    params[0]["w"] = fds.freeze(params[0]["w"])
    return pp.stages([lambda p, x: torch.tanh(x @ p["w"])] * stages, params, loss=error), params


def routed(p: Any, x: Tensor) -> Tensor:
    routing = moe.route(x @ p["router"].T, 2)
    return x + moe.exchange(moe.mlp(p["up"], p["down"]), x, routing=routing)


def experts(stages: int) -> tuple[pp.Stages, Any]:
    draws = torch.Generator().manual_seed(0)
    shapes = {"router": (4, WIDTH), "up": (4, 8, WIDTH), "down": (4, WIDTH, 8)}
    params = [{name: torch.randn(shape, generator=draws) / 4 for name, shape in shapes.items()} for _ in range(stages)]
    return pp.stages([routed] * stages, params, loss=error), params


def error(y: Tensor, batch: Any) -> Tensor:
    return (y - batch[1]).square().mean()


def rows(count: int, i: int = 0) -> Any:
    draws = torch.Generator().manual_seed(i)
    return torch.randn(count, WIDTH, generator=draws), torch.randn(count, WIDTH, generator=draws)


def cut(stages: int, *more: nn.Module) -> tuple[pp.Stages, Any]:
    torch.manual_seed(3)
    net = nn.Sequential(*(Block(*more) for _ in range(stages)))
    return pp.cut(net, stages, example=rows(4), loss=error)


def scaled(p: Any, x: Any) -> Any:
    w, scale = p
    x, where = x if len(x) == 2 and x[1].dtype == torch.bool else (x[0], x[1] > 0)
    return torch.where(where, torch.tanh(x @ w * scale), x), where


def sharing(stages: int) -> tuple[pp.Stages, Any]:
    """A leaf that the stages of all ranks use; they send a mask, too, which takes no gradient."""
    params = {"w": [torch.eye(WIDTH) + i / 8 for i in range(stages)], "scale": torch.tensor(1.5)}
    pieces = [pp.Piece(scaled, (f"w.{i}", "scale")) for i in range(stages)]
    return pp.stages(pieces, params, loss=lambda y, batch: (y[0] - batch[1]).square().mean()), params


def dropping(stages: int) -> tuple[pp.Stages, Any]:
    return cut(stages, nn.Dropout(0.5))


def trained(
    schedule: pp.Schedule,
    jits: bool,
    before: Sequence[Callable[[Any], Any]] = (),
    behind: Sequence[Callable[[], Any]] = (),
    make: Callable[[int], tuple[pp.Stages, Any]] = cut,
    counts: Sequence[int] = ROWS,
    resident: int | None = None,
    **options: Any,
) -> Told:
    """Metrics, the state's leaves, why something ran eagerly, and what was sent."""
    model, params = make(schedule.stages)
    mesh = comm.mesh(dp=comm.world().size // schedule.ranks, pp=schedule.ranks)
    piped = T.pipeline(schedule, model, mesh["pp"], resident=resident)
    strategy = *(each(mesh) for each in before), piped, *(each() for each in behind)
    step: Any = fds.compose(*strategy)(fds.train_step(model, fds.adamw(0.05)))
    step = fds.jit(step, **options) if jits else step
    state, told = step.init(params), []
    with comm.ledger() as book, warnings.catch_warnings():
        warnings.simplefilter("ignore", JitWarning)
        for i, count in enumerate(counts):
            batch = fds.tree.map(lambda x: x.tensor_split(mesh["dp"].size)[mesh["dp"].rank], rows(count * mesh["dp"].size, i))
            state, metrics = step(state, batch)
            told.append({name: repr(value.item()) for name, value in metrics.items()})
        told.append(repr(step.evaluate(state, batch).item()))
    sent = [row for row in book.rows if not row.group.endswith(("/control", "/jit"))]
    if jits and not step.reasons:  # all but the first step, and one of a new shape
        assert sum(entry.code.runs for entry in step._cache.entries.values()) >= len(counts) - 2
    return told, fds.tree.leaves(state), step.reasons if jits else [], sent


def assert_same(found: Told, expected: Told, *, sent: bool = True) -> None:
    assert found[0] == expected[0]
    for leaf, other in zip(found[1], expected[1], strict=True):
        assert torch.equal(leaf, other) if isinstance(leaf, Tensor) else leaf == other
    assert found[3] == expected[3] or not sent


def zero(stage: int) -> Callable[[Any], Any]:
    return lambda mesh: T.zero(stage, mesh["dp"])


SCHEDULES = {
    "gpipe": pp.gpipe(2, 4),
    "one micro-batch": pp.gpipe(2, 1),
    "1F1B": pp.one_f_one_b(3, 5),
    "interleaved": pp.interleaved_one_f_one_b(2, 4, v=2),
    "breadth first": pp.breadth_first(2, 3, v=2),
    "ZB-H1": pp.zb_h1(3, 4),
    "ZB-2p": pp.zb_2p(2, 3),
    "ZB-V": pp.zbv(2, 4),
    "DualPipeV": pp.dualpipe_v(2, 4),
}
CASES: dict[str, dict[str, Any]] = {
    "stage 0, clip": {"before": [zero(0)], "behind": [lambda: T.clip(0.01)]},
    "stage 1, accumulate": {
        "schedule": pp.interleaved_one_f_one_b(2, 2, v=2),
        "before": [zero(1)],
        "behind": [lambda: T.accumulate(2)],
    },
    "stage 2 in bf16": {"schedule": pp.zb_h1(2, 3), "before": [lambda mesh: T.mixed_precision("bf16"), zero(2)]},
    "stage 3": {"before": [zero(3)], "behind": [lambda: T.clip(0.01)]},
    "stage 3, one unit": {"schedule": pp.zb_h1(2, 3), "before": [lambda mesh: T.zero(3, mesh["dp"], max_live_units=1)]},
    "bf16 without zero": {"before": [lambda mesh: T.mixed_precision("bf16")]},
    "fp16, overflowing": {"before": [lambda mesh: T.mixed_precision("fp16"), zero(1)]},
    "recomputed": {"before": [zero(0)], "behind": [lambda: T.remat("*")]},
    "shared leaves": {"before": [zero(1)], "make": sharing},
    "shared leaves, split": {"schedule": pp.zbv(2, 4), "make": sharing},
    "draws": {"make": dropping},
    "no gradients for a stage": {"make": frozen},
    "experts": {"make": experts},
    "regions": {"schedule": pp.zb_h1(2, 3), "backend": "aot_eager"},
}


@pytest.mark.sample(4)
@pytest.mark.law(58)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_jitted_pipeline_is_the_pipeline(name: str) -> None:
    """Equal bits and payloads in every schedule, with a batch whose shape changes."""

    def program() -> tuple[Told, Told]:
        return trained(SCHEDULES[name], True), trained(SCHEDULES[name], False)

    for found, expected in comm.simulate(program, world_size=SCHEDULES[name].ranks):
        assert found[2] == []
        assert_same(found, expected)


@pytest.mark.sample(3)
@pytest.mark.law(58)
@pytest.mark.parametrize("name", CASES)
def test_with_other_transforms(name: str) -> None:
    case = {"schedule": pp.one_f_one_b(2, 3), "counts": (8, 8, 8)} | CASES[name]

    def program() -> tuple[Told, Told]:
        return trained(jits=True, **case), trained(jits=False, **{k: v for k, v in case.items() if k != "backend"})

    for found, expected in comm.simulate(program, world_size=(2 if "before" in case else 1) * case["schedule"].ranks):
        assert found[2] == []
        assert_same(found, expected)


@pytest.mark.law(58)
@settings(max_examples=max(1, settings.default.max_examples // 3))
@given(
    st.sampled_from([*SCHEDULES]),
    st.sampled_from([cut, sharing, dropping, frozen]),
    st.sampled_from([None, "bf16", "fp16"]),
    st.sampled_from([None, 0, 1, 2, 3]),
    st.sets(st.sampled_from(["clip", "accumulate", "remat"])),
)
def test_any_composition(name: str, make: Any, policy: str | None, stage: int | None, others: set[str]) -> None:
    """What is traced, and what stays eager, has the eager step's bits; a graph leaves out gathers that nothing uses."""
    before: list[Callable[[Any], Any]] = [] if policy is None else [lambda mesh: T.mixed_precision(policy)]
    before += [] if stage is None else [zero(stage)]
    made = {"clip": T.clip(0.01), "accumulate": T.accumulate(2), "remat": T.remat("*")}
    behind = [lambda other=other: made[other] for other in made if other in others and (make is not frozen or other != "remat")]
    options = {"before": before, "behind": behind, "make": make, "counts": (40, 40, 40, 50)}

    def program() -> tuple[Told, Told]:
        return trained(SCHEDULES[name], True, **options), trained(SCHEDULES[name], False, **options)

    for found, expected in comm.simulate(program, world_size=SCHEDULES[name].ranks * (1 if stage is None else 2)):
        assert_same(found, expected, sent=make is not frozen)


def test_a_state_keeps_no_dead_step() -> None:
    """One state, trained by steps that are made anew: what is known of a step ends with it."""

    def program() -> list[bool]:
        model, params = cut(2)
        made, state = [], None
        for i in range(4):
            step = T.pipeline(pp.one_f_one_b(2, 2), model)(fds.train_step(model, fds.sgd(0.1 + i)))
            step = fds.jit(step) if i % 2 else step
            state = step.init(params) if state is None else state
            for j in range(3):
                state, _ = step(state, rows(4, j))
            made += [weakref.ref(layer) for layer in step.layers]
            del step
        gc.collect()
        return [layer() is None for layer in made]

    assert all(map(all, comm.simulate(program, world_size=2)))


@pytest.mark.law(58)
def test_modes_of_modules() -> None:
    """Another mode is another graph."""

    def program(jits: bool) -> list[float]:
        model, params = dropping(2)
        step: Any = T.pipeline(pp.one_f_one_b(2, 2), model)(fds.train_step(model, fds.sgd(0.1)))
        step = fds.jit(step) if jits else step
        state, losses = step.init(params), []
        for i in range(8):
            assert model.apply is not None
            model.apply.module.train(i // 2 % 2 == 0)
            state, metrics = step(state, rows(4, i))
            losses.append(metrics["loss"].item())
        return losses

    assert comm.simulate(program, True, world_size=2) == comm.simulate(program, False, world_size=2)


@pytest.mark.law(58)
def test_on_processes() -> None:
    program = partial(both, pp.one_f_one_b(2, 3))
    for found, expected in comm.spawn(program, world_size=2, timeout=timedelta(minutes=2)):
        assert found[2] == []
        assert_same(found, expected)


def both(schedule: pp.Schedule) -> tuple[Told, Told]:
    return trained(schedule, True), trained(schedule, False)


# -- messages that do not match ---------------------------------------------------------------------------------------------


def changing(change: Callable[[StepGraph, list[Any]], None], rank: int = 0) -> Callable[[StepGraph], StepGraph]:
    """A pass that changes the messages that one rank sends."""

    def run(graph: StepGraph) -> StepGraph:
        graph = compiling.copied(graph)
        if comm.world().rank == rank:
            change(graph, [call for call in graph.collectives("transfer") if call.site.sends])
        return compiling.finished(graph)

    return run


def drop(graph: StepGraph, sent: list[Any]) -> None:
    graph.module.graph.erase_node(sent[1].wait)
    graph.module.graph.erase_node(sent[1].start)


def swap(graph: StepGraph, sent: list[Any]) -> None:
    """Messages of equal shapes: the second goes as the first."""
    (xs, first), (ys, second) = (call.start.args for call in sent[:2])
    for call, leaves, site in ((sent[0], xs, second), (sent[1], ys, first)):
        call.start.args, call.wait.args = (leaves, site), (call.start, leaves, site)


def halve(graph: StepGraph, sent: list[Any]) -> None:
    nodes, call = graph.module.graph, sent[0]
    with nodes.inserting_before(call.start):
        half = nodes.call_function(torch.ops.aten._to_copy.default, (call.inputs[0],), {"dtype": torch.bfloat16})
    call.start.args, call.wait.args = ([half], call.start.args[1]), (call.start, [half], call.wait.args[2])


def shorten(graph: StepGraph, sent: list[Any]) -> None:
    nodes, call = graph.module.graph, sent[0]
    with nodes.inserting_before(call.start):
        short = nodes.call_function(torch.ops.aten.slice.Tensor, (call.inputs[0], 0, 0, 1))
    call.start.args, call.wait.args = ([short], call.start.args[1]), (call.start, [short], call.wait.args[2])


def delay(graph: StepGraph, sent: list[Any]) -> None:
    """Rank 0 waits for gradients before it sends what the other rank computes them from."""
    received = [call for call in graph.collectives("transfer") if not call.site.sends]
    for call in reversed(sent):
        received[0].wait.append(call.start)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (drop, "number 2 is send(dst=1) of [float32[2, 4]] on rank 0 and recv(src=0) of [float32[2, 4]] on rank 1"),
        (swap, "number 1 is send(dst=1) of [float32[2, 4]] on rank 0 and recv(src=0) of [float32[2, 4]] on rank 1"),
        (halve, "number 1 is send(dst=1) of [bfloat16[2, 4]] on rank 0 and recv(src=0) of [float32[2, 4]] on rank 1"),
        (shorten, "number 1 is send(dst=1) of [float32[1, 4]] on rank 0 and recv(src=0) of [float32[2, 4]] on rank 1"),
        (delay, "the graphs would wait for each other forever, rank 0 in recv(src=1)"),
    ],
)
def test_messages_that_do_not_match_are_named(change: Any, reason: str) -> None:
    """And the step is the eager one, on all ranks."""

    def program() -> tuple[Told, Told]:
        schedule = pp.gpipe(2, 3)
        return trained(schedule, True, passes=[changing(change)], counts=(6, 6)), trained(schedule, False, counts=(6, 6))

    for found, expected in comm.simulate(program, world_size=2):
        assert len(found[2]) == 1
        assert reason in found[2][0], found[2][0]
        assert_same(found, expected)


def exchanging(jits: bool) -> tuple[list[float], list[str]]:
    """A loss that sends, and of which rank 1 receives another shape if it is told to."""

    def loss(p: Any, x: Tensor) -> Tensor:
        here = comm.world().rank
        y = x * p["w"]
        sent, got = comm.batch_p2p([comm.Send(y, 1 - here), comm.Recv(y, 1 - here)])
        comm_only = comm.send(x.detach(), 1) if here == 0 else comm.recv(x.detach(), 0)
        return (y * got).sum() + sent.sum() + comm_only.sum()

    step: Any = T.zero(0)(fds.train_step(loss, fds.sgd(0.1)))
    step = fds.jit(step) if jits else step
    state, losses = step.init({"w": torch.ones(2)}), []
    for i in range(3):
        state, metrics = step(state, torch.arange(2.0) + comm.world().rank + i)
        losses.append(metrics["loss"].item())
    return losses, step.reasons if jits else []


@pytest.mark.law(58)
def test_messages_of_a_loss() -> None:
    assert comm.simulate(exchanging, True, world_size=2) == comm.simulate(exchanging, False, world_size=2)


# -- as on NCCL ---------------------------------------------------------------------------------------------------------


def in_launch_order(schedule: pp.Schedule) -> None:
    for found, expected in comm.simulate(both, schedule, world_size=schedule.ranks, rules="nccl"):
        assert found[2] == []
        assert_same(found, expected)


@pytest.mark.law(58)
@pytest.mark.parametrize("schedule", [pp.one_f_one_b(2, 4), pp.zbv(2, 4)], ids=["1F1B", "ZB-V"])
def test_batches_of_messages_stay_batches(schedule: pp.Schedule) -> None:
    """NCCL runs messages in the order of their starts, so messages that face each other must be one batch."""
    in_launch_order(schedule)


def test_a_graph_by_itself_batches_nothing() -> None:
    """Where that would hang, its call is an error."""

    def program() -> None:
        model, params = cut(2)
        step = fds.jit(T.pipeline(pp.one_f_one_b(2, 2), model)(fds.train_step(model, fds.sgd(0.1))))
        state, _ = step(step.init(params), rows(4))
        step.graph(state, rows(4))(fds.tree.leaves((state, rows(4))))

    comm.simulate(program, world_size=2)
    with pytest.raises(RuntimeError, match="a graph by itself batches none"):
        comm.simulate(program, world_size=2, rules="nccl")


BUGS: dict[Any, list[Bug]] = {
    partial(in_launch_order, pp.one_f_one_b(2, 4)): [
        Bug("no batches", "compiling.jitted.graph_code:_carried_out", "_batches(graph, sites)", "{}", DeadlockError),
    ],
    partial(test_messages_that_do_not_match_are_named, swap, "number 1 is send"): [
        Bug(
            "messages have no turns",
            "compiling.jitted.graph_agreement:rank_collectives",
            "(site.call.agreement(xs, here), site.label, site.turn)",
            "site.call.agreement(xs, here)",
        ),
    ],
    partial(test_with_other_transforms, "bf16 without zero"): [
        Bug(
            "sums of micro-batches are rounded",
            "pipelining.execution.gathered:_plain",
            "type(leaf) is Tensor or is_fake(leaf)",
            "type(leaf) is Tensor",
            AssertionError,
        ),
    ],
    partial(test_a_jitted_pipeline_is_the_pipeline, "1F1B"): [
        Bug(
            "a batch gives one handle",
            "compiling.jitted.graph_code:_carried_out",
            "new.call_function(operator.getitem, (handles, i))",
            "new.call_function(operator.getitem, (handles, 0))",
            Exception,
        ),
        Bug(
            "shapes of stages are forgotten where a step is traced",
            "pipelining.execution.gradients:_layers",
            "Trait.MARKS not in layer.traits",
            "True",
            Exception,
        ),
    ],
}


@pytest.mark.sample(2)
@pytest.mark.parametrize(("law", "bug"), [pytest.param(law, bug, id=bug.name) for law, bugs in BUGS.items() for bug in bugs])
def test_a_bug_is_seen(law: Callable[[], Any], bug: Bug) -> None:
    with planted(bug), pytest.raises(bug.shows):
        law()


# -- what stays eager, and what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({"before": [zero(3)], "resident": 1}, "frees params of stages before the step ends"),
        ({"make": dropping, "behind": [lambda: T.remat("*")]}, "the backward pass draws random numbers anew"),
        ({"make": experts, "schedule": pp.zb_h1(4, 2)}, "a schedule splits the backward pass of an exchange of experts' rows"),
    ],
    ids=["resident", "recomputed draws", "experts"],
)
def test_what_stays_eager_says_why(case: dict[str, Any], reason: str) -> None:
    def program() -> tuple[Told, Told]:
        given = {"schedule": pp.interleaved_one_f_one_b(2, 2, v=2), "counts": (6, 6, 6)} | case
        return trained(jits=True, **given), trained(jits=False, **given)

    for found, expected in comm.simulate(program, world_size=4):
        assert found[2]
        assert all(reason in each for each in found[2]), found[2]
        assert_same(found, expected)


def test_a_recorder_stays_eager() -> None:
    def program() -> tuple[list[str], int]:
        model, params = cut(2)
        recorder = pp.Recorder()
        piped = T.pipeline(pp.one_f_one_b(2, 2), model, recorder=recorder)
        step = fds.jit(piped(fds.train_step(model, fds.sgd(0.1))))
        state = step.init(params)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", JitWarning)
            for _ in range(3):
                state, _ = step(state, rows(4))
        return step.reasons, len(recorder.times)

    for reasons, times in comm.simulate(program, world_size=2):
        assert "a pipeline's recorder= notes actions as they run" in reasons[0]
        assert times == 4


def test_a_pipelines_graph() -> None:
    """It is printed, counts memory, and says that its time cannot be predicted from one rank."""

    def program() -> tuple[str, int]:
        model, params = cut(2)
        step = fds.jit(T.pipeline(pp.one_f_one_b(2, 2), model)(fds.train_step(model, fds.sgd(0.1))))
        state, _ = step(step.init(params), rows(4))
        graph = step.graph(state, rows(4))
        machine = fds.scaling.Machine("mine", flops=1e12, flops_fp32=1e10, memory_bandwidth=1e11, link_bandwidth=1e9)
        for predicted in (partial(graph.cost, machine), partial(step.predicted, state, rows(4), machine)):
            with pytest.raises(ValueError, match="the graph of one rank does not say"):
                predicted()
        targets = [node.target for node in graph.module.graph.nodes]
        assert targets.count(START) == targets.count(WAIT)
        return str(graph), len(graph.collectives("transfer"))

    for text, messages in comm.simulate(program, world_size=2):
        assert text.count("start transfer on world") == messages == 4
        assert "forward:" in text


@pytest.mark.law(58)
@pytest.mark.parametrize("name", ["1F1B", "ZB-V"])
def test_a_run_holds_what_is_counted(name: str) -> None:
    """What a rank sends is in memory until it has arrived, and the message's result takes none."""

    def program() -> list[Any]:
        schedule = SCHEDULES[name]
        model, params = cut(schedule.stages)
        step = fds.jit(T.pipeline(schedule, model)(fds.train_step(model, fds.sgd(0.1))))
        state, _ = step(step.init(params), rows(6))
        return counted(step.graph(state, rows(6)), state, rows(6))

    for told in comm.simulate(program, world_size=SCHEDULES[name].ranks):
        assert [(node, size) for node, size, *_ in told] == [(node, held) for node, *_, held, _ in told]
