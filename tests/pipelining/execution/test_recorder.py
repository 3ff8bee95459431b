"""A recorder's figures are possible: waiting is no computing, ranks stand on one clock, memory counts once."""

import threading
import time
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm, memory, transforms
from functional_ds import pipelining as pp
from functional_ds.base.torch_private import is_fake
from tests.pipelining.cases import generated

ROUNDING = 1e-9


class Clock:
    """Time that passes only where a stage computes; one for all simulated ranks, which take turns."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Ticking(torch.autograd.Function):
    """The identity, which takes some seconds forward and some backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, seconds: tuple[float, float]) -> Tensor:
        ctx.clock, ctx.seconds = clock, seconds
        clock.now += seconds[0]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.clock.now += ctx.seconds[1]
        return grads[0], None, None


def timed(
    schedule: pp.Schedule, seconds: list[tuple[float, float]], *, ahead: float = 0.0, resident: int | None = None
) -> list[pp.Timeline]:
    """A step of stages that take these seconds; the clock of rank r shows ``ahead * r`` more."""
    clock = Clock()
    params = [{"w": torch.eye(4) * (1 + i / 8)} for i in range(schedule.stages)]

    def stage(i: int) -> Any:
        def run(p: Any, x: Tensor) -> Tensor:
            y = torch.tanh(x @ p["w"])
            return y if is_fake(y) else Ticking.apply(y, clock, seconds[i])

        return run

    model = pp.stages([stage(i) for i in range(schedule.stages)], params, loss=lambda y, batch: y.square().mean())

    def program() -> pp.Timeline:
        mesh = comm.mesh(dp=comm.world().size // schedule.ranks, pp=schedule.ranks)
        more = ahead * mesh["pp"].rank
        recorder = pp.Recorder(clock=lambda: clock.now + more)
        zero = [] if resident is None else [transforms.zero(3, mesh["dp"])]
        piped = transforms.pipeline(schedule, model, mesh["pp"], recorder=recorder, resident=resident)
        step = fds.compose(*zero, piped)(fds.train_step(model, fds.sgd(0.1)))
        step(step.init(params), (torch.ones(2 * schedule.microbatches, 4),))
        return recorder.run(schedule, mesh["pp"])

    return comm.simulate(program, world_size=schedule.ranks * (1 if resident is None else 2))


def test_waiting_is_no_computing() -> None:
    """Before a slow last stage: the first stage's costs are its computing alone; the rest is a wait, for what and for whom."""
    run = timed(pp.one_f_one_b(2, 4), [(1.0, 2.0), (10.0, 20.0)])[0]
    costs = pp.measured(run)
    assert (costs.forward, costs.backward) == ((1.0, 10.0), (2.0, 20.0))
    waits = [wait for wait in run.waits[0] if wait.end > wait.start]
    assert {str(wait.action) for wait in waits} <= {f"0RECV_B{j}" for j in range(4)}
    assert {wait.source for wait in waits} == {1}
    assert waits


@given(
    schedule=generated(p=3, m=4).filter(lambda schedule: schedule.stages <= 6),
    seconds=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=6, max_size=6),
    ahead=st.sampled_from((0.0, 64.0)),
)
def test_a_measured_bubble_is_possible(schedule: pp.Schedule, seconds: list[tuple[int, int]], ahead: float) -> None:
    """At least that of the durations alone; computing and waiting are apart and within the makespan; costs are computing's."""
    run = timed(schedule, [(float(f), float(b)) for f, b in seconds], ahead=ahead)[0]
    assert run.bubble >= run.least_bubble - ROUNDING
    costs = pp.measured(run)
    assert costs.forward == tuple(float(f) for f, _ in seconds[: schedule.stages])
    whole = [float(b) for _, b in seconds[: schedule.stages]]
    if not any(pp.Kind.I in {action.kind for action in row} for row in schedule):
        assert costs.backward == tuple(whole)
    for rank in range(schedule.ranks):
        start, end = run.times(rank)
        spans = sorted([*zip(start, end, strict=True), *((wait.start, wait.end) for wait in run.waits[rank])])
        assert all(one[1] <= two[0] + ROUNDING for one, two in pairwise(spans))
        within = sum(b - a for a, b in spans if a >= start[0])
        assert within <= run.makespan + ROUNDING
    assert 0 <= run.bubble < 1


def test_gathers_are_no_computing() -> None:
    """In stage 3 a stage's params are fetched in a span of their own, and costs stay those of computing."""
    run = timed(pp.breadth_first(2, 2), [(1.0, 2.0), (3.0, 4.0), (5.0, 6.0), (7.0, 8.0)], resident=1)[0]
    assert pp.measured(run).forward == (1.0, 3.0, 5.0, 7.0)
    assert {wait.action.kind for wait in run.waits[0]} >= {pp.Kind.GATHER, pp.Kind.RECV_B}
    assert all(wait.source is None for wait in run.waits[0] if wait.action.kind is pp.Kind.GATHER)


def test_times_that_no_clock_can_have_shown() -> None:
    """Rank 1 computes what rank 0 has not computed yet."""
    times = [[(5.0, 6.0), (7.0, 8.0)], [(0.0, 1.0), (1.0, 2.0)]]
    with pytest.raises(ValueError, match=r"times\[1\]\[0\]: 1F0 starts 6 s before 0F0 on rank 0 has ended.*one clock"):
        pp.observed(pp.one_f_one_b(2, 1), times)
    run = pp.observed(pp.one_f_one_b(2, 1), [[(0.0, 1.0), (3.0, 4.0)], [(0.9, 2.0), (2.0, 3.0)]], error=0.2)
    assert run.makespan == 4


def test_memory_of_two_stages_on_one_rank_counts_once() -> None:
    """tanh keeps what it gives, and the product after it the same: two tensors of 8 bytes for two stages, not three."""
    params = [{"w": torch.eye(2)} for _ in range(4)]
    model = pp.stages([lambda p, x: torch.tanh(x @ p["w"])] * 4, params, loss=lambda y, batch: y.sum())
    batch = (torch.ones(2, 2),)

    def program(schedule: pp.Schedule) -> int:
        recorder = pp.Recorder()
        step = transforms.pipeline(schedule, model, recorder=recorder)(fds.train_step(model, fds.sgd(0.1)))
        step(step.init(params), batch)
        assert not recorder._now_held
        return recorder.peak

    costs = pp.estimated(model, params, (torch.ones(1, 2),))
    assert (costs.activations, costs.shared) == ((8.0, 16.0, 16.0, 16.0), (0.0, 8.0, 8.0, 8.0))
    for schedule, expected in (
        (pp.zbv(2, 2), [2 * 8 + 16, 2 * (16 + 8)]),  # stages 0 and 3; 1 and 2
        (pp.Schedule.of(["0F0 1F0 2F0 3F0 3B0 2B0 1B0 0B0 0F1 1F1 2F1 3F1 3I1 2I1 1I1 0I1 0W1 1W1 2W1 3W1"]), [4 * 8]),
    ):
        assert comm.simulate(program, schedule, world_size=schedule.ranks) == expected
        predicted = pp.timeline(schedule, costs)
        assert list(predicted.peak) == expected
        assert all(predicted.memory(rank)[1][-1] == 0 for rank in range(schedule.ranks))


class Scaled(nn.Module):
    """A product with a small buffer, a large one and a constant, which autograd saves each time."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16, bias=False)
        self.register_buffer("small", torch.linspace(0.5, 1.5, 16).repeat(64, 1))
        self.register_buffer("large", torch.ones(512, 64), persistent=False)
        self.constant = torch.ones(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        rows = len(x)
        return torch.tanh(self.inner(x)) * self.small[:rows] * self.large[:rows, :16] * self.constant[:rows]


def test_buffers_are_no_activations() -> None:
    """They are there before and after: 128 bytes of tanh a micro-batch, and on the last stage its input and its output."""
    rows = torch.ones(8, 16), torch.ones(8, 16)
    micro = fds.tree.map(lambda x: x[:2], rows)
    stages, params = pp.cut(
        nn.Sequential(Scaled(), Scaled()), ["1"], example=micro, loss=lambda y, batch: F.mse_loss(y, batch[1])
    )

    def program() -> int:
        recorder = pp.Recorder()
        step = transforms.pipeline(pp.gpipe(2, 4), stages, recorder=recorder)(fds.train_step(stages, fds.sgd(0.1)))
        step(step.init(params), rows)
        assert set(recorder.saved.values()) <= {128, 384}
        return recorder.peak

    costs = pp.estimated(stages, params, micro)
    assert costs.activations == (128.0, 384.0)
    assert sum(costs.activations) == memory.activations(stages, params, micro).kept
    found = comm.simulate(program, world_size=2)
    assert found == [4 * 128, 4 * 384] == list(pp.timeline(pp.gpipe(2, 4), costs).peak)


def test_a_limit_that_holds_counts_memory_once() -> None:
    """``optimize`` finds a schedule of one rank within 20 bytes, where both stages' own figures add up to 32."""
    costs = pp.Costs(activations=[16.0, 16.0], shared=[0.0, 12.0])
    found = pp.optimize(1, 2, costs, placement=[0, 0], memory_limit=20, rounds=2)
    assert max(pp.timeline(found, costs).peak) == 20


def on_processes(ahead: float) -> Any:
    """A slow second stage; rank 1's clock is ahead."""
    more = ahead * comm.world().rank
    recorder = pp.Recorder(clock=lambda: time.perf_counter() + more) if ahead else pp.Recorder()

    def slow(p: Any, x: Tensor) -> Tensor:
        if not is_fake(x):
            threading.Event().wait(0.03)
        return x * p["w"]

    params = [{"w": torch.ones(())}, {"w": torch.ones(())}]
    model = pp.stages([lambda p, x: x * p["w"], slow], params, loss=lambda y, batch: y.mean())
    schedule = pp.one_f_one_b(2, 4)
    step = transforms.pipeline(schedule, model, recorder=recorder)(fds.train_step(model, fds.sgd(0.1)))
    state, runs = step.init(params), []
    for _ in range(3):
        state, _ = step(state, (torch.ones(8),))
        runs.append(recorder.run(schedule, comm.world()))
    return [(run.bubble, run.least_bubble, run.makespan) for run in runs], comm.debug.clock_offsets(clock=recorder.clock)


@pytest.mark.parametrize("ahead", [0.0, 1000.0])
def test_processes_on_one_clock(ahead: float) -> None:
    """Bubbles are possible, and all ranks see the same run, whether the ranks share a clock or not."""
    (ours, offsets), (theirs, others) = comm.spawn(on_processes, ahead, world_size=2)
    assert (ours, offsets) == (theirs, others)
    assert abs(offsets.seconds[1] + ahead) <= offsets.error
    for bubble, least, makespan in ours:
        assert 0 < least <= bubble + 4 * offsets.error / makespan < 1
