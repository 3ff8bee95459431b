"""All-gather of pieces whose sizes differ between ranks, which first exchanges the sizes."""

import zlib
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from functional_ds.base import tree as pytree
from functional_ds.comm.record.group import Group
from functional_ds.comm.record.pending import Request
from functional_ds.comm.table.collective import Call
from functional_ds.comm.table.errors import MismatchError
from functional_ds.comm.table.rows import ALL_GATHER

from .dispatch import flatten, request, request_all

T = TypeVar("T")


def all_gather_uneven(x: T, group: Group, dim: int) -> Request[T]:
    """``all_gather(uneven=True)``, after an exchange of the sizes."""
    leaves, spec = flatten("all_gather", x)
    by_sizes: dict[tuple[int, ...], list[int]] = {}  # leaves of the same sizes are sent as one payload
    for place, sizes in enumerate(sizes_along(dim, leaves, group)):
        by_sizes.setdefault(sizes, []).append(place)
    calls = [
        (Call(ALL_GATHER, {"dim": dim, "tiled": True, "sizes": sizes}), [leaves[i] for i in by_sizes[sizes]])
        for sizes in by_sizes
    ]

    def in_place(results: list[list[Tensor]]) -> T:
        gathered = dict(
            zip((i for places in by_sizes.values() for i in places), (r for rs in results for r in rs), strict=True)
        )
        joined: T = pytree.unflatten(spec, [gathered[i] for i in range(len(leaves))])
        return joined

    return request_all(calls, group).then(in_place)


def need_values(name: str, group: Group, what: str) -> None:
    """Raises ValueError in a simulation on shapes only, where ``what`` is unknown."""
    if group.world.device.type == "meta":
        raise ValueError(f"{name} on shapes only it is unknown: {what}")


def sizes_along(dim: int, leaves: Sequence[Tensor], group: Group) -> list[tuple[int, ...]]:
    """Each leaf's size along ``dim`` on every rank; raises MismatchError if dtypes or other dims differ."""
    need_values("all_gather(uneven=True)", group, "the other ranks' sizes; gather even pieces")
    for leaf in leaves:
        if not 0 <= dim < leaf.dim():
            raise ValueError(f"dim={dim} is out of range for a tensor of shape {list(leaf.shape)}")
    rests = [[*leaf.shape[:dim], *leaf.shape[dim + 1 :]] for leaf in leaves]
    signatures = [f"{leaf.dtype}{rest}" for leaf, rest in zip(leaves, rests, strict=True)]
    marks = [zlib.crc32(signature.encode()) for signature in signatures]
    mine = torch.tensor([[leaf.shape[dim], mark] for leaf, mark in zip(leaves, marks, strict=True)], device=group.world.device)
    everyones = request(Call(ALL_GATHER, {"dim": 0, "tiled": False}), mine, group).run().tolist()  # [n, leaves, 2]
    for place, signature in enumerate(signatures):
        for rank, theirs in enumerate(everyones):
            if theirs[place][1] != marks[place]:
                raise MismatchError(
                    f"all_gather(dim={dim}, uneven=True): leaf {place} has another dtype, or other sizes in dims other "
                    f"than {dim}, on rank {rank} of {group.name!r} than here on rank {group.rank} ({signature})"
                )
    return [tuple(theirs[place][0] for theirs in everyones) for place in range(len(leaves))]
