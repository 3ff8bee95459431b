"""A started call of a process, in which the leaves of one dtype and device are sent as one payload."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.base.device_streams import LentToTransport
from functional_ds.comm.backends.primitives import Options, Started
from functional_ds.comm.record.group import Group, call_site, poll_all
from functional_ds.comm.table.collective import Call, CallContext
from functional_ds.comm.table.errors import CommError
from functional_ds.comm.table.packing import by_kind

from .worker import Performed, Posted, Queued


@attrs.define(eq=False)
class _Coalesced:
    """Leaves of one dtype and device that are sent as one payload.

    Attributes:
        places: their indices among the call's leaves.
        shares: each leaf's elements along the payload's last dim; empty for a single leaf.
        started: the started primitive.
        device: the results' device.
        sent: the payload, if it is on a GPU.
    """

    places: Sequence[int]
    shares: Sequence[int]
    started: Started | Performed | Posted | Queued
    device: torch.device
    sent: LentToTransport | None = None

    def pieces(self) -> Sequence[Tensor]:
        result = self.started.wait()
        if self.sent is not None:
            self.sent.arrived()
            self.sent = None
        if result.device != self.device:
            result = result.to(self.device)
        # Copies, because views would share one storage, and each would keep all of it alive.
        return [x.clone() for x in result.split(self.shares, dim=-1)] if self.shares else [result]


@attrs.define(eq=False)
class ProcessHandle:
    """A started call.

    Attributes:
        call, tensors, group, here: the call.
        parts: its payloads, one per dtype and device.
        lost: is called if a rank does not answer; returns the known reason.
    """

    call: Call
    tensors: Sequence[Tensor]
    group: Group
    here: CallContext
    parts: list[_Coalesced]
    lost: Callable[[], str]

    @staticmethod
    def begin(
        call: Call,
        tensors: Sequence[Tensor],
        group: Group,
        start: Callable[[Tensor, Options], Any],
        carrier: Callable[[torch.device], torch.device] = lambda device: device,
        lost: Callable[[], str] = str,
    ) -> "ProcessHandle":
        """Packs the tensors of each dtype and device into one payload and starts its primitive.

        Args:
            call, tensors, group: the call.
            start: starts a payload's primitive with its options.
            carrier: maps a tensor's device to its payload's.
            lost: is called if a rank does not answer; returns the known reason.
        """
        here, pack, parts = CallContext(call.options, group.rank, group.size), call.collective.pack, list[_Coalesced]()
        for places in by_kind(tensors):
            device = tensors[places[0]].device
            carried, shares = carrier(device), list[int]()
            if len(places) == 1:
                payload = _dense(pack(_plain(tensors[places[0]]), here))
            else:
                payloads = [pack(_plain(tensors[place]), here) for place in places]
                payload, shares = torch.cat(payloads, dim=-1), [part.shape[-1] for part in payloads]
            if carried != device:
                payload = payload.to(carried)
            started = start(payload, call.options_for(places, payload))
            parts.append(_Coalesced(places, shares, started, device, LentToTransport.of(payload)))
        return ProcessHandle(call, tensors, group, here, parts, lost)

    @property
    def ended(self) -> float | None:
        ends = [part.started.ended for part in self.parts]
        return None if None in ends else max(ends, default=None)  # type: ignore[type-var]

    def poll(self, timeout: float) -> bool:
        return poll_all([part.started for part in self.parts], timeout)

    def wait(self) -> list[Tensor]:
        results, unpack = [*self.tensors], self.call.collective.unpack
        try:
            for part in self.parts:
                for place, piece in zip(part.places, part.pieces(), strict=True):
                    results[place] = unpack(piece, self.tensors[place], self.here)
        except CommError:
            raise
        except RuntimeError as error:  # from Gloo or NCCL: a time-out, or a rank that has ended
            told = self.lost()
            signature = self.call.signature(self.tensors, self.here)
            raise CommError(
                f"rank {self.group.rank} of {self.group.name!r} failed in {signature} at {call_site()}: {error}"
                + (told or "\n(under comm.debug.checked() the error says which ranks had not come)")
            ) from error
        return results


def _plain(tensor: Tensor) -> Tensor:
    """The tensor, detached, with conjugation and negation applied."""
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def _dense(payload: Tensor) -> Tensor:
    """A contiguous payload that can be viewed as bytes; torch calls a tensor of one element contiguous with any stride."""
    return payload.contiguous() if payload.stride(-1) == 1 else payload.clone(memory_format=torch.contiguous_format)
