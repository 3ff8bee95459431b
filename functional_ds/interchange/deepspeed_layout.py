"""Which elements of a parameter are where in DeepSpeed's checkpoints, by stage.

stage 0       every parameter is whole, and the optimizer's states are numbered in the order of its param groups
stages 1, 2   each param group is one flat vector, split into the ranks' partitions; only its end is padded
stage 3       each parameter is padded and split into equal pieces for the ranks; a rank's pieces are concatenated
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.state_dict.errors import StructureError

MASTER = "master"  # the kind of value that every parameter has; the others are the optimizer's keys


@attrs.frozen
class FlatRange:
    """``numel`` elements of a flattened parameter from ``offset`` on: in a rank's flat tensor ``which``, from ``start`` on."""

    offset: int
    numel: int
    rank: int
    which: int
    start: int


@attrs.frozen
class Param:
    """A parameter of the checkpoint.

    Attributes:
        shape: its shape.
        group: the number of the flat tensor in which its elements begin, and whose number of updates counts for it.
        ranges: where its elements are, in order.
        whole: a frozen parameter's values, one piece from each rank that has one; empty for a trained parameter.
    """

    shape: tuple[int, ...]
    group: int = 0
    ranges: tuple[FlatRange, ...] = ()
    whole: tuple[Tensor, ...] = attrs.field(default=(), eq=False, repr=False)

    @property
    def frozen(self) -> bool:
        """Whether the optimizer does not update it."""
        return not self.ranges and prod(self.shape) > 0


def in_groups(
    shapes: Sequence[Mapping[str, tuple[int, ...]]], flats: Sequence[Sequence[Mapping[str, Tensor]]], section: Mapping[str, Any]
) -> dict[str, Param]:
    """Stages 1 and 2."""
    params = {}
    paddings = section.get("param_alignment_paddings")
    for group, names in enumerate(shapes):
        ends = [0]
        for rank in flats:
            ends.append(ends[-1] + rank[group][MASTER].numel())
        at = 0
        for place, (name, shape) in enumerate(names.items()):
            end = at + prod(shape)
            if end > ends[-1]:
                raise ValueError(f"{name!r} ends at {end} of {ends[-1]} elements of group {group}")
            ranges = tuple(
                FlatRange(max(at, low) - at, min(end, high) - max(at, low), rank, group, max(at, low) - low)
                for rank, (low, high) in enumerate(pairwise(ends))
                if max(at, low) < min(end, high)
            )
            params[name] = Param(shape, group, ranges)
            at = end + (paddings[group][place] if paddings else 0)
    return params


def in_pieces(
    shapes: Sequence[Mapping[str, tuple[int, ...]]], flats: Sequence[Sequence[Mapping[str, Tensor]]]
) -> dict[str, Param]:
    """Stage 3. The flat tensors are concatenated, and a piece may span several."""
    sizes = [values[MASTER].numel() for values in flats[0]]
    begins = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    params, at = {}, 0
    for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
        numel = prod(shape)
        piece = -(-numel // len(flats))
        if at + piece > begins[-1]:
            raise ValueError(f"{name!r} ends at {at + piece} of a rank's {begins[-1]} elements")
        ranges = []
        for rank in range(len(flats)):
            first, last = rank * piece, min(numel, (rank + 1) * piece)
            for which, begin in enumerate(begins[:-1]):
                low, high = max(at, begin), min(at + last - first, begins[which + 1])
                if low < high:
                    ranges.append(FlatRange(first + low - at, high - low, rank, which, low - begin))
        group = next((found_in.which for found_in in ranges), 0)
        params[name] = Param(shape, group, tuple(ranges))
        at += piece
    return params


def frozen_params(models: Sequence[Mapping[str, Any]], trained: Mapping[str, Param]) -> dict[str, Param]:
    """The frozen parameters: in stage 3 a piece from each rank, else whole; in stage 1 in the module's dict."""
    first = models[0]
    shapes = first.get("frozen_param_shapes") or {}
    pieces = [model.get("frozen_param_fragments") or {} for model in models]
    params = {}
    for name, shape in shapes.items():
        numel, parts = prod(shape), [fragments[name].reshape(-1) for fragments in pieces if name in fragments]
        if sum(part.numel() for part in parts) >= numel:
            params[name] = Param(tuple(shape), whole=tuple(parts))
    tied = first.get("shared_params", {})
    for name, value in (first.get("module") or {}).items():
        kept = isinstance(value, Tensor) and name not in trained and name not in params and name not in tied
        if kept and name not in first.get("buffer_names", []) and len(models) == 1:
            params[name] = Param(tuple(value.shape), whole=(value,))
    return params


# -- stage 0 -------------------------------------------------------------------------------------------------------------


# As in ``ZeroFiles``: params, aliases, flats, updates and groups.
StageZeroParams = tuple[dict[str, Param], dict[str, str], list[list[dict[str, Tensor]]], list[int], list[dict[str, Any]]]


def whole_params(model: Mapping[str, Any], order: Sequence[Sequence[str]] | None, where: str) -> StageZeroParams:
    """The parameters of stage 0. Each is a flat tensor; FusedAdam in half precision has one for a whole param group.

    Args:
        model: the file's content.
        order: the names in each of the optimizer's param groups; None for one group of all names, in the module's order.
        where: the folder, for errors.

    Raises:
        StructureError: the param groups do not match ``order``.
    """
    held = {name: x for name, x in model["module"].items() if name not in model["buffer_names"] and isinstance(x, Tensor)}
    first: dict[Any, str] = {}  # tied parameters share their memory in the file
    owners = {name: first.setdefault((x.data_ptr(), x.shape) if x.numel() else name, name) for name, x in held.items()}
    section = model["optimizer"] or {}
    base = section.get("optimizer_state_dict", section) or {"state": {}, "param_groups": []}
    groups, fused, masters = base["param_groups"], section.get("fp32_groups_flat"), section.get("fp32_groups")
    given = [[owners.get(name, name) for name in names] for names in ([[*first.values()]] if order is None else order)]
    _check_order(given if groups else [], [None if fused else len(group["params"]) for group in groups], held, where)
    params: dict[str, Param] = {}
    flats: list[dict[str, Tensor]] = []
    updates: list[int] = []
    for number, (group, names) in enumerate(zip(groups, given, strict=False)):
        exact = [fused[number]] if fused else masters[number] if masters else [held[name] for name in names]
        for index, master, inside in zip(group["params"], exact, [names] if fused else [[name] for name in names], strict=True):
            state = base["state"].get(index, {})
            tensors = {key: x for key, x in state.items() if isinstance(x, Tensor) and key != "step"}
            sizes = [held[name].numel() for name in inside]
            shape = torch.Size([sum(sizes)]) if fused else held[inside[0]].shape
            if master.shape != shape or (tensors and not any(x.shape == shape for x in tensors.values())):
                raise _misfit(where, f"group {number} has a tensor of another shape than {inside[0]!r}, {list(shape)}")
            flats.append({MASTER: master.reshape(-1), **{k: x.reshape(-1) for k, x in tensors.items() if x.shape == shape}})
            updates.append(int(state.get("step", group.get("step", 0))))
            for name, size, begin in zip(inside, sizes, accumulate(sizes, initial=0), strict=False):
                place = FlatRange(0, size, 0, len(flats) - 1, begin)
                params[name] = Param(tuple(held[name].shape), place.which, (place,))
    kinds = {state_name for flat in flats for state_name in flat}
    for flat in flats:  # a parameter that no update has reached has no state yet
        flat.update({state_name: torch.zeros(1).expand(flat[MASTER].numel()) for state_name in kinds - flat.keys()})
    frozen = {name: Param(tuple(held[name].shape), whole=(held[name],)) for name in first.values() if name not in params}
    aliases = {name: owner for name, owner in owners.items() if name != owner}
    return {**params, **frozen}, aliases, [flats], updates, numbers_of(groups)


def _check_order(order: Sequence[Sequence[str]], counts: Sequence[int | None], held: Mapping[str, Tensor], where: str) -> None:
    unknown = sorted({name for names in order for name in names} - held.keys())
    if unknown:
        raise _misfit(where, f"it has no {unknown[0]!r}")
    if len(order) != len(counts) or any(count not in (None, len(names)) for count, names in zip(counts, order, strict=True)):
        raise _misfit(where, f"its groups have {[*counts]} parameters, and order= has {[len(names) for names in order]}")


def _misfit(where: str, what: str) -> StructureError:
    return StructureError(
        f"path: {where} is of stage 0, whose file does not name the optimizer's parameters; {what}. Pass "
        "order=[[names of the parameters of param group 0, in its order], ...]"
    )


def numbers_of(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The param groups without their params."""
    return [{str(name): value for name, value in group.items() if name != "params"} for group in groups]
