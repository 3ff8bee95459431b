"""A pytest plugin: ``pytest_plugins = ["functional_ds.testing.fixtures"]`` in ``conftest.py`` makes the fixture ``holds``."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .holds import LawTable


def pytest_configure(config: pytest.Config) -> None:
    """Declares the mark of tests that use the fixture."""
    config.addinivalue_line("markers", "holds: checks a method against all laws of functional_ds.testing, for some ten seconds")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks tests that use the fixture."""
    if "holds" in getattr(item, "fixturenames", ()):
        item.add_marker("holds")


@pytest.fixture
def holds() -> "Callable[..., LawTable]":
    """``holds(transform, ...)`` is ``testing.holds``; if a law fails, so does the test, with the table and a program.

    With ``refusals=False`` it also fails if a composition raises an error.
    """
    from .holds import holds as table_of  # torch

    def check(transform: Any, *, refusals: bool = True, **options: Any) -> "LawTable":
        try:
            return table_of(transform, **options).check(refusals=refusals)
        except AssertionError as error:
            words = str(error)
        pytest.fail(words, pytrace=False)

    return check
