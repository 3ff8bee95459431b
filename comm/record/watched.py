"""The inputs of asynchronous collectives, watched for writes between the start and the wait."""

import zlib
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from functional_ds.base.torch_private import version_of
from functional_ds.comm.table.collective import Call, Handle, Here
from functional_ds.comm.table.errors import WrittenError

from .group import Group, call_site

__all__ = ["WatchedInputs"]


@attrs.define(eq=False)
class WatchedInputs:
    """A call under way; the wait raises where an input was written since the start.

    A transport may read an input at any time until the wait. A write is noticed by torch's version counter, and by a checksum
    of CPU tensors, because ``.data`` and NumPy write without counting. The checksum reads the tensor twice.
    """

    inner: Handle
    call: Call
    group: Group
    tensors: Sequence[Tensor]
    site: str
    before: "Sequence[tuple[int | None, int]]"

    @staticmethod
    def of(inner: Handle, call: Call, tensors: Sequence[Tensor], group: Group) -> "WatchedInputs":
        """The handle, watched from now on."""
        tensors = tensors if call.collective.reads(Here(call.options, group.rank, group.size)) else ()
        return WatchedInputs(inner, call, group, tensors, call_site(), [_state(tensor) for tensor in tensors])

    @property
    def ended(self) -> float | None:
        return self.inner.ended

    def wait(self) -> list[Tensor]:
        results = self.inner.wait()
        for place, (tensor, before) in enumerate(zip(self.tensors, self.before, strict=True)):
            if _state(tensor) != before:
                raise self._error(place)
        self.tensors, self.before = (), ()
        return results

    def poll(self, timeout: float) -> bool:
        return self.inner.poll(timeout)

    def _error(self, place: int) -> WrittenError:
        group = self.group
        signature = self.call.signature(self.tensors, Here(self.call.options, group.rank, group.size))
        which = f" {place}" if len(self.tensors) > 1 else ""
        return WrittenError(
            f"rank {group.world.rank} wrote into input{which} of {signature} on group {group.name!r} while it was under way: "
            f"started at {self.site}, written before the wait at {call_site()}; what the ranks get depends on when it is sent. "
            "Write after wait(), or pass a clone()"
        )


def _state(tensor: Tensor) -> tuple[int | None, int]:
    """The tensor's version, and a checksum of its bytes where they are at hand."""
    version = None if tensor.is_inference() else version_of(tensor)  # inference tensors have none
    if tensor.device.type != "cpu":
        return version, 0
    with torch.no_grad():
        plain = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        if plain.stride(0) != 1:  # also a single element, which torch calls contiguous whatever its stride
            plain = plain.clone(memory_format=torch.contiguous_format)
    return version, zlib.crc32(plain.view(torch.uint8).numpy().data) if plain.numel() else 0
