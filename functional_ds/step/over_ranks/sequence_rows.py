"""Batch shards of ranks that have parts of the same rows."""

import torch

from functional_ds import comm


def row_of(
    name: str, group: comm.Group, index: int, count: int, *, known: dict[tuple[comm.Group, int, int], tuple[int, int]]
) -> tuple[int, int]:
    """The batch shard of ranks that share rows along an axis.

    Args:
        name: of the transform, for errors.
        group: the ranks of the axis.
        index: this rank's place among those that divide rows.
        count: how many those are.
        known: results of earlier exchanges.

    Raises:
        ValueError: the group is not an axis of those ranks.
    """
    control = group.channel("control")
    if group.size == 1:
        return index, count
    if not control.compares and count % group.size == 0:  # which row it is makes no difference without values
        return index % (count // group.size), count // group.size
    key = (group, index, count)
    if key not in known:
        mine = torch.tensor([index], device=control.world.device)
        known[key] = _without(name, comm.all_gather(mine, control).tolist(), count, group)
    return known[key]


def _without(name: str, places: list[int], count: int, group: comm.Group) -> tuple[int, int]:
    """From the ranks' places in the global batch: this rank's row and how many rows there are, if the group is an axis."""
    stride, size = places[1] - places[0], len(places)
    even = stride > 0 and places == [places[0] + i * stride for i in range(size)]
    if not even or count % (stride * size) or places[0] // stride % size:
        raise ValueError(
            f"{name}: the step sums gradients over {count} ranks, among which those of group {group.name!r} have the "
            f"places {places}; they must be an axis of them, so that each token counts once: compose it with zero(k, "
            f"mesh['dp', 'sp']), or with zero(k, mesh['sp']) where there is no other axis"
        )
    return places[0] // (stride * size) * stride + places[0] % stride, count // size
