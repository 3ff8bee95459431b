"""What a slot declares to code that saves, counts, exports or reshards states."""

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

import attrs
import torch

from functional_ds.base import tree
from functional_ds.sharding.layout import Layout
from functional_ds.sharding.leaf_map import LeafMap

if TYPE_CHECKING:
    from .state import State


class Role(Enum):
    """What a field of a slot means. The value is the prefix of its tensors' names in checkpoints.

    A slot's record declares it in ``roles``, a mapping from its fields' names. A field without a role is private to its
    transform: it is saved under ``slots.<slot>.<field>``, resharded like the params if it is a list of tensors like theirs, and
    counted among the buffers.
    """

    MASTER = "masters"  # the optimizer's params, if the stored ones are less precise
    EXACT = "exact"  # the stored params, if gathers round them
    AVERAGE = "averages"  # a mean of the params over time, which can be exported instead
    BUFFER = "buffers"  # buffers of modules
    ATTRIBUTE = "attributes"  # other attributes that forward passes have set on modules
    SETTING = "settings"  # comes and goes with the strategy: a checkpoint may have it or not


@attrs.frozen(eq=False)
class Stored:
    """How a state's params are stored, as the slot of the transform that sharded them declares.

    Attributes:
        leaf_map: which leaf is where in what the optimizer gets.
        layout: the flat segments in which the params are stored; None if they are the user's tree, or as in ``leaf_map``.
    """

    leaf_map: LeafMap
    layout: Layout | None = None


@tree.record
class Apart:
    """The slot of ``apart``: which of how many models is this rank's."""

    place: int = tree.static()
    size: int = tree.static()

    @staticmethod
    def named(state: "State", leaf: str) -> str:
        """A leaf's name among those of all models: ``outer.0/w`` for ``w`` of the first one."""
        models = [f"{name}.{slot.place}/" for name, slot in sorted(state.slots.items()) if isinstance(slot, Apart)]
        return "".join(models) + leaf


def stored_layout(state: "State") -> Stored | None:
    """How the params are stored, by the slot that has a ``leaf_map``; None if they are the user's tree."""
    for slot in state.slots.values():
        if isinstance(leaf_map := getattr(slot, "leaf_map", None), LeafMap):
            return Stored(leaf_map, getattr(slot, "layout", None))
    return None


def fields_of_role(state: "State", role: Role) -> Iterator[Any]:
    """The fields of all slots that have this role, in the order of the slots."""
    for slot in state.slots.values():
        for field, field_role in getattr(slot, "roles", {}).items():
            if field_role is role:
                yield getattr(slot, field)


def with_room(state: "State", names: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> "State":
    """The state with empty tensors in its slots for those of a checkpoint that a fresh state lacks, where a slot can grow.

    Args:
        state: a fresh one.
        names: shape and dtype of the checkpoint's tensors by name.
    """
    if model := Apart.named(state, ""):
        ending = f"/{model}".removesuffix("/")
        names = {name.removesuffix(ending): spec for name, spec in names.items() if name.endswith(ending)}
    if "step" in names:  # what is counted with it is included, of the leaves that this rank has
        stored = stored_layout(state)
        here = [leaf.path for leaf in stored.leaf_map.leaves] if stored else [path for path, _ in tree.named(state.params)]
        counts = {path: torch.zeros((), dtype=torch.int64) for path in here if f"idle.{path}" in names}
        state = tree.replace(state, idle=counts)
    for key, slot in state.slots.items():
        if hasattr(slot, "grown"):
            roles = {role.value: field for field, role in slot.roles.items()}
            parted = ((*name.partition("."), spec) for name, spec in names.items())
            entries = [(roles[role], path, *spec) for role, _, path, spec in parted if role in roles]
            state = state.put(**{key: slot.grown(entries)})
    return state
