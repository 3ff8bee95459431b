"""The text of a job: bytes or tokens of files or a data set, in rows that are a pure function of (seed, split, step, row)."""

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.base.disk.files import read_regular
from functional_ds.jobs.entries.call_entry import CallEntry
from functional_ds.jobs.entries.job_errors import JobError, within

from .job import Job
from .resolve import made

MAX_BYTES = 8_000_000  # of the standard library; files of the user's are taken whole
SKIPPED_FOLDERS = {"__pycache__", "dist-packages", "encodings", "idle_test", "site-packages", "test", "tests"}


@attrs.frozen(eq=False)
class TokenText:
    """Training and validation tokens, and their source.

    Law: row i of step s has the same tokens on any number of ranks; a rank that takes the rows from ``first_row`` on gets its
    part of one global batch.

    >>> text = TokenText.cut(torch.arange(100), 0.1, source="numbers", context=4)
    >>> whole, _ = text.batch("train", 0, rows=4, context=3)
    >>> half, targets = text.batch("train", 0, rows=2, context=3, first_row=2)
    >>> bool((whole[2:] == half).all() and (half + 1 == targets).all())
    True

    Attributes:
        source: its name.
        train: training tokens, one-dimensional.
        validation: validation tokens.
    """

    source: str
    train: Tensor
    validation: Tensor

    @classmethod
    def cut(cls, tokens: Tensor, share: float, *, source: str, context: int) -> "TokenText":
        """Splits off the last ``share`` of the tokens for validation.

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
            first_row: the index of the first of these rows in the global batch.

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
    """The contents of files, and, in sorted order, of those in folders that match the pattern; hidden ones are skipped.

    Args:
        names: of files and folders.
        pattern: a glob, for folders.
        folder: what the names are relative to.

    Raises:
        JobError: a file is missing, empty, or unreadable, such as a pipe or a device; it does not fit in this machine's memory.
    """
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for index, name in enumerate(names):
        path, entry = Path(folder, name), str(index)
        if not path.exists():
            raise JobError(f"{path} does not exist; give the path of a text file or of a folder of such", entry=entry)
        paths = sorted(_visible(path, pattern)) if path.is_dir() else [path]
        if not paths:
            raise JobError(f"{path} has no files that match {pattern!r}", entry=entry)
        for file in paths:
            try:
                text = read_regular(file, limit=room)
            except OSError as error:
                raise JobError(f"{file} cannot be read ({error.strerror}); give a readable text file", entry=entry) from error
            room -= len(text)
            if not text and not path.is_dir():
                raise JobError(f"{file} is empty; give a file with text in it", entry=entry)
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
    """64 random bits that depend only on the key: no generator state, so rows are independent of each other."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")


def imported(package: str, entry: str, value: Any) -> Any:
    """An optional package.

    Raises:
        JobError: it is not installed.
    """
    if find_spec(package) is None:
        raise JobError(
            f"it needs the package {package}, which is not installed: pip install {package}", entry=entry, value=value
        )
    return import_module(package)


def text_of(job: Job) -> Any:
    """The text for a job's ``data``: a ``TokenText``, or what the user's function returns.

    Raises:
        JobError: there is no such text, or it is too short.
    """
    data = job.data
    with within("data"):
        if data.text is not None:
            return _own(job, data.text)
        source = data.dataset or ", ".join(data.files) or "Python's standard library"
        tokens = _bytes(job) if data.tokenizer is None else _tokens(job, data.tokenizer)
        return TokenText.cut(tokens, data.validation, source=source, context=data.context)


def _own(job: Job, call: CallEntry) -> Any:
    text = made(call, "text", job, entry="text")
    if not callable(getattr(text, "batch", None)):
        raise JobError(
            "it returned no text: an object with batch(split, step, rows=, context=, seed=, first_row=)", entry="text"
        )
    return text


def _documents(job: Job) -> Iterator[bytes]:
    data = job.data
    if data.dataset is not None:
        yield from _rows_of_dataset(job, data.dataset)
    elif data.files:
        with within("files"):
            yield from read_files(data.files, pattern=data.pattern, folder=job.folder)
    else:
        yield read_standard_library()


def _bytes(job: Job) -> Tensor:
    text = bytearray(b"".join(_documents(job)))
    if not text:
        raise JobError("there is no text in it", entry="files", value=list(job.data.files))
    return torch.frombuffer(text, dtype=torch.uint8)


def _rows_of_dataset(job: Job, name: str) -> Iterator[bytes]:
    data = job.data
    datasets = imported("datasets", "dataset", name)
    local = Path(job.folder, name)
    try:
        dataset = datasets.load_dataset(str(local) if local.exists() else name, data.dataset_config, split=data.dataset_split)
    except (OSError, ValueError, RuntimeError) as error:  # its own errors are of these kinds
        raise JobError(f"datasets cannot load it: {error}", entry="dataset", value=name) from error
    if data.column not in dataset.column_names:
        raise JobError(f"the data set has the columns {', '.join(dataset.column_names)}", entry="column", value=data.column)
    for row in dataset:
        yield str(row[data.column]).encode()


def _tokens(job: Job, name: str) -> Tensor:
    """Each document's tokens, then the token that ends a text, if the tokenizer has one."""
    transformers = imported("transformers", "tokenizer", name)
    local = Path(job.folder, name)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(local) if local.exists() else name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise JobError(f"transformers cannot load it: {error}", entry="tokenizer", value=name) from error
    end = tokenizer.eos_token_id
    return torch.tensor([*_encoded(tokenizer, _documents(job), [] if end is None else [end])], dtype=torch.int32)


def _encoded(tokenizer: Any, documents: Iterable[bytes], end: list[int]) -> Iterator[int]:
    for document in documents:
        text = document.decode("utf-8", errors="replace")
        yield from tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        yield from end
