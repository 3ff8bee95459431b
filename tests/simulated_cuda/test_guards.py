"""Every guard of the library's own streams and copies is needed: without it, the simulated device reports it.

A guard is a wait of a stream, ``record_stream``, an event that the host waits for, pinned memory, or a copy beside the device.
"""

from collections.abc import Callable

import attrs
import pytest
import torch

import functional_ds as fds
from functional_ds import comm
from functional_ds.base.device_streams import CopyStream
from functional_ds.base.weighted import Weighted
from functional_ds.checkpointing.writer import WriteData
from functional_ds.testing import Finding, simulated_cuda
from tests.planting import Bug, planted
from tests.simulated_cuda.programs import losses, simulated


def keyed() -> list[Finding]:
    """A step that draws from a key."""
    return comm.simulate(simulated, losses, "stage 0", "cuda", True, world_size=1)[0][1]


def chain(name: str, ranks: int = 1) -> Callable[[], list[Finding]]:
    """The steps of a chain."""
    return lambda: comm.simulate(simulated, losses, name, "cuda", world_size=ranks)[0][1]


def written_after() -> list[Finding]:
    """A saved tensor is offloaded and then written into."""
    with simulated_cuda(check=False) as gpu:
        x = torch.ones(4, 4, device="cuda", requires_grad=True)
        y = fds.remat(lambda x: (x * 2).sin(), policy="recompute,inputs=offload")(h := x * 1)
        with torch.no_grad():
            h.add_(1)
        y.sum().backward()
        return list(gpu.findings)


def copied() -> list[Finding]:
    """To the host and back, and back again after an event."""
    with simulated_cuda(check=False) as gpu:
        first, second, value = (
            CopyStream(gpu_device(), "first"),
            CopyStream(gpu_device(), "second"),
            torch.ones(4, device="cuda"),
        )
        host = first.to_host(value)
        del value
        back = second.copy([(torch.empty(4, device="cuda"), host)], after=torch.cuda.current_stream().record_event())
        assert back is not None
        arrival = first.to_device(host)
        total = arrival.wait() + 1
        del arrival, total
        return list(gpu.findings)


def gpu_device() -> torch.device:
    """The simulated device."""
    return torch.device("cuda", 0)


def snapshot() -> list[Finding]:
    """A state's bytes on the host, for a save in the background."""
    with simulated_cuda(check=False) as gpu:
        list(WriteData((torch.arange(8.0, device="cuda"),)).snapshot(None).pieces())
        return list(gpu.findings)


def weighed() -> list[Finding]:
    """A loss whose weight is on the host."""
    with simulated_cuda(check=False) as gpu:
        from functional_ds.base.weighted import weigh

        weigh(Weighted(torch.ones((), device="cuda"), torch.tensor(3)), "loss")
        return list(gpu.findings)


@attrs.frozen
class Guard:
    """A guard, what happens without it, and a program that shows it."""

    name: str
    function: str
    old: str
    new: str
    kind: str
    program: Callable[[], list[Finding]]


COPIES, UPDATE, BUFFERS = "base.device_streams", "transforms.offloading.update", "transforms.offloading.storage"
ACTIVATIONS, PARAMS, OPTIMIZER = chain("activations on the host"), chain("params on the host"), chain("optimizer on the host")

GUARDS = [
    Guard(
        "a copy back is waited for",
        "base.device_streams:_take",
        "current.wait_event(made)",
        "pass",
        "race",
        ACTIVATIONS,
    ),
    Guard(
        "a copy back is kept",
        "base.device_streams:_take",
        "_tell_allocator([tensor], current)",
        "pass",
        "early free",
        ACTIVATIONS,
    ),
    Guard(
        "copies follow the device",
        "base.device_streams:CopyStream.wait_for_device",
        "self._stream.wait_stream(current_stream(self.device))",
        "pass",
        "race",
        ACTIVATIONS,
    ),
    Guard(
        "the device follows copies",
        "base.device_streams:CopyStream.hold_device",
        "current_stream(self.device).wait_stream(self._stream)",
        "pass",
        "race",
        written_after,
    ),
    Guard(
        "copies follow other streams' copies",
        "base.device_streams:CopyStream.wait_for",
        "self._stream.wait_stream(other._stream)",
        "pass",
        "race",
        PARAMS,
    ),
    Guard(
        "copies follow an event",
        "base.device_streams:CopyStream.copy",
        "self._stream.wait_event(after)",
        "pass",
        "race",
        OPTIMIZER,
    ),
    Guard(
        "what is copied is kept",
        "base.device_streams:CopyStream.to_host",
        "_tell_allocator([tensor], self._stream)",
        "pass",
        "early free",
        ACTIVATIONS,
    ),
    Guard(
        "copies do not block",
        "base.device_streams:CopyStream.copy",
        "target.copy_(source, non_blocking=True)",
        "target.copy_(source)",
        "host sync",
        ACTIVATIONS,
    ),
    Guard(
        "copies back do not block",
        "base.device_streams:CopyStream.to_device",
        "host.to(self.device, non_blocking=True)",
        "host.to(self.device)",
        "host sync",
        ACTIVATIONS,
    ),
    Guard(
        "the host's memory is pinned",
        "base.device_streams:CopyStream.to_host",
        "torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)",
        "torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=False)",
        "host sync",
        ACTIVATIONS,
    ),
    Guard(
        "an update follows fetches",
        "transforms.offloading.update:Update._update_offloaded",
        "self.storage.incoming.wait_for(self.storage.prefetcher.copies)",
        "self.storage.device",
        "race",
        PARAMS,
    ),
    Guard(
        "an update waits for gradients",
        "transforms.offloading.storage:Buffer.wait",
        "self._arrived.synchronize()",
        "pass",
        "race",
        OPTIMIZER,
    ),
    Guard(
        "buffers are emptied first",
        "transforms.offloading.storage:Buffer.copy_in",
        "self.incoming.copy(pairs, after=self._copied_out)",
        "self.incoming.copy(pairs)",
        "race",
        OPTIMIZER,
    ),
    Guard(
        "a chain is waited for",
        "base.device_streams:SideStream.wait",
        "_take(_on_device(self.value), self.done)",
        "pass",
        "race",
        chain("replicated", 4),
    ),
    Guard(
        "a draw copies nothing",
        "base.prng:_beside",
        "number if number.device.type == 'cpu' else number.to(device)",
        "number.to(device)",
        "host sync",
        keyed,
    ),
    Guard("a weight is not copied", "base.weighted:_number", "overlaps(device)", "False", "host sync", weighed),
    Guard(
        "a save waits for its copy",
        "checkpointing.writer:WriteData.snapshot",
        "current_stream(device).synchronize()",
        "pass",
        "race",
        snapshot,
    ),
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("guard", [pytest.param(guard, id=guard.name) for guard in GUARDS])
def test_a_guard_is_needed(guard: Guard) -> None:
    before = guard.program()
    assert [str(each) for each in before if each.kind != "host sync"] == []
    with planted(Bug(guard.name, guard.function, guard.old, guard.new)):
        after = guard.program()
    sites = {each.second for each in before}
    new = [each for each in after if each.second not in sites]
    assert guard.kind in {each.kind for each in new}, "\n".join(map(str, new))
