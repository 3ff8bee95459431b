"""``deepspeed.utils.torch``: comparisons of torch's version."""

import re
from typing import Any

import torch

from functional_ds.deepspeed.config.explain import UsageError

__all__ = ["required_torch_version"]


def required_torch_version(min_version: Any = None, max_version: Any = None) -> bool:
    """Whether torch's version is between two versions.

    Raises:
        UsageError: neither is given.

    >>> required_torch_version(min_version=2.1), required_torch_version(max_version="1.13")
    (True, False)
    """
    if not (min_version or max_version):
        raise UsageError("required_torch_version: pass min_version or max_version")
    here = _parts(torch.__version__)
    return not (min_version and _parts(min_version) > here) and not (max_version and _parts(max_version) < here)


def _parts(version: Any) -> tuple[int, ...]:
    numbers = [int(number) for number in re.findall(r"\d+", str(version).partition("+")[0])]
    return (*numbers, 0, 0, 0)[:3]
