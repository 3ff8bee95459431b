"""Progress bars, and what a notebook shows, without a notebook."""

import sys
from types import ModuleType
from typing import Any

import pytest
import tqdm.auto

from functional_ds.comm.record.notebook import progress_bar
from tests.planting import Bug, planted


class Widget(tqdm.std.tqdm):
    """In place of ``tqdm.notebook``'s, which needs ipywidgets."""


def check_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    def module(name: str, **names: Any) -> None:
        made = ModuleType(name)
        vars(made).update(names)
        monkeypatch.setitem(sys.modules, name, made)

    module("ipykernel.zmqshell")
    module("IPython", get_ipython=lambda: None)
    module("tqdm.notebook", tqdm=Widget, trange=None, IProgress=object, WARN_NOIPYW="")
    for name in ("tqdm.auto", "tqdm.autonotebook"):
        monkeypatch.delitem(sys.modules, name)
    bar = progress_bar(total=3)
    assert (bar.mininterval, isinstance(bar, Widget)) == (0.1, True)


def test_a_notebook_shows_a_widget(monkeypatch: pytest.MonkeyPatch) -> None:
    """It moves ten times a second, though a notebook's stderr is no terminal."""
    bar = progress_bar(range(5))
    assert (bar.total, bar.mininterval, isinstance(bar, Widget)) == (5, 10.0, False)
    check_notebook(monkeypatch)


BUGS = [
    Bug("the bar of a console", "comm.record.notebook:progress_bar", "from tqdm.auto import tqdm", "from tqdm import tqdm"),
    Bug("the pace of a file", "comm.record.notebook:progress_bar", '"ipykernel.zmqshell" in sys.modules', "False"),
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_is_seen(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    with planted(bug), pytest.raises(bug.shows):
        check_notebook(monkeypatch)
