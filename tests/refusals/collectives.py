"""Collectives and worlds that are refused: ranks would wait for each other, or add up different things."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from functional_ds import comm, seq
from tests.refusals.refusal import Refusal

ONE = torch.ones(1)


def on_two(program: Callable[[], Any], **options: Any) -> None:
    comm.simulate(program, world_size=2, **options)


def others() -> Any:
    return comm.all_reduce(ONE) if comm.world().rank == 0 else comm.all_gather(ONE)


def both_receive() -> Any:
    other = 1 - comm.world().rank
    found = comm.recv(ONE, other)
    comm.send(ONE, other)
    return found


def not_awaited() -> None:
    if comm.world().rank == 0:
        comm.start(comm.all_reduce, ONE)


def written() -> Any:
    x = torch.ones(2)
    pending = comm.start(comm.all_reduce, x)
    x.add_(1)
    return pending.wait()


def facing() -> None:
    """Both send first."""
    other = 1 - comm.world().rank
    for pending in (comm.start(comm.send, ONE, other), comm.start(comm.recv, ONE, other)):
        pending.wait()


def from_another_thread() -> None:
    found: list[BaseException] = []

    def call() -> None:
        try:
            comm.all_reduce(ONE, group=here)
        except comm.errors.CommError as error:
            found.append(error)

    here = comm.world()
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    raise found[0]


def in_a_world_of_one(call: Callable[[comm.Group], Any]) -> None:
    here = comm.init_distributed("gloo", world_size=1, rank=0)
    try:
        call(here)
    finally:
        comm.destroy_process_group()


def after_the_end() -> None:
    here = comm.init_distributed("gloo", world_size=1, rank=0)
    dist.destroy_process_group()
    comm.all_reduce(ONE, here)


def cut_by_torch(here: comm.Group) -> Any:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    return comm.all_gather(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))


def other_masks() -> Any:
    x = torch.ones(1, 2, 4, 8)
    return seq.ring(comm.world())(x, x, x, causal=comm.world().rank == 0)


REFUSALS = [
    Refusal(
        what="split attention with another mask or layout on one rank, a split cross entropy with other labels, "
        "under `comm.simulate` or `comm.debug.checked()`",
        error=comm.errors.MismatchError,
        says=r"for ring attention\(.*causal=(True|False).*for ring attention\(.*causal=(True|False)",
        advises=r"at collectives\.py:\d+, rank . called",
        why="Each rank would compute a part of something else.",
        instead="Pass the same masks, layout, labels and tokens on all ranks of the group.",
        program=lambda: on_two(other_masks),
    ),
    Refusal(
        what="forward mode (`torch.func.jvp`, `jacfwd`) through a collective",
        error=ValueError,
        says="forward mode .* does not go through collectives: its derivative would be zero",
        advises=r"use torch\.autograd\.grad",
        why="The result would lose its tangent.",
        instead="Use `torch.autograd.grad`, or detach the tensor.",
        program=lambda: on_two(lambda: torch.func.jvp(comm.all_reduce, (torch.ones(2),), (torch.ones(2),))),
    ),
    Refusal(
        what="ranks that call different collectives",
        error=comm.errors.MismatchError,
        says="called different collectives: rank . called all_reduce|called different collectives: rank . called all_gather",
        advises=r"at collectives\.py:\d+, rank . called",
        why="Processes would wait forever, or read each other's bytes.",
        instead="Make the same calls in the same order; the message names both lines.",
        program=lambda: on_two(others),
    ),
    Refusal(
        what="ranks that wait for each other",
        error=comm.errors.DeadlockError,
        says="deadlock: no rank can proceed",
        advises=r"collectives\.py:\d+",
        why="Processes would wait forever.",
        instead="Use `comm.batch_p2p`, or let one rank send first; the message names each rank's line.",
        program=lambda: on_two(both_receive),
    ),
    Refusal(
        what="a call that some ranks never make",
        error=comm.errors.UnmatchedError,
        says="all_reduce",
        advises=r"collectives\.py:\d+",
        why="Its result can never come.",
        instead="Make the call on all ranks, and `wait()` on it.",
        program=lambda: on_two(not_awaited),
    ),
    Refusal(
        what="a tensor that is written before the `wait()` of its collective",
        error=comm.errors.WrittenError,
        says="wrote into input of .*all_reduce",
        advises=r"started at collectives\.py:\d+, written before the wait at collectives\.py:\d+",
        why="The result would depend on the time of the write.",
        instead="Write after `wait()`, or pass a `clone()`.",
        program=lambda: on_two(written),
    ),
    Refusal(
        what='orders on which NCCL would hang, under `comm.simulate(..., rules="nccl")`',
        error=comm.errors.DeadlockError,
        says='under rules="nccl"',
        advises="rank 0 launched send.*rank 1 launched send",
        why="On NCCL a launched call waits on its stream, and blocks those after it.",
        instead="Use one order on all ranks, and `comm.batch_p2p` for messages that face each other.",
        program=lambda: on_two(facing, rules="nccl"),
    ),
    Refusal(
        what="a collective from another thread than the rank's, under `comm.simulate`",
        error=comm.errors.CommError,
        says="comes from thread .*; a simulated rank is one thread",
        advises="call collectives from there",
        why="The order of calls would depend on the threads.",
        instead="Call collectives from the rank's thread.",
        program=lambda: on_two(from_another_thread),
    ),
    Refusal(
        what="a group whose processes have left (`destroy_process_group`, ours or torch's)",
        error=comm.errors.CommError,
        says="was destroyed",
        advises="take a group of the new world",
        why="Its connections are closed.",
        instead="Take a group of the new world: `comm.world()`, `comm.mesh(...)`.",
        program=after_the_end,
    ),
    Refusal(
        what="a DTensor in a collective",
        error=ValueError,
        says="a DTensor cannot be sent",
        advises=r"leaf.to_local\(\), or",
        why="Torch has sharded it over a mesh.",
        instead="Pass `leaf.to_local()` or `leaf.full_tensor()`.",
        program=lambda: in_a_world_of_one(cut_by_torch),
    ),
    Refusal(
        what="sums of float8",
        error=ValueError,
        says="op='sum' of a tensor of torch.float8_e4m3fn",
        advises="cast",
        why="Torch does not add such numbers.",
        instead="Cast to bf16 or fp32, reduce, and cast back.",
        program=lambda: on_two(lambda: comm.all_reduce(torch.ones(2).to(torch.float8_e4m3fn))),
    ),
    Refusal(
        what="a tensor that does not divide by the ranks",
        error=ValueError,
        says="has size 3; a group of 2 needs a multiple of 2",
        advises="needs a multiple of 2",
        why="Ranks would get parts of different sizes.",
        instead="Pad it, use another dim, or pass `uneven=True` to `all_gather`.",
        program=lambda: on_two(lambda: comm.reduce_scatter(torch.ones(3))),
    ),
    Refusal(
        what="a result that was not waited for",
        error=TypeError,
        says="is a result to come, no tensor",
        advises="wait",
        why="It has no values yet.",
        instead="Call `.wait()`.",
        program=lambda: on_two(lambda: comm.start(comm.all_reduce, ONE) + 1),
    ),
    Refusal(
        what="a lambda or an inner function in `comm.spawn`",
        error=ValueError,
        says="the new processes cannot import .*, since it is a lambda",
        advises="define it at the top",
        why="A new process imports its program by name.",
        instead="Define it at the top of a module, or use `comm.simulate`.",
        program=lambda: comm.spawn(lambda: 1, world_size=2),
    ),
    Refusal(
        what="a file to meet in, in a folder that does not exist",
        error=ValueError,
        says="init_method='file:///no/such/folder/store'",
        advises="name a file in a folder that exists and that all ranks see",
        why="Ranks would wait for the folder.",
        instead="Make the folder first, where all ranks see it.",
        program=lambda: comm.init_distributed("gloo", 2, 1, "file:///no/such/folder/store"),
    ),
    Refusal(
        what="ranks that do not come within the timeout",
        error=comm.errors.TimedOutError,
        says="rank 0 of 2 waited 0:00:00.100000 for the others to join",
        advises="rank 1 had not come",
        why="The others would wait forever.",
        instead="Look at why those ranks have not started; raise `timeout=` if they may take longer.",
        program=lambda: comm.init_distributed("gloo", 2, 0, timeout=timedelta(seconds=0.1), store=dist.HashStore()),
    ),
]
