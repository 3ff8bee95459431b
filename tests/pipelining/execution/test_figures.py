"""Figures of one run, held to each other: what is sent is what was priced, times are within the clock's, parts add up."""

from time import perf_counter
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import functional_ds as fds
from functional_ds import comm, memory
from functional_ds import pipelining as pp
from functional_ds import transforms as T
from tests.pipelining.cases import generated


def layer(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"]) @ p["v"]


def model(stages: int) -> tuple[pp.Stages, Any]:
    params = [{"w": torch.ones(6, 6) / 7, "v": torch.ones(6, 6) / 7} for _ in range(stages)]
    return pp.stages([layer] * stages, params, loss=lambda y, batch: y.square().mean()), params


@pytest.mark.law(55)
@settings(max_examples=8)
@given(schedule=generated(p=3, m=4).filter(lambda schedule: schedule.stages <= 6), rows=st.sampled_from((1, 3)))
def test_messages_are_those_that_were_priced(schedule: pp.Schedule, rows: int) -> None:
    """What all ranks send in a step is what they receive: each boundary between ranks once forward and once back."""
    stages, params = model(schedule.stages)
    batch = (torch.ones(rows * schedule.microbatches, 6),)

    def program() -> tuple[comm.Ledger, float]:
        step = T.pipeline(schedule, stages)(fds.train_step(stages, fds.sgd(0.1)))
        state, _ = step(step.init(params), batch)
        began = perf_counter()
        with comm.ledger(times=True) as book:
            step(state, batch)
        return book, perf_counter() - began

    found = comm.simulate(program, world_size=schedule.ranks)
    costs = pp.estimated(stages, params, (torch.ones(rows, 6),))
    message = costs.of("message", schedule.stages)
    crossing = [i for i in range(schedule.stages - 1) if schedule.placement[i] != schedule.placement[i + 1]]
    rows_of = {name: [row for book, _ in found for row in book.rows if row.collective == name] for name in ("send", "recv")}
    sent = sum(row.bytes for row in rows_of["send"])
    assert sent == 2 * schedule.microbatches * sum(message[i] for i in crossing)
    assert sent == sum(row.payload for row in rows_of["recv"])
    assert sum(row.calls for row in rows_of["send"]) == sum(row.calls for row in rows_of["recv"])
    for book, whole in found:
        assert sum(row.seconds - row.overlapped_seconds for row in book.rows) <= whole
        assert all(0 <= event.ended - event.began <= whole for event in book.events)
        assert book.bytes == sum(row.bytes for row in book.rows) == sum(event.bytes for event in book.events)


@pytest.mark.law(20)
@settings(max_examples=8)
@given(stage=st.sampled_from((0, 1, 2, 3)), live=st.integers(1, 3), prefetch=st.integers(0, 2), n=st.sampled_from((2, 3)))
def test_memory_adds_up_and_stays_below_its_bounds(stage: int, live: int, prefetch: int, n: int) -> None:
    """Parts are the whole; what was whole at a time lies between the largest unit and all of them."""
    stages, params = model(4)
    options: dict[str, Any] = {"max_live_units": live, "prefetch": prefetch} if stage == 3 else {}
    promised = T.zero(stage, **options).cost_report(params, n=n)

    def program() -> tuple[memory.Memory, int]:
        step = T.zero(stage, **options)(fds.train_step(stages, fds.adam(0.1)))
        state = step.init(params)
        with memory.recorded() as run:
            for _ in range(3):
                state, _ = step(state, (torch.ones(4, 6),))
        return memory.measured(state), run.events.peak("all_gather") if stage == 3 else 0

    predicted = memory.predicted(lambda: T.zero(stage, **options)(fds.train_step(stages, fds.adam(0.1))), params, world_size=n)
    for found, peak in comm.simulate(program, world_size=n):
        assert found.state == found.params + found.masters + found.optimizer + found.buffers == sum(found.places.values())
        assert found.total == sum(getattr(found, kind) for kind in memory.KINDS)
        assert attrs.evolve(predicted, gradients=0, gathered=0) == found
        assert found.params == promised.held()
        largest = max(2 * leaf.nbytes for leaf in params[0].values())
        if stage < 3:
            assert peak == promised.fetched() == predicted.gathered == 0
        else:
            assert max(largest, predicted.gathered) <= peak <= sum(leaf.nbytes for leaf in fds.tree.leaves(params))
