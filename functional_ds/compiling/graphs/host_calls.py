"""Functions that a graph calls on the host, such as reads of files: a node each, by which others are ordered.

``host(Tensor[] given, Tensor(a!)[] memory, int site) -> Tensor`` calls a function of the values that ``given`` carry and of
memory. It returns the function's result: a tensor, or a number that carries it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, fx

from .graph_collectives import site_here


@attrs.frozen(eq=False)
class HostSite:
    """One call of a function on the host.

    Attributes:
        function: of values and tensors.
        like: the result, if it is a tensor.
    """

    function: Callable[..., Any]
    like: Tensor | None

    @property
    def name(self) -> str:
        """Its name in lists of sites."""
        return "host"

    def run(self, given: Sequence[Tensor], memory: Sequence[Tensor]) -> Tensor:
        """The result, or a tensor that carries it."""
        result = self.function(*map(carried, given), *memory)
        return carrier(result) if self.like is None else result


def carrier(value: Any) -> Tensor:
    """A tensor that carries a value through a graph; 1 for an error, else 0."""
    tensor = torch.tensor(float(isinstance(value, Exception)))
    tensor.carried = value  # type: ignore[attr-defined]
    return tensor


def carried(tensor: Tensor) -> Any:
    """The value that a tensor carries."""
    return tensor.carried  # type: ignore[attr-defined]


def _fake(given: list[Tensor], memory: list[Tensor], site: int) -> Tensor:
    like = site_here(site).like
    return torch.empty(()) if like is None else torch.empty_like(like)


torch.library.define("functional_ds::host", "(Tensor[] given, Tensor(a!)[] memory, int site) -> Tensor")
torch.library.impl(
    "functional_ds::host", "CompositeExplicitAutograd", lambda given, memory, site: site_here(site).run(given, memory)
)
torch.library.register_fake("functional_ds::host", _fake)
HOST = torch.ops.functional_ds.host.default
fx.has_side_effect(HOST)
