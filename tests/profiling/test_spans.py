"""Every moment of a step belongs to one place, and waiting is not computing. Clocks are the tests' own."""

from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.comm.record import ledger as ledger_module
from functional_ds.comm.record.ledger import LedgerCall
from functional_ds.comm.table.collective import Call, CallContext
from functional_ds.comm.table.rows import ALL_REDUCE
from functional_ds.profiling.plain_steps import PlainSteps
from functional_ds.profiling.spans import SpanClock, SpanKey, WaitLedger, timed


@attrs.define
class Hands:
    """A clock that moves when it is told to."""

    time: float = 0.0

    def __call__(self) -> float:
        return self.time


@attrs.define(eq=False)
class Slow:
    """A call under way that takes so long."""

    hands: Hands
    seconds: float
    ended: float | None = None

    def wait(self) -> list[Tensor]:
        self.hands.time += self.seconds
        return []

    def poll(self, timeout: float) -> bool:
        return False


BY = "train_step(loss, sgd(lr=0.1, momentum=0.0, nesterov=False, weight_decay=0.0))"


def one_step(monkeypatch: pytest.MonkeyPatch) -> tuple[SpanClock, WaitLedger]:
    """A step in which each part takes another number of seconds."""
    hands = Hands()
    monkeypatch.setattr(ledger_module, "perf_counter", hands)
    spans = SpanClock(hands)
    book = WaitLedger(times=True, spans=spans)

    def collective(posting: float, waiting: float, *, meanwhile: float = 0.0) -> None:
        call, here = Call(ALL_REDUCE, {"op": "sum"}), CallContext({"op": "sum"}, 0, 2)
        made = LedgerCall(call, [torch.ones(3)], here, "dp", (0, 1))
        began = hands()
        hands.time += posting
        handle = book.record(made, Slow(hands, waiting), began, early=meanwhile > 0)
        hands.time += meanwhile
        handle.wait()

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            hands.time += 1
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
            hands.time += 2
            collective(0.5, 16, meanwhile=4)
            return grad

    def loss(params: Any, batch: Tensor) -> Tensor:
        collective(0.25, 0.25)
        return Backward.apply(params["w"] * batch).sum()  # type: ignore[no-untyped-call, no-any-return]

    def update(inner: Any, step: fds.Step, state: fds.State, grads: Any) -> Any:
        hands.time += 32
        found = inner(step, state, grads)
        hands.time += 64
        return found

    def rate(inner: Any, step: fds.Step, state: fds.State) -> Any:
        hands.time += 128
        return inner(step, state)

    def gradients(inner: Any, step: fds.Step, *args: Any) -> Any:
        hands.time += 256
        return inner(step, *args)

    mine = fds.wrap("mine", update=fds.innermost(update), rate=rate, gradients=gradients)
    step = mine(fds.train_step(loss, fds.sgd(0.1)))
    state = step.init({"w": torch.ones(2)})
    with spans.step(step.name):
        hands.time += 512
        timed(step, lambda: spans)(state, torch.ones(2))
    return spans, book


def test_each_moment_is_at_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    one_step_is_counted(monkeypatch)


def one_step_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    spans, book = one_step(monkeypatch)
    assert {place: seconds for place, seconds in spans.totals.items() if seconds} == {
        SpanKey("other", "step", BY): 512,
        SpanKey("passes", "gradients", "mine"): 256,
        SpanKey("forward", "forward", BY): 1,
        SpanKey("forward", "forward", BY, "all_reduce dp"): 0.5,
        SpanKey("backward", "gradients", BY): 2 + 4,  # what goes on beside a collective is computing
        SpanKey("backward", "gradients", BY, "all_reduce dp"): 0.5 + 16,
        SpanKey("update", "update", "mine"): 32 + 64,
        SpanKey("update", "rate", "mine"): 128,
    }
    assert sum(spans.totals.values()) == spans.seconds == 1016
    assert [event.seconds for event in book.events] == [0.5, 0.5 + 4 + 16]
    assert [row.overlapped for row in book.by_size()] == [1]


def test_slices_nest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slices of the lane are apart, or one is inside the other; the step's is around all."""
    slices = one_step(monkeypatch)[0].slices
    assert (slices[-1].name, slices[-1].began, slices[-1].ended) == ("step", 0, 1016)
    for i, a in enumerate(slices):
        for b in slices[i + 1 :]:
            apart = a.ended <= b.began or b.ended <= a.began
            assert apart or (b.began <= a.began and a.ended <= b.ended), (a, b)


def test_a_step_that_nobody_times_is_the_step() -> None:
    """A timed step outside of a measurement, and a clock that no step has started."""
    step = fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(0.1))
    for spans in (None, SpanClock()):
        twin = timed(step, lambda spans=spans: spans)  # type: ignore[misc]
        assert twin.names == step.names
        state, _ = twin(step.init({"w": torch.ones(2)}), torch.ones(2))
        assert twin.params(state)["w"].tolist() == pytest.approx([0.9, 0.9])


@settings(max_examples=settings.default.max_examples // 3)
@given(stage=st.integers(0, 3), k=st.integers(1, 3), n=st.integers(1, 3), remat=st.booleans(), offload=st.booleans())
def test_a_timed_step_gives_the_same_bits(stage: int, k: int, n: int, remat: bool, offload: bool) -> None:
    """And its places' times add up to its time, of which all is at least as long as what it waits."""

    def program(timing: bool) -> Any:
        generator = torch.Generator().manual_seed(0)
        apply, params = fds.functional(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)))
        params = {name: torch.randn(p.shape, generator=generator) for name, p in params.items()}
        transforms = [T.remat("[02]")] * remat + [T.offload(optimizer="cpu")] * offload + [T.zero(stage)]
        step = fds.compose(*transforms, T.accumulate(k), T.clip(0.5))(
            fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.adamw(0.1))
        )
        state = step.init(params)
        for index in range(2):
            x = torch.randn(6, 3, generator=torch.Generator().manual_seed(10 * index + comm.world().rank))
            spans = SpanClock()
            if not timing:
                state, metrics = step(state, x)
                continue
            book = WaitLedger(times=True, spans=spans)
            ledgers = comm.world().world.ledgers
            ledgers.append(book)
            with spans.step("step"):
                state, metrics = timed(step, lambda spans=spans: spans)(state, x)  # type: ignore[misc]
            ledgers.remove(book)
            assert sum(spans.totals.values()) == pytest.approx(spans.seconds)
            assert all(seconds >= 0 for seconds in spans.totals.values())
            waits = sum(seconds for place, seconds in spans.totals.items() if place.waits_for)
            assert waits <= spans.seconds
            assert {"forward", "backward", "update"} <= {place.stage for place in spans.totals}
        return step.params(state), metrics

    for ours, theirs in zip(*(comm.simulate(program, timing, world_size=n) for timing in (True, False)), strict=True):
        for one, other in zip(fds.tree.leaves(ours), fds.tree.leaves(theirs), strict=True):
            assert torch.equal(one, other)


def test_plain_steps_are_timed_from_one_to_the_next() -> None:
    """Two steps in a row, a pause that is no part of them, a step that fails, one before a detailed step."""
    hands = Hands()
    plain = PlainSteps(hands)

    def step(seconds: float, *, fails: bool = False) -> None:
        with plain.step():
            hands.time += seconds
            if fails:
                raise RuntimeError

    step(1)
    hands.time += 2  # drawing a batch
    step(4)
    hands.time += 8  # before an evaluation, which no step follows at once
    plain.pause()
    assert (plain.count, plain.seconds, plain.outside) == (2, 1 + 2 + 4, 2)
    hands.time += 1024
    plain.pause()
    step(16)
    hands.time += 32
    with pytest.raises(RuntimeError):
        step(64, fails=True)
    assert (plain.count, plain.seconds, plain.outside) == (3, 7 + 16, 2)
    step(128)
    hands.time += 256
    plain.pause(follows=True)
    assert (plain.count, plain.seconds, plain.outside) == (4, 23 + 128 + 256, 2 + 256)
