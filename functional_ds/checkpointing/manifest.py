"""The manifest: one JSON file in a checkpoint that describes its tensors and data files."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import torch

from functional_ds.base.disk.files import open_regular
from functional_ds.sharding.leaf_region import LeafRegion, fault
from functional_ds.state_dict.errors import DamagedError, NewerFormatError

MANIFEST = "manifest.json"
LONGEST = 1 << 30  # bytes of a manifest; one of 10^6 tensors in 10 chunks each has half of it
BLOCK = 1 << 20  # bytes of a data file that share one checksum
_FORMAT, _VERSION = "functional_ds checkpoint", 2
_WITHOUT_SLICES = 1  # what has none is written in the first version, which earlier libraries read
_NAMES = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex32 complex64 complex128 "
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
)
DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split() if hasattr(torch, name)}


@attrs.frozen
class Chunk:
    """Consecutive elements of a tensor, or of a slice of it, in a file.

    Attributes:
        offset: the first element in the flattened slice.
        numel: how many elements.
        file: the data file.
        position: the byte of the file at which they begin.
        slice: which of the tensor's slices.
    """

    offset: int
    numel: int
    file: int
    position: int
    slice: int = 0


@attrs.frozen
class StoredTensor:
    """A tensor in a checkpoint.

    Attributes:
        shape: its shape.
        dtype: its dtype.
        chunks: the elements, each in one chunk.
        slices: what the chunks are of: disjoint regions that make up the tensor, or the one that is all of it.
        whole: whether all elements are present; a value that only one rank had may be partial.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]
    slices: tuple[LeafRegion, ...] = attrs.Factory(lambda self: (LeafRegion(self.shape),), takes_self=True)
    whole: bool = True

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def plain(self) -> bool:
        """Whether it is complete and not in slices."""
        return self.whole and self.slices == (LeafRegion(self.shape),)

    def holds(self, region: LeafRegion, start: int, stop: int) -> bool:
        """Whether it has these elements of a region; if it is partial, whether it is exactly these."""
        return self.whole or [(self.slices[c.slice], c.offset, c.offset + c.numel) for c in self.chunks] == [
            (region, start, stop)
        ]


@attrs.frozen
class DataFile:
    """A file of tensors' bytes, with the CRC-32 of each block."""

    name: str
    size: int
    checks: tuple[int, ...] = attrs.field(repr=False)

    def encode(self) -> list[Any]:
        """As JSON values."""
        return [self.name, self.size, "".join(f"{check:08x}" for check in self.checks)]

    @staticmethod
    def decode(name: Any, size: Any, checks: Any) -> "DataFile":
        """From JSON values.

        Raises:
            ValueError: they are not those of a file.
        """
        if not isinstance(name, str) or Path(name).name != name or name.startswith("."):
            raise ValueError(f"a data file is called {name!r}")
        checksums = tuple(int(checks[i : i + 8], 16) for i in range(0, len(checks), 8))
        if len(checksums) != -(-_whole(size, "a size") // BLOCK):
            raise ValueError(f"{name} has {len(checksums)} checksums for {size} bytes")
        return DataFile(name, size, checksums)


@attrs.frozen
class Summary:
    """What a folder's listing needs of a checkpoint.

    Attributes:
        tag: its name.
        sequence: grows from checkpoint to checkpoint in a folder.
        step: the number of updates.
        expires: whether retention may delete it.
        ranks: the number of ranks that wrote it.
    """

    tag: str
    sequence: int
    step: int
    expires: bool
    ranks: int


@attrs.frozen
class Manifest:
    """A whole manifest.

    Attributes:
        summary: see ``Summary``.
        files: one per rank, in rank order.
        tensors: by name.
        extra: the user's JSON values.
    """

    summary: Summary
    files: tuple[DataFile, ...]
    tensors: Mapping[str, StoredTensor] = attrs.field(repr=False)
    extra: Any = None

    def encode(self) -> bytes:
        """Three lines of JSON: the format with a checksum of the other lines, the summary, and the rest."""
        body = {
            "files": [file.encode() for file in self.files],
            "tensors": {name: _row(tensor) for name, tensor in self.tensors.items()},
            "extra": self.extra,
        }
        rest = b"".join(_line(part) for part in (attrs.asdict(self.summary), body))
        return _header(rest, _WITHOUT_SLICES if all(t.plain for t in self.tensors.values()) else _VERSION) + rest

    @staticmethod
    def decode(data: bytes, where: str) -> "Manifest":
        """The inverse of ``encode``; errors name the file as ``where``.

        Raises:
            NewerFormatError: a later version wrote it.
            DamagedError: it is not a manifest, or was altered.
        """
        header, _, rest = data.partition(b"\n")
        version = _version(header, where)
        if header + b"\n" != _header(rest, version):
            raise DamagedError(f"{where} is damaged: its checksum is not that of its content")
        if version > _VERSION:
            raise NewerFormatError(
                f"{where} has the format {version}, and this version of functional_ds reads up to {_VERSION}; upgrade it"
            )
        try:
            summary, body = (json.loads(line) for line in rest.splitlines())
            files = tuple(DataFile.decode(*row) for row in body["files"])
            wrong = cache(fault)  # most leaves of a model are sliced in one of a few ways
            tensors = {name: _tensor(files, wrong, *row) for name, row in body["tensors"].items()}
            _check_files(files, tensors)
            return Manifest(Summary(**summary), files, tensors, body["extra"])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DamagedError(f"{where} is not a manifest of this library's: {error}") from error


def read_summary(folder: Path) -> Summary | None:
    """The summary of a checkpoint's folder, without its checksum being checked; None if it cannot be read."""
    try:
        with os.fdopen(open_regular(folder / MANIFEST), "rb") as file:
            header, line = file.readline(1 << 12), file.readline(1 << 16)
        if _version(header.rstrip(b"\n"), str(folder)) > _VERSION:
            return None
        summary = Summary(**json.loads(line))
    except (OSError, ValueError, TypeError, RecursionError, DamagedError):
        return None
    kinds = {"tag": str, "sequence": int, "step": int, "expires": bool, "ranks": int}
    return summary if all(type(getattr(summary, name)) is cls for name, cls in kinds.items()) else None


def _line(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=True).encode() + b"\n"


def _header(rest: bytes, version: int) -> bytes:
    check = hashlib.sha256(f"{_FORMAT} {version}\n".encode() + rest).hexdigest()
    return _line({"format": _FORMAT, "version": version, "sha256": check})


def _version(header: bytes, where: str) -> int:
    try:
        fields = json.loads(header)
        form, version = fields["format"], fields["version"]
    except (ValueError, TypeError, KeyError, RecursionError):
        form, version = None, None
    if form != _FORMAT or type(version) is not int:
        raise DamagedError(f"{where} is damaged, or is not a manifest of this library's")
    return version


def _whole(value: Any, what: str) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{what} is {value!r}")
    return value


def _row(tensor: StoredTensor) -> list[Any]:
    """A tensor as JSON; of its slices the ranges along each dim that is cut."""
    width = 4 if tensor.plain else 5
    row = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), [attrs.astuple(c)[:width] for c in tensor.chunks]]
    return row if tensor.plain else [*row, [region.ranges for region in tensor.slices], tensor.whole]


def _tensor(
    files: tuple[DataFile, ...],
    wrong: Callable[[tuple[int, ...], tuple[LeafRegion, ...]], str | None],
    dtype: Any,
    shape: Any,
    chunks: Any,
    slices: Any = ((),),
    whole: Any = True,
) -> StoredTensor:
    sides = tuple(_whole(side, "a side") for side in shape)
    tensor = StoredTensor(
        sides,
        DTYPES[dtype],
        tuple(Chunk(*(_whole(number, "a place") for number in chunk)) for chunk in chunks),
        tuple(_region(sides, ranges) for ranges in slices),
        whole is True,
    )
    stops = [0] * len(tensor.slices)
    for chunk in sorted(tensor.chunks, key=lambda chunk: (chunk.slice, chunk.offset, chunk.numel)):
        if chunk.slice >= len(stops):
            raise ValueError(f"{chunk} is of a slice that is not there")
        stop = stops[chunk.slice]
        if chunk.offset < stop or (chunk.offset > stop and tensor.whole):
            what = "no chunk" if chunk.offset > stop else "two chunks"
            raise ValueError(f"a tensor has {what} for its elements {min(stop, chunk.offset)} to {max(stop, chunk.offset)}")
        stops[chunk.slice] = stop = chunk.offset + chunk.numel
        size = files[chunk.file].size if chunk.file < len(files) else -1
        total = tensor.slices[chunk.slice].numel
        if stop > total or chunk.position + chunk.numel * tensor.dtype.itemsize > size:
            raise ValueError(f"{chunk} is outside of its tensor or file")
    for region, stop in zip(tensor.slices, stops, strict=True):
        if tensor.whole and stop != region.numel:
            raise ValueError(f"a tensor has no chunk for its elements {stop} to {region.numel}")
    damage = wrong(sides, tensor.slices) if tensor.whole else None
    if damage is not None:
        raise ValueError(f"a tensor has {damage}")
    return tensor


def _region(shape: tuple[int, ...], ranges: Any) -> LeafRegion:
    pairs = [
        (_whole(dim, "a dim"), tuple((_whole(a, "a place"), _whole(b, "a place")) for a, b in bounds)) for dim, bounds in ranges
    ]
    region = LeafRegion(shape, tuple(pairs))
    region.check()
    return region


def _check_files(files: tuple[DataFile, ...], tensors: Mapping[str, StoredTensor]) -> None:
    """Checks that each byte of a file belongs to at most one chunk, and that file names are unique."""
    if len({file.name for file in files}) != len(files):
        raise ValueError("two data files have one name")
    used = sorted(
        (chunk.file, chunk.position, chunk.position + chunk.numel * tensor.dtype.itemsize)
        for tensor in tensors.values()
        for chunk in tensor.chunks
        if chunk.numel
    )
    for (one, _, stop), (other, start, _) in pairwise(used):
        if one == other and start < stop:
            raise ValueError(f"two chunks share the bytes {start} to {stop} of {files[one].name}")
