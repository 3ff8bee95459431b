"""Collectives of tensors on the simulated device: on a separate stream per communicator, as in NCCL.

A world of processes uses Gloo, a simulated world its own transport; the streams' ordering is NCCL's.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from functional_ds.base.torch_private import schema_of
from functional_ds.base.torch_replaced import later_work
from functional_ds.comm.record.group import Group
from functional_ds.comm.table.collective import Call, Handle, WatchedHandle

from .gpu import Access, SimulatedGpu, Touch, tensors_in
from .streams import SimulatedEvent

# torch's operators: which argument is written, and which is read.
_ARGUMENTS: dict[str, tuple[int | None, int | None]] = {
    **dict.fromkeys(["allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "recv_"], (0, None)),
    **dict.fromkeys(["_allgather_base_", "allgather_", "_reduce_scatter_base_", "reduce_scatter_"], (0, 1)),
    **dict.fromkeys(["gather_", "scatter_", "alltoall_base_", "alltoall_"], (0, 1)),
    **dict.fromkeys(["allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_"], (0, 1)),
    "send": (None, 0),
}


def collective(gpu: SimulatedGpu, func: Any, args: Any, kwargs: Any) -> Any:
    """One of torch.distributed's collectives, carried out by the group's own backend."""
    name = schema_of(func).name.partition("::")[2]
    written, read = _ARGUMENTS.get(name, (None, None))
    writes = [] if written is None else list(tensors_in(args[written]))
    reads = [] if read is None else list(tensors_in(args[read]))
    held = any(map(gpu.holds, [*reads, *writes]))
    sent = args
    if held and name in {"_allgather_base_", "_reduce_scatter_base_"}:  # NCCL looks at sizes alone, Gloo at shapes
        sent = (args[0].view(-1), args[1].view(-1), *args[2:])
    with gpu.paused():
        out = func(*sent, **kwargs)
    if not held:
        return out
    *results, script = (args[0], out[-1]) if sent is not args else out if isinstance(out, tuple) else (out,)
    work, group = dist.Work.unbox(script), dist.ProcessGroup.unbox(next(x for x in args if isinstance(x, torch.ScriptObject)))
    stream = gpu.communicator(group.group_name, group.group_desc or group.group_name)
    stream.wait_stream(gpu.stream)
    access = gpu.launch(f"nccl {name.strip('_')}", reads, writes, stream)
    done = stream.record_event()
    gpu.keep(access, [*reads, *writes], work.wait)

    def wait(_: Any) -> bool:
        gpu.finish(access)
        gpu.stream.wait_event(done)
        return True

    boxed = later_work(wait)
    return (*results, boxed) if results else boxed


def _arrived(
    gpu: SimulatedGpu, access: Access, done: SimulatedEvent, given: Sequence[Tensor], wait: Callable[[], list[Tensor]]
) -> list[Tensor]:
    """The results of a simulated world's collective on the device: the current stream waits for ``done``.

    ``given`` is held as long as the call is, as NCCL does.
    """
    results = wait()
    fresh = [result for result in results if gpu.memory_of(result) is None]
    for result in fresh:
        gpu.put(result)
    for result in fresh:
        if (memory := gpu.memory_of(result)) is not None:
            gpu.note(memory, Touch(access, 0, result.nbytes, write=True))
    gpu.stream.wait_event(done)
    return results


def started(
    gpu: SimulatedGpu,
    start: Callable[..., Handle],
    world: Any,
    call: Call,
    tensors: Sequence[Tensor],
    group: Group,
    **options: Any,
) -> Handle:
    """Starts a simulated world's collective."""
    if not any(map(gpu.holds, tensors)):
        return start(world, call, tensors, group, **options)
    stream = gpu.communicator((group.ranks, group.name), group.name)
    stream.wait_stream(gpu.stream)
    access = gpu.launch(f"nccl {call.collective.name}", tensors, [], stream)
    for tensor in tensors:
        if (memory := gpu.memory_of(tensor)) is not None:
            memory.recorded.add(stream.id)
    with gpu.paused():
        handle = start(world, call, tensors, group, **options)
    return WatchedHandle(handle, partial(_arrived, gpu, access, stream.record_event(), tensors), gpu.paused)
