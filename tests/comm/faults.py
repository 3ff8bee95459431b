"""Programs with one fault each, for the simulator and for checked processes.

They run in spawned processes, so they stand at the top level of a module that can be imported there. Each is written for
three ranks, and says in ``FAULTS`` what the error must name: on the simulator, and on which ranks of checked processes.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import attrs
import torch

from functional_ds import comm

__all__ = ["FAULTS", "Fault", "caught"]


def facing_sends() -> None:
    here = comm.world().rank
    if here < 2:
        comm.send(torch.ones(2), 1 - here)
        comm.recv(torch.ones(2), 1 - here)


def skipped_on_one_rank() -> None:
    if comm.world().rank != 1:
        comm.barrier()


def skipped_before_another() -> None:
    if comm.world().rank != 1:
        comm.all_reduce(torch.ones(2))
    comm.all_gather(torch.ones(2))


def swapped_order() -> None:
    calls: list[Callable[[Any], Any]] = [comm.all_reduce, comm.broadcast]
    for call in calls if comm.world().rank else calls[::-1]:
        call(torch.ones(2))


def wrong_shape() -> None:
    comm.all_reduce(torch.ones(2 + (comm.world().rank == 2)))


def wrong_dtype() -> None:
    comm.all_reduce(torch.ones(2, dtype=torch.float64 if comm.world().rank == 2 else torch.float32))


def wrong_root() -> None:
    comm.broadcast(torch.ones(2), src=comm.world().rank % 2)


def wrong_group() -> None:
    pair, everyone = comm.new_group([0, 1], "pair"), comm.world()
    comm.all_reduce(torch.ones(2), pair if everyone.rank == 0 else everyone)


def wrong_rows() -> None:
    comm.all_to_all(torch.ones(3, 2), input_splits=[1, 1, 1], output_splits=[1, 1, 1 + (comm.world().rank == 0)])


def wrong_template() -> None:
    if comm.world().rank == 0:
        comm.send(torch.ones(2), dst=1)
    elif comm.world().rank == 1:
        comm.recv(torch.ones(3), src=0)


def nobody_sends() -> None:
    if comm.world().rank == 2:
        comm.recv(torch.ones(2), src=0)


def under_way_and_swapped() -> None:
    """Nothing waits where the fault is."""
    calls: list[Callable[..., Any]] = [comm.all_reduce, comm.all_gather]
    pendings = [comm.start(call, torch.ones(2)) for call in (calls if comm.world().rank else calls[::-1])]
    for pending in pendings:
        pending.wait()


def raises_on_one_rank() -> None:
    if comm.world().rank == 1:
        raise KeyError("lost")
    comm.all_reduce(torch.ones(2))


def dies_on_one_rank() -> None:
    if comm.world().rank == 1:
        os._exit(3)
    comm.all_reduce(torch.ones(2))


@attrs.frozen
class Fault:
    """A program and what must be said of it.

    Attributes:
        program: the program.
        error: what the simulator raises.
        says: what the simulator's error must contain.
        ranks: for each rank of checked processes that must raise, what its error must contain.
    """

    program: Callable[[], None]
    error: type[BaseException]
    says: tuple[str, ...]
    ranks: dict[int, tuple[str, ...]]

    @property
    def name(self) -> str:
        return self.program.__name__


def _all(*says: str) -> dict[int, tuple[str, ...]]:
    return dict.fromkeys(range(3), says)


_SHAPES = ("all_reduce(op='sum') of [float32[2]]", "all_reduce(op='sum') of [float32[3]]")
_DTYPES = ("all_reduce(op='sum') of [float32[2]]", "all_reduce(op='sum') of [float64[2]]")
_ROWS = ("rank 2 of the group sends 1 rows to rank 0", "expects 2")

FAULTS: list[Fault] = [
    Fault(
        facing_sends,
        comm.errors.DeadlockError,
        ("rank 0 waits in send(dst=1) of [float32[2]]", "rank 1 waits in send(dst=0) of [float32[2]]", "rank 2 has finished"),
        {
            0: ("in send(dst=1) of [float32[2]]", "rank 1 had not come", "rank 1 waits in send(dst=0)"),
            1: ("in send(dst=0) of [float32[2]]", "rank 0 had not come", "rank 0 waits in send(dst=1)"),
        },
    ),
    Fault(
        skipped_on_one_rank,
        comm.errors.DeadlockError,
        ("rank 0 waits in barrier()", "rank 2 waits in barrier()", "for rank 1", "rank 1 has finished"),
        dict.fromkeys((0, 2), ("in barrier()", "rank 1 had not come", "rank 1 has left the checked block")),
    ),
    Fault(
        skipped_before_another,
        comm.errors.MismatchError,
        ("called all_reduce(op='sum') of [float32[2]] at faults.py", "rank 1 called all_gather(dim=0, tiled=True)"),
        _all("all_reduce(op='sum') of [float32[2]] at faults.py", "rank 1 called all_gather(dim=0, tiled=True)"),
    ),
    Fault(
        swapped_order,
        comm.errors.MismatchError,
        ("rank 0 called broadcast(src=0)", "called all_reduce(op='sum')"),
        _all("rank 0 called broadcast(src=0)", "called all_reduce(op='sum')"),
    ),
    Fault(wrong_shape, comm.errors.MismatchError, (*_SHAPES, "rank 2 called"), _all(*_SHAPES, "rank 2 called")),
    Fault(wrong_dtype, comm.errors.MismatchError, (*_DTYPES, "rank 2 called"), _all(*_DTYPES, "rank 2 called")),
    Fault(
        wrong_root,
        comm.errors.MismatchError,
        ("rank 1 called broadcast(src=1)", "called broadcast(src=0)"),
        _all("rank 1 called broadcast(src=1)", "called broadcast(src=0)"),
    ),
    Fault(
        wrong_group,
        comm.errors.DeadlockError,
        ("on group 'pair' at faults.py", "for rank 1", "on group 'world' at faults.py", "for rank 0"),
        {
            0: ("on group 'pair'", "rank 1 had not come", "rank 1 waits in all_reduce"),
            1: ("on group 'world'", "rank 0 had not come", "rank 0 waits in all_reduce"),
            2: ("on group 'world'", "rank 0 had not come", "rank 0 waits in all_reduce"),
        },
    ),
    Fault(wrong_rows, comm.errors.MismatchError, _ROWS, _all(*_ROWS)),
    Fault(
        wrong_template,
        comm.errors.MismatchError,
        ("rank 0 called send(dst=1) of [float32[2]]", "rank 1 called recv(src=0) of [float32[3]]"),
        dict.fromkeys((0, 1), ("rank 0 called send(dst=1) of [float32[2]]", "rank 1 called recv(src=0) of [float32[3]]")),
    ),
    Fault(
        nobody_sends,
        comm.errors.DeadlockError,
        ("rank 2 waits in recv(src=0) of [float32[2]]", "for rank 0", "rank 0 has finished"),
        {2: ("in recv(src=0) of [float32[2]]", "rank 0 had not come", "rank 0 has left the checked block")},
    ),
    Fault(
        under_way_and_swapped,
        comm.errors.MismatchError,
        ("rank 0 called all_gather(dim=0, tiled=True)", "called all_reduce(op='sum')"),
        _all("rank 0 called all_gather(dim=0, tiled=True)", "called all_reduce(op='sum')"),
    ),
    Fault(
        raises_on_one_rank,
        KeyError,
        ("lost",),
        {
            0: ("in all_reduce", "rank 1 had not come", "rank 1 has raised KeyError: 'lost'"),
            1: ("lost",),
            2: ("in all_reduce", "rank 1 had not come", "rank 1 has raised KeyError: 'lost'"),
        },
    ),
]


def caught(names: list[str], seconds: float) -> dict[str, str | None]:
    """What this rank's error says for each program, run checked; None where it raises nothing."""
    programs, found = {fault.name: fault.program for fault in FAULTS}, {}
    for name in names:
        try:
            with comm.debug.checked(timeout=timedelta(seconds=seconds)):
                programs[name]()
            found[name] = None
        except Exception as error:
            found[name] = str(error)
        comm.debug.monitored_barrier(timeout=timedelta(seconds=60))
    return found
