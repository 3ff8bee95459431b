"""Synchronises module buffers and attributes over data-parallel ranks."""

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.torch_private import has_values
from functional_ds.comm.worlds.current import recorder

from .buffers import BUFFERS, Buffers
from .state import State


@attrs.frozen
class AttributeForm:
    """Shape and dtype of a tensor of an attribute."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@attrs.frozen
class Agreement:
    """Which rank of a group provides which buffer and attribute.

    Attributes:
        written: this rank's written buffers when the ranks agreed.
        givers: by (key, name): the rank, the shape and the dtype. Ranks that write a buffer themselves know its shape.
        by_writer: whether each rank provides what it writes.
        own_forms: the attributes that this rank's passes set, by (key, name), with the forms of their leaves.
        attributes: by (key, name): the rank that provides the attribute, its form there, and whether all ranks have that form.
        dropped: the attributes that their providing rank does not have.
    """

    written: frozenset[tuple[str, str]]
    givers: Mapping[tuple[str, str], tuple[int, tuple[int, ...], torch.dtype]]
    by_writer: bool
    own_forms: Mapping[tuple[str, str], Any]
    attributes: Mapping[tuple[str, str], tuple[int, Any, bool]]
    dropped: frozenset[tuple[str, str]]

    def covers(self, buffers: Buffers) -> bool:
        """Whether it includes what this rank's modules write now."""
        mine = buffers.known.mine
        known = self.written == mine if self.by_writer else mine <= self.givers.keys()
        one, other = (repr(sorted(forms.items())) for forms in (self.own_forms, _forms_set(buffers)))  # with the order of keys
        return known and one == other


def unagreed(state: State) -> Tensor | None:
    """1.0 if this rank writes buffers that the ranks have not agreed on, else 0.0; None if ranks need not ask.

    Only modules that have buffers, or have set attributes, on any rank, need to ask. On a GPU the host does not wait for the
    answer: all ranks must begin to write in the same step.
    """
    held = state.slots.get(BUFFERS)
    if not isinstance(held, Buffers) or state.step.is_cuda or held.policy == "own":
        return None
    agreements = held.known.agreed.values()
    if not any(held.values.values()) and not any(agreed.attributes for agreed in agreements):
        return None
    return torch.tensor(float(not all(agreed.covers(held) for agreed in agreements)))


def agreed_anew(state: State, ranks: Tensor | None) -> State:
    """The state, whose ranks agree again on the buffers that they write if any rank must; not in a captured step."""
    if ranks is not None and has_values(ranks) and ranks.item():
        state.slots[BUFFERS].known.agreed.clear()
    return state


def synchronized(buffers: Buffers, group: comm.Group, *, policy: str | None = None) -> Buffers:
    """The buffers that the ranks of a group keep after each has run its rows, or its stages.

    ``"first"``: those of the group's first rank, as in DistributedDataParallel. ``"mean"``: the mean of floating-point ones,
    the first rank's of others. ``"own"``: each rank keeps its own. ``"writer"``: each of the first rank that writes it. The
    same holds for attributes that forward passes have set to tensors and numbers; if their shapes differ, ``"mean"`` is
    ``"first"``.

    Cost: one small message in the first step, and when modules begin to write others; in each step one number in the sum of the
    metrics, by which ranks agree, and a broadcast of the written buffers and attributes (an all-reduce for ``"mean"``); a small
    message if attributes are numbers. If no rank writes any, nothing is sent.
    """
    policy = policy or buffers.policy
    if group.size == 1 or policy == "own":
        return buffers
    known = buffers.known
    where = group.ranks, group.name
    agreed = known.agreed.get(where)
    if agreed is None or not agreed.covers(buffers):
        agreed = known.agreed[where] = _agree(buffers, group, by_writer=policy == "writer")
    values = _exchanged(buffers, agreed, group, policy)
    return tree.replace(buffers, values=values, attributes=_exchanged_attributes(buffers, agreed, group, policy))


def synced(state: State, group: comm.Group, *, policy: str | None = None) -> State:
    """A state with synchronized buffers; a state without modules is unchanged."""
    held = state.slots.get(BUFFERS)
    return state.put(**{BUFFERS: synchronized(held, group, policy=policy)}) if isinstance(held, Buffers) else state


def _forms(buffers: Buffers) -> dict[tuple[str, str], Any]:
    """The forms of the attributes: shape and dtype of each tensor, the class of each number."""
    return {
        (key, name): tree.map(lambda x: AttributeForm(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else type(x), value)
        for key, held in buffers.attributes.items()
        for name, value in held.items()
    }


def _forms_set(buffers: Buffers) -> dict[tuple[str, str], Any]:
    """The forms of attributes that this rank's passes set."""
    sets = buffers.known.sets
    return {(key, name): form for (key, name), form in _forms(buffers).items() if name in sets.get(key, ())}


def _agree(buffers: Buffers, group: comm.Group, *, by_writer: bool) -> Agreement:
    """Every rank reports what it writes."""
    mine, forms, sets = buffers.known.mine, _forms(buffers), _forms_set(buffers)
    told = [(key, name, tuple(b.shape), b.dtype) for key, name in sorted(mine) if (b := buffers.values[key][name]) is not None]
    givers: dict[tuple[str, str], tuple[int, tuple[int, ...], torch.dtype]] = {}
    attributes: dict[tuple[str, str], tuple[int, Any, bool]] = {}
    everyone = comm.all_gather_object((told, [*sets], forms), group.channel("control"))
    for rank, (written, names, _) in enumerate(everyone):
        for key, name, shape, dtype in written:
            givers.setdefault((key, name), (rank if by_writer else 0, shape, dtype))
        for which in names:
            giver = rank if by_writer else 0
            form = everyone[giver][2].get(which)
            alike = all(others.get(which) == form for _, _, others in everyone)
            attributes.setdefault(which, (giver, form, alike))
    dropped = frozenset(which for which, (giver, _, _) in attributes.items() if which not in everyone[giver][2])
    given = {which: entry for which, entry in sorted(attributes.items()) if which not in dropped}
    return Agreement(mine, dict(sorted(givers.items())), by_writer, sets, given, dropped)


def _exchanged(buffers: Buffers, agreed: Agreement, group: comm.Group, policy: str) -> dict[str, dict[str, Any]]:
    values = {key: dict(held) for key, held in buffers.values.items()}
    means = [which for which, (_, _, dtype) in agreed.givers.items() if policy == "mean" and dtype.is_floating_point]
    if means:
        reduced = comm.all_reduce([values[key][name] for key, name in means], group, op="avg")
        for (key, name), mean in zip(means, reduced, strict=True):
            values[key][name] = mean
    for giver in sorted({rank for rank, _, _ in agreed.givers.values()}):
        names = [which for which, (rank, _, _) in agreed.givers.items() if rank == giver and which not in means]
        sent = [_room(values, which, agreed, group) for which in names]
        for (key, name), value in zip(names, comm.broadcast(sent, giver, group) if names else (), strict=True):
            values[key][name] = value
    return values


def _exchanged_attributes(buffers: Buffers, agreed: Agreement, group: comm.Group, policy: str) -> dict[str, dict[str, Any]]:
    """The attributes of the ranks that provide them. Those that a provider lacks are as the module was built."""
    leaves = {which: _leaves_like(buffers, which, form, group) for which, (_, form, _) in agreed.attributes.items()}
    places = [(which, index) for which, held in leaves.items() for index in range(len(held))]

    def is_mean(which: tuple[str, str], leaf: Any) -> bool:
        floating = leaf.is_floating_point() if isinstance(leaf, Tensor) else isinstance(leaf, float)
        return policy == "mean" and agreed.attributes[which][2] and floating

    tensors = [(which, index) for which, index in places if isinstance(leaves[which][index], Tensor)]
    means = [(which, index) for which, index in tensors if is_mean(which, leaves[which][index])]
    reduced = comm.all_reduce([leaves[which][index] for which, index in means], group, op="avg") if means else []
    for (which, index), mean in zip(means, reduced, strict=True):
        leaves[which][index] = mean
    for giver in sorted({rank for rank, _, _ in agreed.attributes.values()}):
        given = [place for place in tensors if agreed.attributes[place[0]][0] == giver and place not in means]
        sent = [leaves[which][index] for which, index in given]
        for (which, index), value in zip(given, comm.broadcast(sent, giver, group) if sent else (), strict=True):
            leaves[which][index] = value
    numbers = [place for place in places if place not in tensors]
    if numbers and not recorder().records:  # in a graph they are those of its trace, as all numbers
        ranks = comm.all_gather_object([leaves[which][index] for which, index in numbers], group.channel("control"))
        for (which, index), values in zip(numbers, zip(*ranks, strict=True), strict=True):
            giver = agreed.attributes[which][0]
            leaves[which][index] = sum(values) / len(values) if is_mean(which, values[giver]) else values[giver]
    attributes = {
        key: {name: value for name, value in held.items() if (key, name) not in agreed.dropped}
        for key, held in buffers.attributes.items()
    }
    for (key, name), (_, form, _) in agreed.attributes.items():
        attributes[key][name] = tree.unflatten(tree.structure(form), leaves[key, name])
    return attributes


def _leaves_like(buffers: Buffers, which: tuple[str, str], form: Any, group: comm.Group) -> list[Any]:
    """The leaves of this rank's attribute; empty memory for another rank's if it has none of this form."""
    key, name = which
    if _forms(buffers).get(which) == form:
        return tree.leaves(buffers.attributes[key][name])
    devices = (x.device for x in tree.leaves(buffers.attributes[key].get(name)) if isinstance(x, Tensor))
    device = next(devices, group.world.device)
    return [
        torch.empty(x.shape, dtype=x.dtype, device=device) if isinstance(x, AttributeForm) else x() for x in tree.leaves(form)
    ]


def _room(values: dict[str, dict[str, Any]], which: tuple[str, str], agreed: Agreement, group: comm.Group) -> Tensor:
    """This rank's buffer, in the provider's size."""
    key, name = which
    buffer = values[key].get(name)
    _, shape, dtype = agreed.givers[which]
    if buffer is not None and (which in agreed.written or (tuple(buffer.shape), buffer.dtype) == (shape, dtype)):
        return buffer.detach()  # type: ignore[no-any-return]
    return torch.empty(shape, dtype=dtype, device=group.world.device if buffer is None else buffer.device)
