"""Checks that tensor-parallel ranks have equal batches, losses, and gradients of leaves that are not split."""

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.weighted import Weighted
from functional_ds.parallel.tensor.leaf_cuts import Cuts
from functional_ds.parallel.tensor.slice_draws import Drawn, told_apart
from functional_ds.sharding.leaf_map import LeafMap
from functional_ds.state_dict.fingerprint import fingerprints

T = TypeVar("T")


def check_batch(batch: Any, group: comm.Group) -> None:
    """Raises an error for batches that differ over the group, before the first step."""
    known = [x.detach().flatten() for x in tree.leaves(batch) if isinstance(x, Tensor) and x.layout == torch.strided]
    if known and not tree.on_meta(known):
        prints = torch.tensor(fingerprints(known), device=group.world.device)
        told = comm.all_gather(prints, group.channel("control"), tiled=False)
        others = [rank for rank, row in enumerate(told) if not torch.equal(row, told[0])]
        if others:
            raise ValueError(
                f"tensor_parallel: the ranks {[group.ranks[rank] for rank in others]} have another batch than rank "
                f"{group.ranks[0]}: all ranks of {group.name!r} compute the same rows; only data-parallel ranks, "
                "mesh['dp'].rank of mesh['dp'].size, have rows of their own"
            )


def declared_batch(batch: T, group: comm.Group) -> T:
    """The batch, declared equal on all ranks."""
    comm.replicated([x for x in tree.leaves(batch) if isinstance(x, Tensor)], group)
    return batch


def declared_loss(output: T, group: comm.Group) -> T:
    """The loss, declared equal on all ranks, which differentiate it alike."""
    loss = output[0] if isinstance(output, tuple) and output else output
    parts = [loss.sum, loss.weight] if isinstance(loss, Weighted) else [loss]
    comm.invariant([x for x in parts if isinstance(x, Tensor) and x.numel() == 1], group)
    return output


def check_loss(output: Any, group: comm.Group) -> None:
    """Raises an error for losses that differ over the group, in the first pass.

    Raises:
        ValueError: on all ranks.
    """
    loss = output[0] if isinstance(output, tuple) and output else output
    parts = [loss.sum, loss.weight] if isinstance(loss, Weighted) else [loss]
    if tree.on_meta(parts) or any(isinstance(x, Tensor) and x.numel() != 1 for x in parts):
        return
    numbers = [float(x.detach() if isinstance(x, Tensor) else x) for x in parts]
    rows = _told(numbers, group)
    others = [rank for rank, row in enumerate(rows) if not all(map(_close, row, rows[0]))]
    if others:
        raise ValueError(
            f"tensor_parallel: the loss is {rows[0]} on rank {group.ranks[0]} and {rows[others[0]]} on rank "
            f"{group.ranks[others[0]]}, and all ranks of {group.name!r} compute one loss: something on slices acts on whole "
            "features, such as a cross entropy of a split vocabulary (fds.tp.cross_entropy), a norm, or an auxiliary loss of a "
            "part of the tokens"
        )


def check_draws(drawn: Sequence[Drawn], group: comm.Group) -> set[str]:
    """Raises an error for draws without ``places`` for values that differ over the group, in the first pass that makes them.

    Returns:
        The names of draws for values that are equal. Draws for zeros, as in a new layer, stay undecided.

    Raises:
        ValueError: on all ranks.
    """
    if not drawn:
        return set()
    rows = _told([number for _, _, numbers in drawn for number in numbers], group)
    for place, (name, shape, _) in enumerate(drawn):
        values = [row[3 * place : 3 * place + 3] for row in rows]
        scale = max(abs(row[0]) for row in values)
        for rank, row in enumerate(values):
            if any(abs(one - other) > 1e-3 * scale for one, other in zip(row, values[0], strict=True)):
                raise ValueError(
                    f"tensor_parallel: the draw {name!r} is for a tensor of shape {shape} that differs on the ranks "
                    f"{group.ranks[0]} and {group.ranks[rank]} of {group.name!r}, and has no places: as a slice it would get "
                    "the mask of another slice. Pass which part of the whole it is, places=fds.tp.places(x, dim), or "
                    "key.at(places=...) for functions that take a key; places={} says that ranks draw alike"
                )
    return {name for place, (name, _, _) in enumerate(drawn) if any(row[3 * place] for row in rows)}


@attrs.frozen
class Compared:
    """What a comparison of gradients has seen.

    Attributes:
        finite: whether all were finite; where a loss scale skips the step, nothing is known.
        zeros: whether some leaf's were zeros on all ranks, as behind a layer that begins as zeros.
    """

    finite: bool
    zeros: bool

    @staticmethod
    def of(told: Sequence[tuple[str, list[list[float]]]]) -> "Compared":
        """Of what ranks have told of each leaf."""
        rows = [rows for _, rows in told]
        finite = all(math.isfinite(number) for of_leaf in rows for row in of_leaf for number in row)
        return Compared(finite, any(not any(row[0] for row in of_leaf) for of_leaf in rows))


def check_whole_gradients(parts: LeafMap, grads: Sequence[Tensor], cut: Collection[str], group: comm.Group) -> Compared:
    """Raises an error for gradients of leaves that are not split and that differ over the group.

    Raises:
        ValueError: on all ranks.
    """
    whole = {leaf.path for leaf in parts.leaves} - set(cut)
    told = list(_gradients_told(parts, grads, whole, group))
    compared = Compared.of(told)
    for path, rows in told if compared.finite else ():
        others = [group.ranks[rank] for rank, row in enumerate(rows) if not _alike(row, rows[0], 1e-3)]
        if others:
            raise ValueError(
                f"tensor_parallel: the gradients of {path!r}, which is not split, differ on the ranks "
                f"{others} from those of rank {group.ranks[0]}: it is used on slices, so each rank has a part of them; say "
                "'replicated_with_grad_allreduce' for it in the plan, or split it as what it is used on"
            )
    return compared


def check_partial_gradients(parts: LeafMap, grads: Sequence[Tensor], cuts: Cuts, group: comm.Group) -> Compared:
    """Raises an error if gradients that the plan would sum over the group are equal on all ranks.

    It raises nothing if the gradients of all slices are equal too, as in layers that begin with one number everywhere.

    Raises:
        ValueError: on all ranks.
    """
    told = list(_gradients_told(parts, grads, cuts.by_word | cuts.slices.keys(), group)) if cuts.by_word else []
    compared = Compared.of(told)
    equal = {path: all(_alike(row, rows[0], 1e-5) for row in rows) for path, rows in told}
    slices = cuts.slices.keys() & equal.keys()
    if slices and all(equal[path] for path in slices):
        return compared
    for path, rows in told:
        if path in cuts.by_word and equal[path] and rows[0][0]:
            raise ValueError(
                f"tensor_parallel: the plan has 'replicated_with_grad_allreduce' for {path!r}, and all ranks of "
                f"{group.name!r} have the same gradients of it: it is used on what is whole, and their sum would be "
                f"{group.size} times too large; use 'replicated' for it, or leave it out of the plan"
            )
    return compared


def _gradients_told(
    parts: LeafMap, grads: Sequence[Tensor], paths: Collection[str], group: comm.Group
) -> Iterator[tuple[str, list[list[float]]]]:
    """For each leaf that this rank has a part of, three statistics of its gradient on every rank."""
    shards = [shard for shard in parts.shards if parts.leaves[shard.leaf].path in paths and shard.numel]
    statistics: list[float] = []
    for shard in shards:
        grad = grads[shard.tensor].detach()
        if grad.is_meta:
            return
        flat = (torch.view_as_real(grad) if grad.is_complex() else grad).reshape(-1)
        lanes = 2 if grad.is_complex() else 1
        statistics += told_apart(flat[shard.start * lanes : (shard.start + shard.numel) * lanes])
    if not shards:
        return
    rows = _told(statistics, group)
    for place, shard in enumerate(shards):
        yield parts.leaves[shard.leaf].path, [row[3 * place : 3 * place + 3] for row in rows]


def _alike(one: Sequence[float], other: Sequence[float], bound: float) -> bool:
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) <= bound * max(one[0], other[0])


def _told(numbers: Sequence[float], group: comm.Group) -> list[list[float]]:
    mine = torch.tensor(numbers, dtype=torch.float64, device=group.world.device)
    return comm.all_gather(mine, group.channel("control"), tiled=False).tolist()


def _close(one: float, other: float) -> bool:
    return not math.isfinite(one - other) or abs(one - other) <= 1e-5 * max(abs(one), abs(other))
