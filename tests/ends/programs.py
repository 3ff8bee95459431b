"""What ranks do before their processes end, and how these must end."""

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds import pipelining as pp
from functional_ds import transforms as T

__all__ = ["ALONE", "ENDS", "End"]

KEPT: list[Any] = []  # until the interpreter ends, as a script's globals
LARGE = 400_000  # elements: too many for the caller's thread to post
WIDTH = 32


class FaultError(Exception):
    """Raised by the rank that is to blame."""


# -- steps that raise -------------------------------------------------------------------------------------------------


class _RaisingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise FaultError("in the backward pass")


@attrs.define
class Fault:
    """Raises in the forward or the backward pass of one rank: in the second step, at the second call there."""

    where: str = ""
    rank: int = -1
    left: int = -1

    def arm(self, step: int) -> None:
        self.left = 2 if step == 1 and comm.world().rank == self.rank else -1

    def at(self, x: Tensor) -> Tensor:
        self.left -= 1
        if self.left != 0:
            return x
        if self.where == "forward":
            raise FaultError("in the forward pass")
        result: Tensor = _RaisingBackward.apply(x)  # type: ignore[no-untyped-call]
        return result


def layer(params: Mapping[str, Tensor], x: Tensor, *, fault: Fault) -> Tensor:
    return fault.at(torch.tanh(x @ params["w"]))


def leaves(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"w": torch.randn(WIDTH, WIDTH, generator=generator)} for _ in range(count)]


def trained(stage: int, fault: Fault) -> None:
    """Steps of ZeRO."""

    def loss(params: list[dict[str, Tensor]], x: Tensor) -> Tensor:
        for each in params:
            x = layer(each, x, fault=fault)
        return x.square().mean()

    step = T.zero(stage)(fds.train_step(loss, fds.adamw(1e-3)))
    run(step, step.init(leaves(3)), torch.ones(4, WIDTH), fault)


def piped(make: Callable[[int, int], pp.Schedule], fault: Fault) -> None:
    """Steps of a pipeline of two ranks."""
    schedule = make(2, 4)
    params = leaves(schedule.stages)
    stages = pp.stages([partial(layer, fault=fault)] * schedule.stages, params, loss=lambda y, x: y.square().mean())
    step = T.pipeline(schedule, stages)(fds.train_step(stages, fds.adamw(1e-3)))
    run(step, step.init(params), torch.ones(8, WIDTH), fault)


def run(step: Any, state: Any, batch: Tensor, fault: Fault) -> None:
    for index in range(3):
        fault.arm(index)
        state, metrics = step(state, batch)
        KEPT[:] = [state, metrics]


# -- messages ---------------------------------------------------------------------------------------------------------


def receive_nobody_sends(*, then: str, size: int = 3) -> None:
    """Rank 1 has a receive under way when its program ends."""
    comm.barrier()
    other = 1 - comm.world().rank
    if comm.world().rank == 1:
        pending = comm.start(comm.recv, torch.empty(size), other)
        if then == "polled":
            pending.poll(0.01)
        KEPT.append(pending)
        if then == "dropped":
            KEPT.clear()
            del pending
        if then == "raise":
            raise FaultError("with a receive under way")
        if then == "exit":
            sys.exit(7)
    elif then in ("raise", "exit"):
        comm.recv(torch.empty(size), other)


def received_later(size: int, *, kept: bool) -> None:
    """Rank 0 ends at once; what it has sent arrives."""
    if comm.world().rank == 0:
        pending = comm.start(comm.send, torch.full((size,), 3.0), 1)
        if kept:
            KEPT.append(pending)
    else:
        time.sleep(0.5)
        assert comm.recv(torch.empty(size), 0).eq(3).all()


def reduced_later(size: int) -> None:
    """Nobody waits, and one rank comes late: each part is carried out."""
    if comm.world().rank == 1:
        time.sleep(0.5)
    for _ in range(3):
        KEPT.append(comm.start(comm.all_reduce, torch.ones(size)))
        comm.start(comm.all_gather, torch.ones(size))


def many_threads() -> None:
    """Twelve channels, each with calls under way that end while the program does."""
    for index in range(12):
        channel = comm.world().channel(str(index))
        KEPT.extend(comm.start(comm.all_reduce, torch.ones(LARGE), channel) for _ in range(2))


def destroys(whose: str, *, pending: bool) -> None:
    """The world is left, with a receive under way or without."""
    comm.start(comm.all_reduce, torch.ones(LARGE)).wait()
    if pending:
        KEPT.append(comm.start(comm.recv, torch.empty(LARGE), 1 - comm.world().rank))
    (comm if whose == "ours" else dist).destroy_process_group()


def raises_and_destroys() -> None:
    """A program that leaves its world whatever happens."""
    try:
        receive_nobody_sends(then="raise")
    finally:
        comm.destroy_process_group()


def raises_while_checked() -> None:
    """Rank 1 has a call under way whose other ranks it waits for in the store.

    It gives the call up after 0.2 s, and says so, or sees in that moment that rank 0, which has lost it, has left.
    """
    with comm.debug.checked():
        if comm.world().rank == 1:
            KEPT.append(comm.start(comm.all_reduce, torch.ones(3), comm.world().channel("late")))
            raise FaultError("in a checked block")
        comm.recv(torch.empty(3), 1)


def caught_elsewhere() -> None:
    """The rank that loses the other one ends by an exit code of its own."""
    try:
        receive_nobody_sends(then="raise")
    except comm.errors.CommError:
        sys.exit(5)


def plain(*, collectives: int = 50) -> None:
    """torch alone, for comparison."""
    for _ in range(collectives):
        dist.all_reduce(torch.ones(1000))


def plain_thread() -> None:
    """torch alone, and a thread that waits for a message."""
    dist.barrier()
    KEPT.append(dist.irecv(torch.empty(3), 1 - dist.get_rank()))
    thread = threading.Thread(target=KEPT[0].wait, daemon=True)
    thread.start()


def plain_raise() -> None:
    """torch alone; a rank raises while the other waits for it."""
    dist.barrier()
    if dist.get_rank() == 1:
        raise FaultError("torch alone")
    dist.all_reduce(torch.ones(3))


def forked() -> None:
    """A child is no rank: it says so, and ends as a program does."""
    for _ in range(2):
        comm.start(comm.all_reduce, torch.ones(LARGE)).wait()
        KEPT.append(comm.start(comm.recv, torch.empty(3), 1 - comm.world().rank))
        child = os.fork()
        if child == 0:
            refused = 0
            for call in (comm.barrier, KEPT.pop().wait, partial(comm.all_reduce, torch.ones(3))):
                try:
                    call()
                except comm.errors.CommError as error:
                    refused += "this process was forked from that of rank" in str(error)
            sys.exit(0 if refused == 3 and comm.world().size == 2 else 1)
        assert os.waitpid(child, 0)[1] == 0
        comm.send(torch.ones(3), 1 - comm.world().rank)
        assert KEPT.pop().wait().sum() == 3


# -- how they end -----------------------------------------------------------------------------------------------------


@attrs.frozen
class End:
    """A program, and what becomes of its ranks.

    Attributes:
        program: what each rank runs.
        blamed: the rank that torchrun must name; None where all end well.
        code: that rank's exit code.
        said: what that rank's stderr must have.
    """

    program: Callable[[], None]
    blamed: int | None = None
    code: int = 1
    said: tuple[str, ...] = ()


def raising(run: Callable[[Fault], None], where: str, rank: int) -> End:
    return End(partial(run, Fault(where, rank)), rank, said=RAISED)


RAISED = ("FaultError",)
GIVEN_UP = ("rank 1 ends and gives up", "under way: recv(src=0) on 'world'")

ENDS: dict[str, End] = {
    "zero": End(partial(trained, 3, Fault())),
    "pipeline": End(partial(piped, pp.one_f_one_b, Fault())),
    **{
        f"zero {stage}, {where} of rank {rank}": raising(partial(trained, stage), where, rank)
        for stage in range(4)
        for where in ("forward", "backward")
        for rank in range(2)
    },
    **{
        f"pipeline {make.__name__}, {where} of rank {rank}": raising(partial(piped, make), where, rank)
        for make in (pp.one_f_one_b, pp.zbv)
        for where in ("forward", "backward")
        for rank in range(2)
    },
    "a receive, and a raise": End(partial(receive_nobody_sends, then="raise"), 1, said=RAISED + GIVEN_UP),
    "a large receive, and a raise": End(partial(receive_nobody_sends, then="raise", size=LARGE), 1, said=RAISED + GIVEN_UP),
    "a receive, and an exit": End(partial(receive_nobody_sends, then="exit"), 1, 7, GIVEN_UP),
    "a receive, and destroy": End(raises_and_destroys, 1, said=RAISED + GIVEN_UP),
    "a checked block, and a raise": End(raises_while_checked, 1, said=RAISED),
    "a raise, caught elsewhere": End(caught_elsewhere, 1, said=RAISED),
    "a receive": End(partial(receive_nobody_sends, then="kept")),
    "a receive that is polled": End(partial(receive_nobody_sends, then="polled")),
    "a receive that is dropped": End(partial(receive_nobody_sends, then="dropped")),
    "a large receive": End(partial(receive_nobody_sends, then="kept", size=LARGE)),
    "received later": End(partial(received_later, 3, kept=True)),
    "received later, dropped": End(partial(received_later, 3, kept=False)),
    "received later, large": End(partial(received_later, LARGE, kept=True)),
    "reduced later": End(partial(reduced_later, 3)),
    "reduced later, large": End(partial(reduced_later, LARGE)),
    "many threads": End(many_threads),
    "our destroy": End(partial(destroys, "ours", pending=False)),
    "torch's destroy": End(partial(destroys, "torch's", pending=False)),
    "our destroy, and a receive": End(partial(destroys, "ours", pending=True)),
    "torch's destroy, and a receive": End(partial(destroys, "torch's", pending=True)),
    "a child": End(forked),
}

ALONE: dict[str, Callable[[], None]] = {"collectives": plain, "a receive in a thread": plain_thread, "a raise": plain_raise}
