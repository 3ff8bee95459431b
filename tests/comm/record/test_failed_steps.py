"""Ranks whose steps fail go on if all have failed alike; else each hears who has failed, and why."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but torch's __all__ lacks it

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.comm.record.failed_steps import FailedSteps
from functional_ds.comm.record.group import Group, Solo
from functional_ds.comm.table.collective import Call
from functional_ds.comm.table.errors import CommError
from functional_ds.comm.table.exchanges import TRANSFER
from functional_ds.comm.table.rooted_rows import BARRIER

PAIR = (0, 1)


def of_two_ranks(*, patience: float = 5.0) -> tuple[list[FailedSteps], list[int]]:
    store, broken = HashStore(), list[int]()
    return [FailedSteps(r, store, lambda r=r: broken.append(r), patience) for r in PAIR], broken  # type: ignore[misc]


def calls(steps: FailedSteps, *names: str) -> None:
    for name in names:
        steps.before(Call(BARRIER), Group(PAIR, steps.rank, name, Solo()))


def fails(steps: FailedSteps, *names: str, also: Callable[[], None] = lambda: None) -> None:
    """A step that fails after these calls."""
    with suppress(ValueError), steps.step():
        calls(steps, *names)
        also()
        raise ValueError(f"batch of rank {steps.rank}")


def test_ranks_that_fail_alike_go_on() -> None:
    steps, broken = of_two_ranks()

    def program(mine: FailedSteps) -> None:
        for _ in range(3):
            fails(mine, "world", "world", "dp")
            with mine.step():
                calls(mine, "world")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(program, steps))
    assert broken == []
    assert steps[0].store.num_keys() == 2  # those before the last are deleted


def test_a_rank_that_fails_alone_is_refused_and_the_others_hear_why() -> None:
    (first, second), broken = of_two_ranks(patience=0.02)
    fails(second, "world")
    for _ in range(2):  # the second time without waiting
        with pytest.raises(
            CommError, match=r"rank 1 failed within its collectives \(after 1 calls\): ValueError: batch of rank 1"
        ):
            calls(second, "world")
    assert broken == [1]
    assert first.told(PAIR) == "\na step of rank 1 has failed: ValueError: batch of rank 1"
    assert second.told(PAIR) == ""


def test_ranks_that_fail_in_different_calls_are_refused() -> None:
    steps, broken = of_two_ranks()
    fails(steps[0], "world")
    fails(steps[1], "world", "world")
    for mine, other in zip(steps, reversed(steps), strict=True):
        with pytest.raises(CommError, match=f"that of rank {other.rank} failed elsewhere .*batch of rank {other.rank}"):
            calls(mine, "world")
    assert broken == [0, 1]


def test_what_does_not_concern_other_ranks_passes() -> None:
    steps, broken = of_two_ranks(patience=0.0)
    fails(steps[0])  # before any call: nobody waits
    calls(steps[0], "world")
    with ThreadPoolExecutor(1) as lane:  # what a lane calls follows from what the rank has called
        fails(steps[0], also=lambda: lane.submit(calls, steps[0], "world").result())
    calls(steps[0], "world")
    with ExitStack() as outer:  # a step within another one is part of it
        outer.enter_context(steps[0].step())
        fails(steps[0], "world")
    calls(steps[0], "world")
    fails(steps[0], "world")  # messages between others are none of this rank's
    message, stages = Call(TRANSFER, {"src": 1, "dst": 2, "tag": 0}), Group((0, 1, 2), 1, "pp", Solo())
    fails(steps[1], "world", also=lambda: steps[1].before(message, stages))
    calls(steps[0], "world")
    assert broken == []


def retries(stage: int) -> tuple[list[float], str, str]:
    """All ranks fail and go on; then rank 1 alone does."""
    rank, passes, errors = comm.world().rank, [0], list[str]()
    world = comm.world().world
    world.failed_steps.patience = 0.3  # type: ignore[attr-defined]

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        passes[0] += 1
        hidden = x @ params["blocks.0"]
        if passes[0] == 2 or (passes[0] == 5 and rank == 1):
            hidden.register_hook(_raise)
        return (hidden @ params["blocks.1"]).square().mean()

    step = T.zero(stage)(fds.train_step(loss, fds.sgd(0.1)))
    state = step.init({f"blocks.{i}": torch.eye(2) for i in range(2)})
    found: list[float] = []
    while len(errors) < 3:
        try:
            state, metrics = step(state, torch.ones(2, 2) * (rank + 1))
            found.append(metrics["loss"].item())
        except (ValueError, CommError) as error:
            errors.append(str(error))
            if isinstance(error, CommError):
                break
    return found, errors[-2] if rank else "", errors[-1]


def _raise(grad: torch.Tensor) -> None:
    raise ValueError("a bad gradient")


def test_a_rank_that_catches_its_error_and_goes_on_is_named_on_processes() -> None:
    (first, _, heard), (second, caught, refused) = comm.spawn(retries, 3, world_size=2, timeout=timedelta(seconds=60))
    assert first == second
    assert len(first) == 3
    assert caught == "a bad gradient"
    assert "a step of rank 1 has failed: ValueError: a bad gradient" in heard
    assert "the last step of rank 1 failed within its collectives" in refused
    assert "rank 0 had not failed" in refused
