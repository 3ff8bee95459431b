"""Text as tokens, and rows of it that are a pure function of (seed, split, step, row)."""

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

import attrs
import torch
from torch import Tensor

from functional_ds.base.files import read_regular

from .job_errors import JobError

__all__ = ["TokenText", "read_files", "read_standard_library"]

MAX_BYTES = 8_000_000  # of the standard library; files of the user's are taken whole
SKIPPED_FOLDERS = {"__pycache__", "dist-packages", "encodings", "idle_test", "site-packages", "test", "tests"}


@attrs.frozen(eq=False)
class TokenText:
    """Two strings of tokens, and where they come from.

    Law: row i of step s is the same tokens on any number of ranks; a rank that takes the rows from ``first_row`` on sees its
    part of one global batch.

    >>> text = TokenText.cut(torch.arange(100), 0.1, source="numbers", context=4)
    >>> whole, _ = text.batch("train", 0, rows=4, context=3)
    >>> half, targets = text.batch("train", 0, rows=2, context=3, first_row=2)
    >>> bool((whole[2:] == half).all() and (half + 1 == targets).all())
    True

    Attributes:
        source: what to call it.
        train: tokens that are trained on, one-dimensional.
        validation: tokens that are not.
    """

    source: str
    train: Tensor
    validation: Tensor

    @classmethod
    def cut(cls, tokens: Tensor, share: float, *, source: str, context: int) -> "TokenText":
        """The last ``share`` of the tokens for validation.

        Raises:
            JobError: a part is shorter than a row and its last target.
        """
        place = len(tokens) - int(len(tokens) * share)
        shorter = min(place, len(tokens) - place)
        if shorter < context + 1:
            raise JobError(
                f"{source} has {len(tokens)} tokens, and the shorter of its parts {shorter}, fewer than context + 1 = "
                f"{context + 1}; take a longer text or a shorter context",
                entry="context",
                value=context,
            )
        return cls(source, tokens[:place], tokens[place:])

    def batch(
        self, split: str, step: int, *, rows: int, context: int, seed: int = 0, first_row: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Tokens and their successors, (x_BT, y_BT), int64, B = rows and T = context.

        Args:
            split: "train" or "validation".
            step: the batch's index.
            rows: how many rows to draw.
            context: tokens of a row.
            seed: of the draws.
            first_row: the place of the first of these rows in the global batch.

        Raises:
            ValueError: another split, or one that is too short.
        """
        data = self._split(split)
        places = len(data) - context  # a row reads context + 1 tokens
        if places < 1:
            raise ValueError(
                f"the {split} split of {self.source} has {len(data)} tokens, fewer than context + 1 = {context + 1}; "
                "use a longer text or a shorter context"
            )
        starts = [_draw(seed, split, step, row) % places for row in range(first_row, first_row + rows)]
        windows = torch.stack([data[start : start + context + 1] for start in starts]).long()  # [B, T + 1]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def _split(self, split: str) -> Tensor:
        if split not in ("train", "validation"):
            raise ValueError(f"split is {split!r}; it must be 'train' or 'validation'")
        return self.train if split == "train" else self.validation


def read_files(names: Iterable[str | Path], *, pattern: str = "**/*", folder: str | Path = ".") -> Iterator[bytes]:
    """The files, and in sorted order those of folders that match the pattern; hidden ones are left out.

    Args:
        names: of files and folders.
        pattern: a glob, for folders.
        folder: what the names are relative to.

    Raises:
        JobError: one is missing, empty, or cannot be read, as a pipe or a device; this machine's memory has not so many bytes.
    """
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for index, name in enumerate(names):
        path, entry = Path(folder, name), str(index)
        if not path.exists():
            raise JobError(f"{path} does not exist; give the path of a text file or of a folder of such", entry=entry)
        paths = sorted(_visible(path, pattern)) if path.is_dir() else [path]
        if not paths:
            raise JobError(f"{path} has no files that match {pattern!r}", entry=entry)
        for each in paths:
            try:
                text = read_regular(each, limit=room)
            except OSError as error:
                raise JobError(f"{each} cannot be read ({error.strerror}); give a readable text file", entry=entry) from error
            room -= len(text)
            if not text and not path.is_dir():
                raise JobError(f"{each} is empty; give a file with text in it", entry=entry)
            yield text


def _visible(folder: Path, pattern: str) -> Iterator[Path]:
    for path in folder.glob(pattern):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            yield path


@lru_cache(maxsize=1)
def read_standard_library(max_bytes: int = MAX_BYTES) -> bytes:
    """Python's own sources, the same on every machine with the same Python: text that needs no download.

    Raises:
        JobError: this Python has none.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in _sources(folder):
        text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    if not text:
        raise JobError(f"this Python has no sources under {folder}; name files of text", entry="files")
    return bytes(text[:max_bytes])


def _sources(folder: Path) -> Iterator[Path]:
    """The *.py files under a folder in a fixed order, without tests, installed packages and tables of characters."""
    for top, folders, files in os.walk(folder):
        folders[:] = sorted(set(folders) - SKIPPED_FOLDERS)  # in place: os.walk goes down these, in this order
        yield from (Path(top, name) for name in sorted(files) if name.endswith(".py"))


def _draw(*key: int | str) -> int:
    """64 random bits that depend on the key alone: no generator to advance, so rows are independent of each other."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")
