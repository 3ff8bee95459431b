"""Fetching ahead: what was asked for next the last time, while what is asked for now is used."""

import weakref
from typing import Any

import attrs
import torch
from torch import Tensor

__all__ = ["Ahead"]


@attrs.define(eq=False)
class Ahead:
    """Guesses which handle comes next from the last two that were asked for, and starts to fetch it.

    A guess changes no value: a handle that nobody asks for is let go of. At most one is fetched ahead.

    Attributes:
        handles: the newest one of each name.
    """

    handles: "weakref.WeakValueDictionary[str, Any]" = attrs.field(factory=weakref.WeakValueDictionary)
    _follows: dict[tuple[str, str], str] = attrs.field(factory=dict)
    _last: tuple[str, str] = ("", "")
    _begun: "tuple[weakref.ref[Any], Any] | None" = None  # weak, as a handle leads here, too
    _streams: dict[torch.device, Any] = attrs.field(factory=dict)

    def know(self, handle: Any) -> None:
        """Says that this is now the handle of its name; what was fetched ahead is let go of."""
        self.handles[handle.name] = handle
        self._begun = None

    def fetch(self, handle: Any) -> Tensor:
        """The handle's tensor."""
        begun, self._begun = self._begun, None
        started = begun[1] if begun is not None and begun[0]() is handle else handle.begin()
        self._guess(handle.name)
        found: Tensor = handle.end(started)
        return found

    def stream(self, device: torch.device) -> Any:
        """The stream of copies to a device."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def _guess(self, name: str) -> None:
        self._follows[self._last] = name
        self._last = (self._last[1], name)
        ahead = self.handles.get(self._follows.get(self._last, ""))
        if ahead is not None:
            self._begun = (weakref.ref(ahead), ahead.begin())
