"""The safetensors format as data: which tensor lies where in which file, and the header that says so.

A file is 8 bytes with the header's length, the header as JSON, and the tensors' bytes, one after another without holes.
All offsets are known from shapes and dtypes alone, so tensors can be written in any order, each as it comes.
Source: the specification in the README of huggingface/safetensors.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any

import attrs
import torch

__all__ = ["CODES", "INDEX", "SINGLE", "File", "Place", "Spec", "index_of", "laid_out"]

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
class Spec:
    """A tensor of a file without its values."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """What it takes in a file."""
        return prod(self.shape) * self.dtype.itemsize


@attrs.frozen
class Place:
    """Where a tensor lies: from byte ``start`` on, counted from the end of the header."""

    spec: Spec
    start: int


@attrs.frozen
class File:
    """A safetensors file without its values.

    Larger element types come first, so that every tensor starts at a multiple of its element's size: a reader that maps the
    file must not copy.
    """

    name: str
    places: tuple[Place, ...]
    metadata: Mapping[str, str]

    @staticmethod
    def of(name: str, specs: Iterable[Spec], metadata: Mapping[str, str]) -> "File":
        """A file with these tensors.

        >>> file = File.of("x", [Spec("a", (3,), torch.int8), Spec("b", (2,), torch.float32)], {})
        >>> [(place.spec.name, place.start) for place in file.places]
        [('b', 0), ('a', 8)]
        """
        places, end = [], 0
        for spec in sorted(specs, key=lambda spec: -spec.dtype.itemsize):
            places.append(Place(spec, end))
            end += spec.nbytes
        return File(name, tuple(places), metadata)

    @property
    def header(self) -> bytes:
        """The file's first bytes; the data begins at a multiple of 8."""
        entries: dict[str, Any] = {"__metadata__": dict(self.metadata)} if self.metadata else {}
        for place in self.places:
            spec = place.spec
            span = [place.start, place.start + spec.nbytes]
            entries[spec.name] = {"dtype": CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": span}
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @property
    def nbytes(self) -> int:
        """The whole file's size."""
        return len(self.header) + sum(place.spec.nbytes for place in self.places)


def laid_out(
    specs: Sequence[Spec], *, limit: int | None, metadata: Mapping[str, str], single: str = SINGLE
) -> tuple[File, ...]:
    """The files for these tensors, in their order: one, or as many as it takes for none to hold more than ``limit`` bytes.

    A tensor that is larger than the limit gets a file of its own. Files are named as the ``transformers`` loader wants them.

    >>> halves = [Spec(name, (4,), torch.float32) for name in "abc"]
    >>> [file.name for file in laid_out(halves, limit=32, metadata={})]
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    shards: list[list[Spec]] = [[]]
    filled = 0
    for spec in specs:
        if limit is not None and shards[-1] and filled + spec.nbytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.nbytes
    if len(shards) == 1:
        return (File.of(single, shards[0], metadata),)
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    return tuple(File.of(name, shard, metadata) for name, shard in zip(names, shards, strict=True))


def index_of(files: Sequence[File]) -> bytes:
    """The index of several files, as JSON: which tensor is in which."""
    places = [(place.spec, file.name) for file in files for place in file.places]
    total = sum(spec.nbytes for spec, _ in places)
    numbers = sum(prod(spec.shape) for spec, _ in places)
    metadata = {"total_size": total, "total_parameters": numbers}
    where = {spec.name: name for spec, name in sorted(places, key=lambda pair: pair[0].name)}
    return (json.dumps({"metadata": metadata, "weight_map": where}, indent=2) + "\n").encode()
