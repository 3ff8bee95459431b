"""A rank's memory by category, measured on its tensors."""

from collections.abc import Hashable, Mapping
from typing import Any

import attrs
import torch

from functional_ds import comm
from functional_ds.step.state.slots import Role, fields_of_role
from functional_ds.step.state.state import State

from .counting import holdings, places

KINDS = ("params", "masters", "optimizer", "gradients", "gathered", "activations", "buffers")


@attrs.frozen
class Memory:
    """Bytes on one rank.

    Attributes:
        params: the stored params.
        masters: the params as the optimizer has them, if they differ.
        optimizer: the optimizer's state.
        gradients: as the optimizer gets them.
        gathered: the peak of whole units in stage 3.
        activations: what the backward pass needs.
        buffers: everything else in the state: counts, keys, scales, means, residuals.
        peak: the process's peak; 0 if it was not measured.
        places: bytes of the state by device type, including ``"disk"``.

    >>> found = Memory(params=40, masters=80, optimizer=160, gradients=40)
    >>> found.state, found.total
    (280, 320)
    """

    params: int = 0
    masters: int = 0
    optimizer: int = 0
    gradients: int = 0
    gathered: int = 0
    activations: int = 0
    buffers: int = 0
    peak: int = attrs.field(default=0, eq=False)
    places: Mapping[str, int] = attrs.field(factory=dict, eq=False)

    @property
    def state(self) -> int:
        """The bytes between steps."""
        return self.params + self.masters + self.optimizer + self.buffers

    @property
    def total(self) -> int:
        """The sum of all categories."""
        return self.state + self.gradients + self.gathered + self.activations

    def plus(self, **kinds: int) -> "Memory":
        """With more bytes of some categories: ``memory.plus(activations=found.kept)``."""
        return attrs.evolve(self, **{category: getattr(self, category) + more for category, more in kinds.items()})

    def of_all_ranks(self, group: comm.Group | None = None) -> list["Memory"]:
        """All ranks' memory, in rank order; without the places. Collective."""
        row = torch.tensor([getattr(self, category) for category in (*KINDS, "peak")])
        return [Memory(*values) for values in comm.all_gather(row, group, tiled=False).tolist()]

    def __str__(self) -> str:
        rows = [(category, getattr(self, category)) for category in KINDS if getattr(self, category)]
        return "\n".join(f"{category:<12}{size:>16,}" for category, size in [*rows, ("total", self.total)])


def measured(state: State, *, gradients: int = 0) -> Memory:
    """The bytes of a state on this rank, each storage once, in the first category that it belongs to.

    ``gradients`` are not part of a state; ``noted`` measures them.

    Raises:
        TypeError: ``state`` is not a State.

    >>> import functional_ds as fds
    >>> step = fds.transforms.mixed_precision("bf16")(fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.adam(0.1)))
    >>> print(measured(step.init({"w": torch.ones(100)})))
    params                   200
    masters                  400
    optimizer                804
    buffers                   24
    total                  1,428
    """
    if not isinstance(state, State):
        raise TypeError(f"state={state!r} is not a State; pass what step.init or step(...) returns")
    groups: dict[str, Any] = {
        "params": state.params,
        "masters": [*fields_of_role(state, Role.MASTER), *fields_of_role(state, Role.EXACT)],
        "optimizer": state.optimizer,
        "buffers": (state.step, state.key, state.slots, state.skip),
    }
    seen: dict[Hashable, tuple[str, int]] = {}
    sizes: dict[str, int] = {}
    for category, held in groups.items():
        fresh = {key: value for key, value in holdings(held).items() if key not in seen}
        sizes[category] = sum(size for _, size in fresh.values())
        seen |= fresh
    return Memory(**sizes, gradients=gradients, places=places([*groups.values()]))
