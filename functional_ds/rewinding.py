"""A module's buffers as they were before a call, for when it runs again."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["Rewind"]

_Place = tuple[dict[str, Any], str]  # the buffers of a module, and a name in them


@attrs.define(eq=False)
class Rewind:
    """Copies of the buffers that a module's call may write into, made before it."""

    _before: list[tuple[_Place, Tensor]]

    @staticmethod
    def of(module: nn.Module) -> "Rewind":
        """Of all buffers; one in two places is one."""
        places = [((m._buffers, name), b) for m in module.modules() for name, b in m._buffers.items() if b is not None]
        copies = _copies([buffer for _, buffer in places])
        return Rewind([(place, copies[id(buffer)]) for place, buffer in places])

    @contextmanager
    def once(self) -> Iterator[None]:
        """The call itself; afterwards only what it wrote is remembered.

        That is all buffers of a module in which one was replaced or has another version: a batch norm's kernel writes its
        statistics without a new one, but it counts its calls with one.
        """
        found = [(owner, name, owner[name], owner[name]._version) for (owner, name), _ in self._before]
        yield
        writers = {id(o) for o, name, buffer, version in found if buffer._version != version or o.get(name) is not buffer}
        self._before = [(place, copy) for place, copy in self._before if id(place[0]) in writers]

    @contextmanager
    def again(self) -> Iterator[None]:
        """The call once more: on further copies. Then the module has its own buffers again, untouched."""
        copies = _copies([copy for _, copy in self._before])
        now = [(owner, name, owner[name]) for (owner, name), _ in self._before]
        for (owner, name), copy in self._before:
            owner[name] = copies[id(copy)]
        try:
            yield
        finally:
            for owner, name, buffer in now:
                owner[name] = buffer


def _copies(tensors: list[Tensor]) -> dict[int, Tensor]:
    """By id; no recorder takes them for what the function computes."""
    with _disable_current_modes():
        return {id(tensor): tensor.detach().clone() for tensor in tensors}
