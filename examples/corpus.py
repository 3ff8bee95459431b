"""Real text as bytes: Python's own standard-library sources by default, or any file; rows are drawn as ``fds.jobs`` does."""

from pathlib import Path

import torch

from functional_ds.jobs import JobError, TokenText
from functional_ds.jobs.job_data import MAX_BYTES, read_files, read_standard_library

VALIDATION_SHARE = 0.1  # the last of the bytes


def load(path: str | Path | None = None, *, context: int = 1, max_bytes: int = MAX_BYTES) -> TokenText:
    """Read `path`, or the standard library's sources up to `max_bytes`, and keep the last tenth for validation.

    Raises ValueError naming the path when it is missing, empty, or when a split is shorter than context + 1.
    """
    text = read_standard_library(max_bytes) if path is None else b"".join(read_files([path]))
    source = "Python's standard library" if path is None else str(path)
    try:
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return TokenText.cut(data, VALIDATION_SHARE, source=source, context=context)
    except JobError as error:
        raise ValueError(error.problem) from error
