"""The text of a job: bytes or tokens, of files or of a data set of Hugging Face."""

from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .call_entry import CallEntry
from .job import Job
from .job_errors import JobError
from .resolve import made
from .token_text import TokenText, read_files, read_standard_library

__all__ = ["imported", "text_of"]


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
    """The text that a job's ``data`` names: a ``TokenText``, or what the user's function returns.

    Raises:
        JobError: there is no such text, or it is too short.
    """
    data = job.data
    try:
        if data.text is not None:
            return _own(job, data.text)
        source = data.dataset or ", ".join(data.files) or "Python's standard library"
        tokens = _bytes(job) if data.tokenizer is None else _tokens(job, data.tokenizer)
        return TokenText.cut(tokens, data.validation, source=source, context=data.context)
    except JobError as error:
        raise error.within("data") from None


def _own(job: Job, call: CallEntry) -> Any:
    found = made(call, "text", job, entry="text")
    if not callable(getattr(found, "batch", None)):
        raise JobError(
            "it returned no text: an object with batch(split, step, rows=, context=, seed=, first_row=)", entry="text"
        )
    return found


def _documents(job: Job) -> Iterator[bytes]:
    data = job.data
    if data.dataset is not None:
        yield from _rows_of_dataset(job, data.dataset)
    elif data.files:
        try:
            yield from read_files(data.files, pattern=data.pattern, folder=job.folder)
        except JobError as error:
            raise error.within("files") from None
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
        found = datasets.load_dataset(str(local) if local.exists() else name, data.dataset_config, split=data.dataset_split)
    except (OSError, ValueError, RuntimeError) as error:  # its own errors are of these kinds
        raise JobError(f"datasets cannot load it: {error}", entry="dataset", value=name) from error
    if data.column not in found.column_names:
        raise JobError(f"the data set has the columns {', '.join(found.column_names)}", entry="column", value=data.column)
    for row in found:
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
