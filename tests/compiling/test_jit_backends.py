"""Law 58 by regions: what a back end compiles between collectives, writes and draws changes nothing but the time."""

import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.compiling import JitWarning
from functional_ds.compiling.jitted import region_compiler
from tests.compiling import test_jit
from tests.compiling.test_jit import (
    STRATEGIES,
    WIDTH,
    Run,
    assert_same,
    blocks,
    drawing,
    own_batch,
    run,
    squared,
)
from tests.planting import Bug, planted

aot = pytest.mark.parametrize("backend", ["fx", "aot_eager"])
needs_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CXX") or "g++") is None, reason="no C++ compiler")


@pytest.mark.sample(2)
@pytest.mark.law(58)
@pytest.mark.parametrize("name", [name for name in STRATEGIES if "resharded" not in name])
def test_regions_change_no_bit(name: str) -> None:
    def program() -> tuple[Run, Run]:
        found, expected = (run(jits, [make() for make in STRATEGIES[name]], **options) for jits, options in BOTH)
        return found, expected

    for found, expected in comm.simulate(program, world_size=2):
        assert found[2] == []
        assert_same(found, expected)


BOTH: list[tuple[bool, dict[str, Any]]] = [(True, {"backend": "aot_eager"}), (False, {})]


class Counting(nn.Module):
    """Writes a buffer in place and computes with it afterwards: torch's partitioner would write it twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm, self.scale = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Buffer(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        before = self.scale.clone()
        self.scale.mul_(2)
        found: Tensor = torch.relu_(self.norm(self.linear(x) + before)) * self.scale
        return found


@pytest.mark.sample(2)
@pytest.mark.law(58)
@pytest.mark.parametrize(
    ("make", "loss"),
    [(lambda: blocks(nn.Dropout(0.5), count=2), drawing), (Counting, squared)],
    ids=["draws", "buffers that are written and used"],
)
@pytest.mark.parametrize("backend", ["fx", "aot_eager"])
def test_draws_and_writes_stay_where_they_are(make: Callable[[], nn.Module], loss: Any, backend: str) -> None:
    found, expected = run(True, [], make, loss, backend=backend), run(False, [], make, loss)
    assert found[2] == []
    assert_same(found, expected)


def with_inductor(transforms: Sequence[Callable[[], Any]]) -> tuple[Run, Run, bool]:
    apply, params = fds.functional(blocks(count=1))
    chain = fds.compose(*(each() for each in transforms))
    step = fds.jit(chain(fds.train_step(squared(apply), fds.adamw(0.05))), backend="inductor")
    state = step.init(params)
    for i in range(2):
        state, _ = step(state, own_batch(i))
    report = fds.compile_report(step)
    regions = sum(len(row.paths) for row in report.rows)
    said = report.seconds > 0 and f"{report.rows[0].paths[0]}: " in str(report) and " s" in str(report)
    make = partial(blocks, count=1)
    found, expected = (
        run(jits, [each() for each in transforms], make, **({"backend": "inductor"} if jits else {})) for jits in (1, 0)
    )
    return found, expected, said and report.compilations <= regions == report.calls


@needs_compiler
@pytest.mark.sample(0)
@pytest.mark.law(58)
def test_inductor_rounds_alone() -> None:
    """With recomputation, too. The reason for the seconds that it takes: it writes and compiles C++ code."""
    transforms = [lambda: T.zero(3), lambda: T.remat("*")]
    for found, expected, counted in comm.simulate(with_inductor, transforms, world_size=2):
        assert found[2] == []
        assert found[3] == expected[3]
        assert counted
        for leaf, other in zip(found[1], expected[1], strict=True):
            if isinstance(leaf, Tensor):
                torch.testing.assert_close(leaf, other, rtol=2e-6, atol=2e-6)


def test_equal_blocks_share_a_compilation() -> None:
    def program() -> tuple[int, int, int]:
        apply, params = fds.functional(blocks(count=6))
        step = fds.jit(T.zero(3)(fds.train_step(squared(apply), fds.adamw(0.05))), backend="aot_eager")
        state = step.init(params)
        for i in range(3):
            state, _ = step(state, own_batch(i))
        report = fds.compile_report(step)
        return report.compilations, sum(len(row.paths) for row in report.rows), report.calls

    for compilations, regions, calls in comm.simulate(program, world_size=2):
        assert compilations + 6 <= regions  # four of the blocks are like another one, in both passes
        assert calls == 2 * regions


def test_as_few_units_are_whole() -> None:
    """A region ends where a collective stands, so gathers start and end where they did."""

    def program() -> tuple[list[str], list[str]]:
        apply, params = fds.functional(blocks(count=5))
        step = fds.jit(T.zero(3)(fds.train_step(squared(apply), fds.adamw(0.1))), backend="aot_eager")
        state, _ = step(step.init(params), own_batch(0))
        graph = step.graph(state, own_batch(1))
        split = region_compiler.RegionCode(graph, "aot_eager").graph
        shown: Any = [
            [str(node.target) for node in each.nodes if "functional_ds" in str(node.target)]
            for each in (graph.module.graph, split)
        ]
        return shown[0], shown[1]

    for found, expected in comm.simulate(program, world_size=2):
        assert found == expected


def test_a_backend_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    apply, _ = fds.functional(blocks(count=1))
    step = fds.train_step(squared(apply), fds.adamw(0.05))
    with pytest.raises(ValueError, match="no back end 'inducter'; there are 'fx', 'aot_eager', 'inductor'"):
        fds.jit(step, backend="inducter")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match="'no-such-compiler' is not here"):
        fds.jit(step, backend="inductor")
    with pytest.raises(ValueError, match="nothing of the step is compiled"):
        fds.compile_report(fds.jit(step))


def test_a_region_that_one_rank_cannot_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks run plain kernels then, since replicas that round otherwise would drift apart."""
    compiled = region_compiler._compiled

    def failing(key: Any) -> Any:
        if comm.world().rank == 1:
            raise region_compiler.RegionError("planted")
        return compiled(key)

    monkeypatch.setattr(region_compiler, "_compiled", failing)

    def program() -> tuple[Run, Run]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", JitWarning)
            found, expected = (run(jits, [T.zero(0)], **options) for jits, options in BOTH)
        return found, expected

    for found, expected in comm.simulate(program, world_size=2):
        assert found[2] == ["on rank 1, no region is compiled: planted"]
        assert_same(found, expected)


def test_autocast_is_in_the_graph_once() -> None:
    """What the loss computes outside of autocast stays so when the graph runs within it."""

    def loss(params: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return (x @ params["w"]).square().mean()

    def losses(jits: bool) -> list[float]:
        step: Any = fds.train_step(loss, fds.sgd(0.1))
        step = fds.jit(step) if jits else step
        state, told = step.init({"w": torch.linspace(0, 1, WIDTH * 3).view(WIDTH, 3)}), []
        with torch.autocast("cpu", torch.bfloat16):
            for i in range(3):
                state, metrics = step(state, own_batch(i))
                told.append(metrics["loss"].item())
        return told

    assert losses(True) == losses(False)


def test_results_get_memory_of_their_own() -> None:
    """Whatever a back end does: a state would be written into through another tensor."""
    outputs = [torch.empty(2, 3), torch.empty(2, 3), torch.empty(2, 3)]
    function = region_compiler._RegionFunction(lambda x: (x, x + 1, (x + 2).t().contiguous().t()), outputs, [])
    x = torch.zeros(2, 3)
    for _ in range(2):
        one, two, three = function(x)
        assert (one.data_ptr() != x.data_ptr(), two[0, 0].item(), three[0, 0].item(), three.stride()) == (True, 1, 2, (3, 1))


CODE, REGIONS = "compiling.jitted.graph_code", "compiling.jitted.region_compiler"
BUGS: list[tuple[Callable[[], Any], Bug]] = [
    (
        test_jit.test_gathers_are_those_of_the_eager_step,
        Bug(
            "views are made at the wrong place",
            "compiling.jitted.graph_code:_DirectViews._get",
            "value.storage_offset() - held.storage_offset()",
            "0",
        ),
    ),
    (
        test_autocast_is_in_the_graph_once,
        Bug(
            "kernels are cast again",
            "compiling.jitted.graph_code:GraphCode.__call__",
            "with torch.no_grad(), without_autocast():\n    ...",
            "with torch.no_grad():\n    ...",
        ),
    ),
    (
        test_results_get_memory_of_their_own,
        Bug(
            "results are given as they are",
            "compiling.jitted.region_compiler:_RegionFunction._looked_at",
            "places.append(place)",
            "pass",
        ),
    ),
]


@pytest.mark.parametrize(("law", "bug"), BUGS, ids=[bug.name for _, bug in BUGS])
def test_a_bug_is_seen(law: Callable[[], Any], bug: Bug) -> None:
    with planted(bug), pytest.raises(bug.shows):
        law()
