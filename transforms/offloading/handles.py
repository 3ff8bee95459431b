"""Handles: leaves of a state whose values are not in the device's memory."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import attrs
import optree
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.device_streams import Arrival
from functional_ds.base.disk.direct_io import aligned, padded
from functional_ds.base.tree import NAMESPACE
from functional_ds.comm.record.graph_notes import GraphLeaf

from .files import Disk, Extent, OffloadError, VersionedFile
from .prefetch import Prefetched, Prefetcher
from .tensor_info import TensorInfo, begins_with, typed
from .traced import TracedOnDisk


@attrs.frozen(eq=False, repr=False)
class OnDisk(Prefetched, GraphLeaf):
    """A tensor in a file: an immutable value, whose disk space is freed with the last reference to it.

    Copies of a state may share it, because an update writes new values elsewhere. ``detach()`` returns the tensor on its
    device.

    Attributes:
        shape: of the tensor.
        dtype: of the tensor.
        chunk: how many elements are read, written and checked together; each such piece begins a page of the file.
        sums: the checksums (CRC-32) of these pieces.
        extent: its bytes in the file.
        disk: reads it.
        prefetcher: fetches it to its device.
    """

    shape: torch.Size
    dtype: torch.dtype
    chunk: int
    sums: tuple[int, ...]
    extent: Extent
    disk: Disk
    prefetcher: Prefetcher

    def __repr__(self) -> str:
        return f"OnDisk({self.dtype}{list(self.shape)}, {str(self.extent.file.path)!r})"

    @property
    def name(self) -> str:
        """Its name, unique in its folder and the same from update to update."""
        return self.extent.file.path.name

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """The elements ``start..stop`` of the flattened tensor, in host memory.

        It reads and checks whole pieces, and holds one at a time in addition to the result.

        Raises:
            OffloadError: the file was changed or cannot be read; names the file.
        """
        stop = self.numel() if stop is None else min(stop, self.numel())
        values = torch.empty(max(stop - start, 0), dtype=self.dtype)
        room = aligned(min(self._stride, padded(self.nbytes)))
        for index in range(start // self.chunk, -(-stop // self.chunk)):
            first = index * self.chunk
            self.read_piece(index, into=room).result()
            piece = typed(room, self.dtype, [self._count(index)])
            low, high = max(start, first), min(stop, first + len(piece))
            values[low - start : high - start] = piece[low - first : high - first]
        return values

    def piece(self, index: int) -> Tensor:
        """The elements of a piece, in new memory.

        Raises:
            OffloadError: the file was changed or cannot be read; names the file.
        """
        room = aligned(self._count(index) * self.dtype.itemsize)
        self.read_piece(index, into=room).result()
        return typed(room, self.dtype, [self._count(index)])

    def read_piece(self, index: int, *, into: Tensor, after: "Sequence[Future[int]]" = ()) -> "Future[int]":
        """Starts to read a piece into the first whole pages of ``into``, once ``after`` is done."""
        nbytes = self._count(index) * self.dtype.itemsize
        room = into[: padded(nbytes)]
        return self.disk.read(
            self.extent, index * self._stride, into=room, nbytes=nbytes, checksum=self.sums[index], after=after
        )

    def begin(self) -> "Future[Tensor]":
        """Starts to read all of it."""
        return self.disk.background.submit(self.read)

    def end(self, begun: "Future[Tensor]") -> Tensor:
        """The tensor on its device, once it is read."""
        return begun.result().view(self.shape).to(self.device)

    def written(self, pieces: Iterable[Tensor]) -> "OnDisk":
        """The same tensor with other values, on the same disk: its flattened elements in order, in pieces of any size.

        Raises:
            OffloadError: the disk is full, or cannot be written.
            ValueError: there are more or fewer elements.
        """
        version, count = self.version(), 0
        for piece in _rechunked(pieces, self.chunk):
            count += piece.numel()
            if count <= self.numel():
                version.write(piece, aligned(piece.numel() * self.dtype.itemsize)).result()
        if count != self.numel():
            raise ValueError(f"pieces: they have {count} elements, and {self!r} has {self.numel()}")
        return version.done()

    def version(self) -> "Version":
        """Space for its next version.

        Raises:
            OffloadError: the disk is full.
        """
        return Version(self.shape, self.dtype, self.chunk, self.extent.file, self.disk, self.prefetcher)

    @property
    def kind(self) -> Any:
        """What a graph depends on of it; the disk, as the state that a graph returns has the storage of its trace."""
        return OnDisk, self.shape, self.dtype, self.chunk, self.disk

    def in_graph(self, token: Tensor) -> TracedOnDisk:
        """What stands for it while its step is traced."""
        return TracedOnDisk(self.shape, self.dtype, self.chunk, self.prefetcher, token)

    @property
    def _stride(self) -> int:
        """Bytes of the file from piece to piece."""
        return padded(self.chunk * self.dtype.itemsize)

    def _count(self, index: int) -> int:
        """Elements of a piece."""
        return min(self.chunk, self.numel() - index * self.chunk)

    def __reduce__(self) -> Any:
        raise OffloadError(f"{self.extent.file.path} belongs to this process: use offloading.fetched(state) before you send it")


@attrs.define(eq=False, repr=False)
class Version:
    """The next version of a tensor on disk, written piece by piece.

    Raises:
        OffloadError: when it is made: the disk is full.
    """

    shape: torch.Size
    dtype: torch.dtype
    chunk: int
    file: VersionedFile
    disk: Disk
    prefetcher: Prefetcher
    writes: "list[Future[int]]" = attrs.field(factory=list)
    _extent: Extent = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._extent = self.file.take()

    def write(self, values: Tensor, room: Tensor) -> "Future[int]":
        """Starts to write the next piece, which is in ``room``, whole pages of memory, or is copied there."""
        nbytes = values.numel() * self.dtype.itemsize
        staged = typed(room, self.dtype, values.shape)
        if not begins_with(staged, values):
            staged.copy_(values)
        offset = len(self.writes) * padded(self.chunk * self.dtype.itemsize)
        self.writes.append(self.disk.write(self._extent, offset, data=room[: padded(nbytes)], nbytes=nbytes))
        return self.writes[-1]

    def done(self) -> OnDisk:
        """Its handle, once everything is written.

        Raises:
            OffloadError: it could not be written.
        """
        sums = tuple(write.result() for write in self.writes)
        return OnDisk(self.shape, self.dtype, self.chunk, sums, self._extent, self.disk, self.prefetcher)


@tree.record
class OnHost(Prefetched):
    """A tensor in host memory that is used on a device; ``detach()`` returns it there.

    Attributes:
        host: the values.
        name: unique in its state and the same from update to update.
        prefetcher: fetches it to its device.
    """

    host: Tensor
    name: str = tree.static()
    prefetcher: Prefetcher = tree.static()

    @property
    def shape(self) -> torch.Size:
        """The tensor's shape."""
        return self.host.shape

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        return self.host.dtype

    def begin(self) -> Arrival:
        """Starts the copy, which overlaps the device's computation."""
        return self.prefetcher.copies.to_device(self.host.detach())

    def end(self, begun: Arrival) -> Tensor:
        """The tensor on its device."""
        return begun.wait()


@attrs.frozen
class OnPaper(TensorInfo):
    """A tensor on disk in a state without values, which only counts its bytes."""

    shape: torch.Size
    dtype: torch.dtype
    place: str = "disk"

    @property
    def device(self) -> torch.device:
        """The device to which ``detach`` moves it."""
        return torch.device("meta")

    def detach(self) -> Tensor:
        """The tensor, as a meta tensor."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


def is_handle(leaf: Any) -> bool:
    """Whether a leaf is a handle."""
    return isinstance(leaf, Prefetched)


def fetched(state: Any) -> Any:
    """The tree with every handle replaced by its tensor, for example for a checkpoint.

    ``restored(fetched(s), s) = s``, and ``fetched`` of an offloaded run's state equals the other run's, both bitwise.
    """
    return optree.tree_map(
        lambda leaf: leaf.end(leaf.begin()) if is_handle(leaf) else leaf, state, is_leaf=is_handle, namespace=NAMESPACE
    )


def restored(values: Any, like: Any) -> Any:
    """The tree with tensors replaced by handles wherever ``like``, a tree of the same structure, has them.

    Raises:
        ValueError: the trees differ in structure, or a tensor in shape or dtype from its handle.
    """
    models, spec = optree.tree_flatten(like, is_leaf=is_handle, namespace=NAMESPACE)
    leaves, structure = tree.flatten(values)
    if structure != spec:
        raise ValueError(f"values: their structure is {structure}, not that of the state, {spec}")
    return tree.unflatten(spec, [_stored(value, model) for value, model in zip(leaves, models, strict=True)])


def _stored(value: Any, model: Any) -> Any:
    if not is_handle(model):
        return value
    if (tuple(value.shape), value.dtype) != (tuple(model.shape), model.dtype):
        raise ValueError(f"values: {value.dtype}{list(value.shape)} instead of a handle of {model.dtype}{list(model.shape)}")
    if isinstance(model, OnHost):
        return tree.replace(model, host=value.detach().to(model.host.device, copy=True))
    return model.written([value.detach().cpu().reshape(-1)])


def _rechunked(pieces: Iterable[Tensor], size: int) -> Iterator[Tensor]:
    """The same elements in pieces of ``size``, the last one shorter."""
    rest = torch.empty(0)
    for piece in pieces:
        flat = torch.cat([rest, piece.reshape(-1)]) if rest.numel() else piece.reshape(-1)
        *whole, rest = flat.split(size)
        yield from whole
    if rest.numel():
        yield rest
