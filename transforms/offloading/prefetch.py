"""Prefetching: while a handle is used, the one that followed it last time is fetched."""

import weakref
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.base.device_streams import CopyStream
from functional_ds.comm.worlds.current import recorder

from .tensor_info import TensorInfo


def refuse_streams(overlaps: bool) -> None:
    """Raises an error where copies on a side stream would be traced.

    Raises:
        RuntimeError: a graph would have to contain them.
    """
    if overlaps and recorder().records:
        raise RuntimeError("offload copies between a device and the host on streams, which no graph holds")


@attrs.define(eq=False)
class Prefetcher:
    """Predicts the next handle from the last two that were asked for, and starts to fetch it.

    A prediction changes no value: if it is wrong, the fetched tensor is dropped. At most one handle is fetched ahead.

    Attributes:
        copies: from the host to the device.
    """

    copies: CopyStream
    _handles: "weakref.WeakValueDictionary[str, Any]" = attrs.field(factory=weakref.WeakValueDictionary)  # the newest
    _follows: dict[tuple[str, str], str] = attrs.field(factory=dict)
    _last: tuple[str, str] = ("", "")
    _begun: "tuple[weakref.ref[Any], Any] | None" = None  # weak, because handles refer to their prefetcher

    def __reduce__(self) -> Any:
        return Prefetcher, (self.copies,)  # a copy makes its own predictions

    def know(self, handle: Any) -> None:
        """Makes the handle the newest one of its name, and drops what was prefetched."""
        if not recorder().records:  # traced tensors have no values to prefetch
            self._handles[handle.name] = handle
            self._begun = None

    def fetch(self, handle: Any) -> Tensor:
        """The handle's tensor, on the device."""
        if recorder().records:
            refuse_streams(self.copies.overlaps)
            alone: Tensor = handle.end(handle.begin())
            return alone
        begun, self._begun = self._begun, None
        started = begun[1] if begun is not None and begun[0]() is handle else handle.begin()
        self._guess(handle.name)
        fetched: Tensor = handle.end(started)
        return fetched

    def _guess(self, name: str) -> None:
        self._follows[self._last] = name
        self._last = (self._last[1], name)
        following = self._handles.get(self._follows.get(self._last, ""))
        if following is not None:
            self._begun = (weakref.ref(following), following.begin())


class Prefetched(TensorInfo):
    """What all handles share: ``detach()`` returns the tensor on the device, perhaps prefetched."""

    prefetcher: Prefetcher

    @property
    def device(self) -> torch.device:
        """The device to which ``detach`` moves it."""
        return self.prefetcher.copies.device

    def detach(self) -> Tensor:
        """The tensor on its device."""
        return self.prefetcher.fetch(self)
