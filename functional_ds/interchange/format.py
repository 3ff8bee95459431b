"""The safetensors format as data: the offsets of tensors in files, and the header that lists them.

A file is 8 bytes with the header's length, the header as JSON, and the tensors' bytes, one after another without gaps. Shapes
and dtypes determine all offsets, so tensors can be written in any order. Source: the specification in the README of
huggingface/safetensors.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any

import attrs
import torch

from functional_ds.base.disk.files import check_plain

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

CODES: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e5m2: "F8_E5M2",
        torch.complex64: "C64",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int16: "I16",
        torch.int8: "I8",
        torch.uint64: "U64",
        torch.uint32: "U32",
        torch.uint16: "U16",
        torch.uint8: "U8",
        torch.bool: "BOOL",
    }
)


@attrs.frozen
class TensorSpec:
    """A tensor without its values."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its size in a file, in bytes."""
        return prod(self.shape) * self.dtype.itemsize


@attrs.frozen
class HeaderEntry:
    """A tensor's place in a file: from byte ``start`` after the header on."""

    spec: TensorSpec
    start: int


@attrs.frozen
class SafetensorsFile:
    """A safetensors file without its values.

    Larger element types come first, so every tensor starts at a multiple of its element's size, and a reader that maps the file
    need not copy.
    """

    name: str
    entries: tuple[HeaderEntry, ...]
    metadata: Mapping[str, str]

    @staticmethod
    def of(name: str, specs: Iterable[TensorSpec], metadata: Mapping[str, str]) -> "SafetensorsFile":
        """A file with these tensors.

        Args:
            name: the file's.
            specs: the tensors.
            metadata: strings for the header.

        Raises:
            ValueError: a name cannot be written as UTF-8.

        >>> file = SafetensorsFile.of("x", [TensorSpec("a", (3,), torch.int8), TensorSpec("b", (2,), torch.float32)], {})
        >>> [(entry.spec.name, entry.start) for entry in file.entries]
        [('b', 0), ('a', 8)]
        """
        specs = list(specs)
        try:
            check_plain([metadata, [spec.name for spec in specs]])
        except ValueError as error:
            raise ValueError(f"{error}; rename= gives another name") from None
        entries, end = [], 0
        for spec in sorted(specs, key=lambda spec: -spec.dtype.itemsize):
            entries.append(HeaderEntry(spec, end))
            end += spec.nbytes
        return SafetensorsFile(name, tuple(entries), metadata)

    @property
    def header(self) -> bytes:
        """The file's first bytes; the data begins at a multiple of 8."""
        entries: dict[str, Any] = {"__metadata__": dict(self.metadata)} if self.metadata else {}
        for entry in self.entries:
            spec = entry.spec
            span = [entry.start, entry.start + spec.nbytes]
            entries[spec.name] = {"dtype": CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": span}
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @property
    def nbytes(self) -> int:
        """The whole file's size."""
        return len(self.header) + sum(entry.spec.nbytes for entry in self.entries)


def split_files(
    specs: Sequence[TensorSpec], *, limit: int | None, metadata: Mapping[str, str], single: str = SINGLE
) -> tuple[SafetensorsFile, ...]:
    """The files for these tensors, in their order: one, or several of at most ``limit`` bytes each.

    A tensor that is larger than the limit gets a separate file. Names are those that the ``transformers`` loader expects.

    Args:
        specs: the tensors.
        limit: bytes of a file's tensors; None for one file.
        metadata: strings for each header.
        single: the name if there is one file.

    >>> halves = [TensorSpec(name, (4,), torch.float32) for name in "abc"]
    >>> [file.name for file in split_files(halves, limit=32, metadata={})]
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    shards: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        if limit is not None and shards[-1] and filled + spec.nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.nbytes
    if len(shards) == 1:
        return (SafetensorsFile.of(single, shards[0], metadata),)
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    return tuple(SafetensorsFile.of(name, shard, metadata) for name, shard in zip(names, shards, strict=True))


def index_of(files: Sequence[SafetensorsFile]) -> bytes:
    """The JSON index of several files: which tensor is in which file."""
    entries = [(entry.spec, file.name) for file in files for entry in file.entries]
    total = sum(spec.nbytes for spec, _ in entries)
    numbers = sum(prod(spec.shape) for spec, _ in entries)
    metadata = {"total_size": total, "total_parameters": numbers}
    where = {spec.name: name for spec, name in sorted(entries, key=lambda pair: pair[0].name)}
    return (json.dumps({"metadata": metadata, "weight_map": where}, indent=2) + "\n").encode()
