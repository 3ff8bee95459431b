"""What ranks do while a watchdog watches them: each goes wrong in its own way."""

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch

import functional_ds as fds
from functional_ds import comm
from functional_ds.fitting import watchdog
from tests.fitting import models

TIMEOUT = timedelta(seconds=8)  # more than a busy machine takes between two beats
LONG = 300.0
WAITING = ("signal", "signal alone")  # faults that a test sends to a rank


def steps(folder: str, fault: str) -> None:
    """Twenty steps of a sum each; in the fifth comes the fault."""
    rank = comm.world().rank
    with watchdog(TIMEOUT) as watch:
        for step in range(20):
            watch.at(step, "in the step")
            if step == 5:
                Path(folder, f"there-{rank}").touch()
                go_wrong(fault, rank)
                while fault in WAITING and not Path(folder, "signalled").exists():  # alive, as far as anybody can tell
                    watch.at(step, "waiting for the test")
                    time.sleep(0.02)
                watch.at(step, "in the step")
            comm.all_reduce(torch.ones(3))
    if fault == "none":
        Path(folder, f"done-{rank}").touch()


def go_wrong(fault: str, rank: int) -> None:
    if fault == "sleep" and rank == 1:
        time.sleep(LONG)
    elif fault == "collective" and rank == 1:
        comm.recv(torch.ones(2), 0)
    elif fault == "raise" and rank == 1:
        raise ValueError("seven")


def raise_and_stay(folder: str) -> None:
    """Rank 1 raises, and its process does not end."""
    try:
        steps(folder, "raise")
    except ValueError:
        time.sleep(LONG)


def fitted(folder: str) -> None:
    """The data of rank 1 hang."""

    def batch(index: int) -> torch.Tensor:
        if index == 3 and comm.world().rank == 1:
            time.sleep(LONG)
        return models.batch(index)

    step, state = models.build()
    fds.fit(step, state, batch, steps=6, checkpoints=fds.Checkpoints(Path(folder, "checkpoints")), timeout=TIMEOUT)


STEPS, EVERY = 40, 3


def trained(folder: str, milliseconds: int = 0, seconds: float = 20, drawn: Callable[[int], None] = lambda index: None) -> None:
    """A run that is long enough to be killed in; leaves the params it came to. ``drawn`` is told of each batch."""
    step, state = models.build()

    def batch(index: int) -> torch.Tensor:
        time.sleep(milliseconds / 1000)
        drawn(index)
        return models.batch(index)

    checkpoints = fds.Checkpoints(Path(folder, "checkpoints"), every=EVERY, keep_last=2)
    state = fds.fit(step, state, batch, steps=STEPS, checkpoints=checkpoints, timeout=timedelta(seconds=seconds))
    params = step.params(state)
    if comm.world().rank == 0:
        torch.save(params, Path(folder, "params.new"))
        Path(folder, "params.new").replace(Path(folder, "params"))


def undisturbed() -> dict[str, torch.Tensor]:
    """What such a run comes to."""
    step, state = models.build()
    found: dict[str, torch.Tensor] = step.params(fds.fit(step, state, models.batch, steps=STEPS))
    return found
