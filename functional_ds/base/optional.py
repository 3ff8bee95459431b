"""Folders of the library that an installation may leave out."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

__all__ = ["optional"]


@contextmanager
def optional(*modules: str) -> Iterator[None]:
    """Ignores that the imports in its body fail, if one of these modules is not installed."""
    try:
        yield
    except ImportError:
        if all(find_spec(module) is not None for module in modules):
            raise
