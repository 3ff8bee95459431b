"""Real text as bytes: Python's own standard-library sources by default, or any one file.

A batch is a pure function of (seed, split, step, global row), so row i of step s is the same bytes whatever the number
of ranks: a rank that takes rows [first_row, first_row + rows) sees its part of one global batch.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import attrs
import torch
from torch import Tensor

MAX_BYTES = 8_000_000  # of the standard library; a file of the user's is taken whole
VALIDATION_PART = 10  # the last 1/10 of the bytes
SKIPPED_FOLDERS = {"__pycache__", "dist-packages", "encodings", "idle_test", "site-packages", "test", "tests"}


@attrs.frozen(eq=False)
class Corpus:
    """Two byte strings as uint8 tensors, and where they come from."""

    source: str
    train: Tensor
    validation: Tensor

    def batch(
        self, split: str, step: int, *, rows: int, context: int, seed: int = 0, first_row: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Tokens and their successors, (x_BT, y_BT), int64, B = rows and T = context."""
        data = self._split(split)
        places = len(data) - context  # a row reads context + 1 bytes
        if places < 1:
            raise ValueError(
                f"the {split} split of {self.source} has {len(data)} bytes, fewer than context + 1 = {context + 1}; "
                "use a longer file or a shorter context"
            )
        starts = [_draw(seed, split, step, row) % places for row in range(first_row, first_row + rows)]
        windows = torch.stack([data[start : start + context + 1] for start in starts]).long()  # [B, T + 1]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def _split(self, split: str) -> Tensor:
        if split not in ("train", "validation"):
            raise ValueError(f"split is {split!r}; it must be 'train' or 'validation'")
        return self.train if split == "train" else self.validation


def load(path: str | Path | None = None, *, context: int = 1, max_bytes: int = MAX_BYTES) -> Corpus:
    """Read `path`, or the standard library's sources up to `max_bytes`, and keep the last tenth for validation.

    Raises ValueError naming the path when it is missing, no readable file, empty, or when a split is shorter than
    context + 1.
    """
    text = _read_standard_library(max_bytes) if path is None else _read_file(Path(path))
    source = "Python's standard library" if path is None else str(path)
    cut = len(text) - len(text) // VALIDATION_PART
    shorter = min(cut, len(text) - cut)
    if shorter < context + 1:
        raise ValueError(
            f"{source} has {len(text)} bytes, and its shorter split (the last 1/{VALIDATION_PART}) {shorter}: "
            f"fewer than context + 1 = {context + 1}; give --data a file of at least "
            f"{VALIDATION_PART * (context + 1)} bytes, or a shorter --context"
        )
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return Corpus(source, data[:cut], data[cut:])


def _read_file(path: Path) -> bytes:
    if not path.exists():
        raise ValueError(f"--data {path} does not exist; give the path of a text file, or leave --data out")
    if not path.is_file():
        raise ValueError(f"--data {path} is not a file; give one text file (concatenate several first)")
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ValueError(f"--data {path} cannot be read ({error.strerror}); give a readable text file") from error
    if not text:
        raise ValueError(f"--data {path} is empty; give a file with text in it, or leave --data out")
    return text


def _read_standard_library(max_bytes: int) -> bytes:
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in _sources(folder):
        text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    if not text:
        raise ValueError(f"this Python has no sources under {folder}; give --data the path of a text file")
    return bytes(text[:max_bytes])


def _sources(folder: Path) -> Iterator[Path]:
    """The *.py files under a folder in a fixed order, without tests, installed packages and tables of characters."""
    for top, folders, files in os.walk(folder):
        folders[:] = sorted(set(folders) - SKIPPED_FOLDERS)  # in place: os.walk goes down these, in this order
        yield from (Path(top, name) for name in sorted(files) if name.endswith(".py"))


def _draw(*key: int | str) -> int:
    """64 random bits that depend on the key alone: no generator to advance, so rows are independent of each other."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")
