"""Leaves of a state that are not in the device's memory: what they are, and how to get at their values."""

import math
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import Any

import attrs
import optree
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.tree import NAMESPACE

from .disk import Disk, aligned
from .files import Extent, OffloadError, padded
from .prefetch import Ahead

__all__ = ["OnDisk", "OnHost", "OnPaper", "fetched", "restored"]


@attrs.frozen(eq=False)
class OnDisk:
    """A tensor's values in a file: an immutable value, whose room on the disk is free again when nobody refers to it.

    So a copy of a state may share it: an update writes its new values elsewhere. Where a tensor is wanted, ``detach()`` gives
    one, which is all that a view of shards asks of its leaves.

    Attributes:
        shape: of the tensor.
        dtype: of the tensor.
        device: where ``detach`` puts it.
        chunk: how many elements are read, written and checked together; each such piece begins a page of the file.
        sums: the checksums (CRC-32) of these pieces.
        extent: where it lies.
        disk: what reads it.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    chunk: int
    sums: tuple[int, ...]
    extent: Extent
    disk: Disk

    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes the tensor has."""
        return self.numel() * self.dtype.itemsize

    @property
    def name(self) -> str:
        """What tells it from the others of its folder, from update to update."""
        return self.extent.file.path.name

    @property
    def reader(self) -> Ahead:
        """What fetches it."""
        return self.disk.reader

    @property
    def stride(self) -> int:
        """How many bytes of the file a piece takes."""
        return padded(self.chunk * self.dtype.itemsize)

    def is_floating_point(self) -> bool:
        """Whether the tensor is."""
        return self.dtype.is_floating_point

    def is_complex(self) -> bool:
        """Whether the tensor is."""
        return self.dtype.is_complex

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """The elements ``start..stop`` of the flattened tensor, in host memory.

        Whole pieces are read and checked, and no more than one is held beside the result.

        Raises:
            OffloadError: the file is not as it was written; the message names it.
        """
        stop = self.numel() if stop is None else min(stop, self.numel())
        found = torch.empty(max(stop - start, 0), dtype=self.dtype)
        room = aligned(min(self.stride, padded(self.nbytes)))
        for index in range(start // self.chunk, -(-stop // self.chunk)):
            first = index * self.chunk
            piece = self._piece(index, room)
            low, high = max(start, first), min(stop, first + len(piece))
            found[low - start : high - start] = piece[low - first : high - first]
        return found

    def begin(self) -> "Future[Tensor]":
        """Starts to read all of it."""
        return self.disk.background.submit(self.read)

    def end(self, begun: "Future[Tensor]") -> Tensor:
        """The tensor on its device, once it is read."""
        return begun.result().view(self.shape).to(self.device)

    def detach(self) -> Tensor:
        """The tensor on its device."""
        return self.reader.fetch(self)

    def written(self, pieces: Iterable[Tensor]) -> "OnDisk":
        """The same tensor with other values, its flattened elements in order, in pieces of any size; on the same disk."""
        extent, sums, flat = self.extent.file.take(), [], _rechunked(pieces, self.chunk)
        for index, piece in zip(range(len(self.sums)), flat, strict=True):
            room = aligned(piece.numel() * self.dtype.itemsize)
            _typed(room, self.dtype, piece.numel()).copy_(piece)
            begun = self.disk.write(extent, index * self.stride, data=room, nbytes=piece.numel() * self.dtype.itemsize)
            sums.append(begun.result())
        return attrs.evolve(self, extent=extent, sums=tuple(sums))

    def _piece(self, index: int, room: Tensor) -> Tensor:
        count = min(self.chunk, self.numel() - index * self.chunk)
        nbytes = count * self.dtype.itemsize
        own = room[: padded(nbytes)]
        self.disk.read(self.extent, index * self.stride, into=own, nbytes=nbytes, checksum=self.sums[index]).result()
        return _typed(own, self.dtype, count)

    def __reduce__(self) -> Any:
        raise OffloadError(f"{self.extent.file.path} belongs to this process: use offloading.fetched(state) before you send it")


@tree.record
class OnHost:
    """A tensor in the host's memory that is wanted on a device; ``detach()`` gives it there."""

    host: Tensor
    name: str = tree.static()
    device: torch.device = tree.static()
    reader: Ahead = tree.static()

    @property
    def shape(self) -> torch.Size:
        """Of the tensor."""
        return self.host.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensor."""
        return self.host.dtype

    def numel(self) -> int:
        """How many elements it has."""
        return self.host.numel()

    def is_floating_point(self) -> bool:
        """Whether the tensor is."""
        return self.host.is_floating_point()

    def is_complex(self) -> bool:
        """Whether the tensor is."""
        return self.host.is_complex()

    def begin(self) -> tuple[Tensor, Any]:
        """Starts the copy, beside what the device does."""
        if self.device.type != "cuda":
            return self.host.detach().to(self.device), None
        stream = self.reader.stream(self.device)
        with torch.cuda.stream(stream):
            found = self.host.detach().to(self.device, non_blocking=True)
        found.record_stream(torch.cuda.current_stream(self.device))
        return found, stream.record_event()

    def end(self, begun: tuple[Tensor, Any]) -> Tensor:
        """The tensor on its device; what uses it there comes after the copy."""
        found, copied = begun
        if copied is not None:
            torch.cuda.current_stream(self.device).wait_event(copied)
        return found

    def detach(self) -> Tensor:
        """The tensor on its device."""
        return self.reader.fetch(self)


@attrs.frozen
class OnPaper:
    """What stands for a tensor on the disk in a state without values, which only says what it would hold."""

    shape: torch.Size
    dtype: torch.dtype
    place: str = "disk"

    @property
    def device(self) -> torch.device:
        """Where ``detach`` puts it."""
        return torch.device("meta")

    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return self.numel() * self.dtype.itemsize

    def is_floating_point(self) -> bool:
        """Whether the tensor is."""
        return self.dtype.is_floating_point

    def is_complex(self) -> bool:
        """Whether the tensor is."""
        return self.dtype.is_complex

    def detach(self) -> Tensor:
        """The tensor, without values."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


Handle = OnDisk | OnHost


def is_handle(leaf: Any) -> bool:
    """Whether a leaf's values are elsewhere."""
    return isinstance(leaf, OnDisk | OnHost)


def fetched(state: Any) -> Any:
    """The tree with a tensor in the place of every handle: for a checkpoint, say.

    Law 28: ``restored(fetched(s), s) = s``, and ``fetched`` of an offloaded run's state is the other run's, both bitwise.
    """
    return optree.tree_map(
        lambda leaf: leaf.end(leaf.begin()) if is_handle(leaf) else leaf, state, is_leaf=is_handle, namespace=NAMESPACE
    )


def restored(values: Any, like: Any) -> Any:
    """A tree of tensors with handles where ``like``, a tree of the same structure, has them.

    Raises:
        ValueError: the trees differ in structure, or a tensor in shape or dtype from its handle.
    """
    models, spec = optree.tree_flatten(like, is_leaf=is_handle, namespace=NAMESPACE)
    leaves, found = tree.flatten(values)
    if found != spec:
        raise ValueError(f"values: their structure is {found}, not that of the state, {spec}")
    return tree.unflatten(spec, [_stored(value, model) for value, model in zip(leaves, models, strict=True)])


def _stored(value: Any, model: Any) -> Any:
    if not is_handle(model):
        return value
    if (tuple(value.shape), value.dtype) != (tuple(model.shape), model.dtype):
        raise ValueError(
            f"values: {value.dtype}{list(value.shape)} in the place of a handle of {model.dtype}{list(model.shape)}"
        )
    if isinstance(model, OnHost):
        return tree.replace(model, host=value.detach().to(model.host.device, copy=True))
    return model.written([value.detach().cpu().reshape(-1)])


def _rechunked(pieces: Iterable[Tensor], size: int) -> Iterator[Tensor]:
    """The same elements in pieces of ``size``, the last one shorter."""
    held: list[Tensor] = []
    count = 0
    for piece in pieces:
        flat = piece.reshape(-1)
        while flat.numel():
            part, flat = flat[: size - count], flat[size - count :]
            held.append(part)
            count += part.numel()
            if count == size:
                yield torch.cat(held)
                held, count = [], 0
    if held:
        yield torch.cat(held)


def _typed(room: Tensor, dtype: torch.dtype, count: int) -> Tensor:
    return room[: count * dtype.itemsize].view(dtype)
