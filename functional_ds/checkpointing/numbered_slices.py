"""Checkpoints of former versions, which saved slices under names of their own: ``params/w[0 of 2]``."""

import re
from collections.abc import Mapping

import attrs

from functional_ds.sharding.leaf_region import LeafRegion
from functional_ds.sharding.leaf_slice import LeafSlice

from .manifest import StoredTensor

__all__ = ["with_whole_leaves"]

_SLICE = re.compile(r"(.*)\[(\d+) of (\d+)\]", re.DOTALL)


def with_whole_leaves(tensors: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, StoredTensor]:
    """The tensors with those that are numbered slices put together under their leaf's name.

    Such slices were equal, along the one dim in which their shape is not the whole leaf's.

    Args:
        tensors: a checkpoint's, by name.
        shapes: of the whole leaves that are wanted, by name.
    """
    slices: dict[tuple[str, int], dict[int, str]] = {}
    for name in tensors:
        found = _SLICE.fullmatch(name)
        if found and found[1] in shapes and found[1] not in tensors:
            slices.setdefault((found[1], int(found[3])), {})[int(found[2])] = name
    result = dict(tensors)
    for (name, n), names in slices.items():
        if sorted(names) == list(range(n)) and (whole := _whole([tensors[names[i]] for i in range(n)], shapes[name])):
            result[name] = whole
            for each in names.values():
                del result[each]
    return result


def _whole(parts: list[StoredTensor], shape: tuple[int, ...]) -> StoredTensor | None:
    first, n = parts[0], len(parts)
    if any((part.shape, part.dtype) != (first.shape, first.dtype) for part in parts) or len(first.shape) != len(shape):
        return None
    dims = [dim for dim, size in enumerate(shape) if first.shape[dim] != size]
    if not dims:
        return first  # a count, which is equal in all
    if len(dims) > 1 or first.shape[dims[0]] * n != shape[dims[0]]:
        return None
    cuts = [LeafSlice.even(dims[0], shape[dims[0]], n, rank) for rank in range(n)]
    chunks = tuple(attrs.evolve(chunk, slice=i) for i, part in enumerate(parts) for chunk in part.chunks)
    return StoredTensor(shape, first.dtype, chunks, tuple(LeafRegion.of(first.shape, [cut]) for cut in cuts))
