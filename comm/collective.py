"""What a collective is: one record that says what it means, what its transpose is, what it costs and how it runs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs
from torch import Tensor

__all__ = ["Call", "Collective", "Handle", "Options"]

Options = Mapping[str, Any]


class Handle(Protocol):
    """A collective under way."""

    def wait(self) -> list[Tensor]:
        """Blocks until this rank's results are there and returns them."""
        ...

    def poll(self, patience: float) -> bool:
        """Whether a wait would not block; waits for that, but at most ``patience`` seconds."""
        ...


@attrs.frozen(eq=False)
class Collective:
    """One row of the table.

    Attributes:
        name: as in ``comm.<name>``.
        denotation: the meaning; from all ranks' inputs, in rank order, to all ranks' outputs.
        adjoint: the call that is the transpose, or None where there is none (max, say).
        volume: elements that ``rank`` of ``n`` sends for an input of ``numel`` elements.
        pack: a leaf as the payload of the flat primitive; payloads of several leaves concatenate along the last dim.
        unpack: the leaf's result from its slice of the primitive's result.
        primitive: the flat exchange that carries it, a key of the backends' tables (``exchange``, ``native``).
        check: raises ValueError where this rank alone can tell that the call is wrong.
    """

    name: str
    denotation: Callable[[Sequence[Tensor], Options], list[Tensor]]
    adjoint: Callable[[Options], "Call | None"]
    volume: Callable[[int, int, int, Options], int]
    pack: Callable[[Tensor, int, Options], Tensor]
    unpack: Callable[[Tensor, Tensor, int, Options], Tensor]
    primitive: str
    check: Callable[[Tensor, int, Options], None]


@attrs.frozen(eq=False)
class Call:
    """A collective with its options: all that must agree between ranks, apart from the tensors."""

    collective: Collective
    options: Options = attrs.field(factory=dict)

    def __str__(self) -> str:
        return f"{self.collective.name}({', '.join(f'{k}={v!r}' for k, v in self.options.items())})"

    def signature(self, tensors: Sequence[Tensor]) -> str:
        """What must be the same on every rank, as the text that a mismatch shows."""
        shapes = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors)
        return f"{self} of [{shapes}]"
