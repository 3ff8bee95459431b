"""A pass of one's own is held to the law: planted passes that break it are named, and no rank hangs."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.compiling import StepGraph, copied, finished, regather, schedule
from functional_ds.compiling.graphs.graph_collectives import START, WAIT, site_of
from functional_ds.testing import PassReport, check_pass

ATEN = torch.ops.aten
WIDTH = 4


def make(stage: int = 3, rows: int = 4) -> tuple[Any, Any, Tensor]:
    torch.manual_seed(0)
    apply, params = fds.functional(nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))))
    step = T.zero(stage)(fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.adamw(0.05)))
    return step, step.init(params), torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(comm.world().rank))


def dropping() -> tuple[Any, Any, Tensor]:
    """With draws by torch's generator and a buffer."""
    torch.manual_seed(0)
    apply, params = fds.functional(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.BatchNorm1d(WIDTH)))
    step = T.zero(1)(fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.05)))
    return step, step.init(params), torch.ones(4, WIDTH)


# -- passes that keep the law ------------------------------------------------------------------------------------------


@pytest.mark.law(58)
@pytest.mark.parametrize("program", [make, dropping])
def test_lawful_passes(program: Callable[..., Any]) -> None:
    def nothing(graph: StepGraph) -> StepGraph:
        return graph

    for change in (nothing, schedule(ahead=2)):
        report = check_pass(change, program)
        assert report.sent[0] == report.sent[1] > 0
    assert str(report).splitlines()[0].startswith("schedule.run")


@pytest.mark.law(58)
def test_a_jitted_step_is_checked_with_its_own_passes() -> None:
    def program(passes: Any) -> Any:
        step, state, batch = make()
        return fds.jit(step, passes=passes), state, batch

    report: PassReport = check_pass(regather(live=1), program, (), same_ledger=False)
    assert report.units == (3, 1)
    assert report.sent[0] < report.sent[1]
    assert report.memory[1] < report.memory[0]
    with pytest.raises(AssertionError, match=r"adds all_gather of '1' \(torch.float32\[10\]\) on 'world'"):
        check_pass(regather(live=1), program, ())


def bf16_gathers(graph: StepGraph) -> StepGraph:
    """Params travel in bf16."""
    graph = copied(graph)
    for gather in graph.gathers():
        (x,) = gather.start.args[0]
        with graph.module.graph.inserting_before(gather.start):
            half = graph.module.graph.call_function(ATEN._to_copy.default, (x,), {"dtype": torch.bfloat16})
        gather.start.args = ([half], *gather.start.args[1:])
        gather.wait.args = (gather.wait.args[0], [half], gather.wait.args[2])
        (item,) = gather.wait.users
        with graph.module.graph.inserting_after(item):
            whole = graph.module.graph.call_function(ATEN._to_copy.default, (item,), {"dtype": torch.float32})
        item.replace_all_uses_with(whole, delete_user_cb=lambda user, whole=whole: user is not whole)
    return finished(graph)


def test_a_pass_with_a_tolerance() -> None:
    """Half the bytes, other values within bf16's: refused, unless both are said."""
    report = check_pass(bf16_gathers, make, rtol=0.05, atol=0.11, same_ledger=False)
    assert report.sent[1] < 0.8 * report.sent[0]
    with pytest.raises(AssertionError, match="more than rtol=1e-07 and atol=0"):
        check_pass(bf16_gathers, make, rtol=1e-7, same_ledger=False)
    with pytest.raises(AssertionError, match=r"bf16_gathers changes a value on rank 0: the result '0\.\w+.* differs by up to"):
        check_pass(bf16_gathers, make, same_ledger=False)


# -- planted passes ----------------------------------------------------------------------------------------------------


def nodes_of(graph: StepGraph, target: Any) -> list[fx.Node]:
    return [node for node in graph.module.graph.nodes if node.target is target]


def other_value(graph: StepGraph) -> StepGraph:
    graph = copied(graph)
    nodes_of(graph, ATEN.tanh.default)[1].target = ATEN.sin.default
    return finished(graph)


def other_value_on_rank_1(graph: StepGraph) -> StepGraph:
    return other_value(graph) if comm.world().rank == 1 else graph


def dropped(graph: StepGraph) -> StepGraph:
    """Without the first reduction: each rank goes on with its own gradient."""
    graph = copied(graph)
    wait = next(node for node in nodes_of(graph, WAIT) if graph.sites[site_of(node)].name == "all_reduce")
    start = wait.args[0]
    for user in list(wait.users):
        user.replace_all_uses_with(wait.args[1][user.args[1]])
        graph.module.graph.erase_node(user)
    graph.module.graph.erase_node(wait)
    graph.module.graph.erase_node(start)
    return finished(graph)


def dropped_on_rank_1(graph: StepGraph) -> StepGraph:
    return dropped(graph) if comm.world().rank == 1 else graph


def swapped(graph: StepGraph) -> StepGraph:
    """The second gather starts before the first."""
    graph = copied(graph)
    first, second = graph.gathers()[:2]
    for node in [*second.start.all_input_nodes, second.start]:
        if node.op == "call_function":
            first.start.prepend(node)
    return finished(graph)


def swapped_on_rank_1(graph: StepGraph) -> StepGraph:
    return swapped(graph) if comm.world().rank == 1 else graph


def in_place(graph: StepGraph) -> StepGraph:
    nodes_of(graph, ATEN.tanh.default)[0].target = ATEN.sin.default
    return schedule(ahead=0)(graph)


def late_read(graph: StepGraph) -> StepGraph:
    """A param is read after the update has written into it."""
    graph = copied(graph)
    update = nodes_of(graph, ATEN._fused_adamw_.default)[0]
    output = next(iter(reversed(graph.module.graph.nodes)))
    loss = next(node for node in nodes_of(graph, ATEN.mean.default))
    del output, loss
    update.args = (*update.args[:2], *reversed(update.args[2:4]), *update.args[4:])
    return finished(graph)


def no_graph(graph: StepGraph) -> Any:
    return graph.module


def of_another_step(graph: StepGraph) -> StepGraph:
    step = fds.jit(fds.train_step(lambda w, x: (w * x).sum(), fds.sgd(0.1)))
    state, _ = step(step.init(torch.ones(2)), torch.ones(2))
    return step.graph(state, torch.ones(2))


def unwaited(graph: StepGraph) -> StepGraph:
    graph = copied(graph)
    first = nodes_of(graph, START)[0]
    with graph.module.graph.inserting_after(first):
        graph.module.graph.node_copy(first)
    return graph


def ill_formed(graph: StepGraph) -> StepGraph:
    graph = copied(graph)
    nodes = list(graph.module.graph.nodes)
    next(node for node in nodes if node.op == "call_function").prepend(nodes_of(graph, ATEN.mean.default)[0])
    return graph


def other_dtype(graph: StepGraph) -> StepGraph:
    graph = copied(graph)
    output = next(iter(reversed(graph.module.graph.nodes)))
    with graph.module.graph.inserting_before(output):
        half = graph.module.graph.call_function(ATEN._to_copy.default, (output.args[0][-1],), {"dtype": torch.float16})
    output.args = ([*output.args[0][:-1], half],)
    return finished(graph)


@pytest.mark.sample(3)
@pytest.mark.law(58)
@pytest.mark.parametrize(
    ("change", "stage", "error", "words"),
    [
        (other_value, 3, AssertionError, r"changes a value on rank 0: .* the first node with another value is %tanh_1 : .*sin"),
        (other_value_on_rank_1, 3, AssertionError, r"changes a value on rank \d: the result '[^']+' differs"),
        (dropped, 0, AssertionError, r"dropped drops all_reduce of '3' \(torch.float32\[20\]\) on 'world/reduce' on rank \d"),
        (dropped_on_rank_1, 0, AssertionError, r"drops all_reduce of '3' .* on rank 1"),
        (
            swapped_on_rank_1,
            3,
            AssertionError,
            r"ranks 0 and 1 start other collectives on the group 'world'.*number 1 is all_gather",
        ),
        (in_place, 3, AssertionError, "has changed the graph that it was given: change compiling.copied"),
        (late_read, 1, AssertionError, r"changes a value on rank 0: the result"),
        (no_graph, 3, TypeError, "passes: no_graph returned GraphModule, and a pass returns the StepGraph"),
        (of_another_step, 3, ValueError, "of_another_step returned the graph of another step"),
        (unwaited, 3, ValueError, r"unwaited: the all_gather of '0' \(site 0\) is started 2 times and waited for 1 times"),
        (ill_formed, 3, ValueError, "ill_formed returned a graph that cannot run"),
        (
            other_dtype,
            3,
            ValueError,
            r"the result '1\.\w+' \(_to_copy_default\) is torch.float16\[\], and the step's",
        ),
    ],
)
def test_what_breaks_the_law_is_named(change: Any, stage: int, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        check_pass(change, make, stage)


@pytest.mark.law(58)
def test_gathers_in_another_order_on_all_ranks_are_lawful() -> None:
    check_pass(swapped, make)


def test_a_dropped_collective_is_a_value_and_a_row() -> None:
    """Also where other ledgers are asked for."""
    with pytest.raises(AssertionError, match=r"changes a value on rank \d: the result"):
        check_pass(dropped, make, 0, same_ledger=False)
    with pytest.raises(AssertionError, match="ranks 0 and 1 start other collectives on the group 'world/reduce'"):
        check_pass(dropped_on_rank_1, make, 0, same_ledger=False)


# -- in ``jit`` --------------------------------------------------------------------------------------------------------


def run(change: Any) -> tuple[list[float], list[str]]:
    step, state, batch = make(3)
    step, losses = fds.jit(step, passes=[change]) if change else step, []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"].item())
    return losses, step.reasons if change else []


@pytest.mark.law(58)
@pytest.mark.filterwarnings("ignore::functional_ds.compiling.JitWarning")
def test_ranks_whose_passes_differ_stay_eager() -> None:
    """Rank 1 would gather the second unit while rank 0 gathers the first."""
    changed, plain = (comm.simulate(run, each, world_size=2) for each in (swapped_on_rank_1, None))
    for (losses, reasons), (expected, _) in zip(changed, plain, strict=True):
        assert losses == expected
        assert "for '0' on rank 0 and all_gather(" in reasons[0]


@pytest.mark.law(58)
@pytest.mark.filterwarnings("ignore::functional_ds.compiling.JitWarning")
def test_ranks_whose_passes_differ_on_processes() -> None:
    for losses, reasons in comm.spawn(run, swapped_on_rank_1, world_size=2):
        assert len(losses) == 3
        assert "start other collectives on the group 'world'" in reasons[0]


def failing_on_rank_1(graph: StepGraph) -> Any:
    return "no graph" if comm.world().rank == 1 else graph


def told() -> str:
    try:
        run(failing_on_rank_1)
    except (TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_pass_that_fails_on_one_rank_fails_on_all() -> None:
    words = "failing_on_rank_1 returned str, and a pass returns the StepGraph"
    first, second = comm.simulate(told, world_size=2)
    assert first.startswith("RuntimeError: fds.jit: on rank 1, TypeError: passes: ")
    assert second.startswith("TypeError: passes: ")
    assert words in first
    assert words in second


def two_groups() -> tuple[Any, Any, Tensor]:
    """A loss with collectives on two groups of the same ranks."""
    other = comm.new_group([0, 1], name="other")

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return comm.all_reduce((x * w).tanh()).sum() + comm.all_reduce((x * w).sin(), other).sum()

    step = fds.train_step(loss, fds.sgd(0.1))
    return step, step.init(torch.ones(3)), torch.ones(3)


def crossed_on_rank_1(graph: StepGraph) -> StepGraph:
    """Each group's order is the same on both ranks, but rank 1 waits in the second group first."""
    if comm.world().rank == 0:
        return graph
    graph = copied(graph)
    first, second = nodes_of(graph, START)[:2]
    sine = second.args[0][0]
    for node in (sine.args[0], sine, second, *second.users):
        first.prepend(node)
    return finished(graph)


def test_groups_in_another_order_on_one_rank() -> None:
    words = r"would wait for each other forever, rank 0 in all_reduce.* on 'world' and rank 1 in all_reduce.* on 'other'"
    with pytest.raises(AssertionError, match=words):
        check_pass(crossed_on_rank_1, two_groups)


def test_a_pass_adds_nodes_without_values() -> None:
    """Their shapes are found, so that memory and prices count them."""

    def doubled(graph: StepGraph) -> StepGraph:
        graph = copied(graph)
        tanh = nodes_of(graph, ATEN.tanh.default)[0]
        with graph.module.graph.inserting_after(tanh):
            more = graph.module.graph.call_function(ATEN.cat.default, ([tanh] * 100,))
        with graph.module.graph.inserting_after(more):
            part = graph.module.graph.call_function(ATEN.slice.Tensor, (more, 0, 0, 4))
        tanh.replace_all_uses_with(part, delete_user_cb=lambda user: user is not more)
        return finished(graph)

    report = check_pass(doubled, make)
    assert report.memory[1] >= report.memory[0] + 99 * 4 * WIDTH * 4
    assert operator.sub(*reversed(report.nodes)) == 2
