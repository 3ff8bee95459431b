"""DeepSpeed itself, where it is installed (extra ``bench``)."""

import importlib
import warnings
from typing import Any

import pytest

__all__ = ["real"]


def real(module: str = "deepspeed") -> Any:
    """A module of DeepSpeed; without it the tests are skipped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("deepspeed")
        return importlib.import_module(module)
