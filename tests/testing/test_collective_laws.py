"""``collective_holds`` passes the library's collectives, and each law notices a collective that breaks it."""

from functools import partial
from typing import Any

import pytest
import torch

from functional_ds import comm
from functional_ds.testing import collective_holds
from tests.testing.wrong_collectives import WRONG, plain, right

LAWS = "start input leaves strides empty precision adjoint second-adjoint jit shapes processes bytes"
LAWS = [law.replace("-", " ") for law in LAWS.split()]


def test_it_holds() -> None:
    table = collective_holds(right).check(refusals=False)
    assert table.title == "right on 2 and 3 ranks"
    assert list(table.outcomes()) == LAWS == list(map(str, sorted(WRONG, key=LAWS.index)))
    assert set(table.outcomes().values()) == {"ok"}


@pytest.mark.parametrize(
    "function",
    [
        comm.all_reduce,
        partial(comm.all_gather, tiled=False),
        comm.reduce_scatter,
        partial(comm.reduce, dst=1),
        partial(comm.scatter, src=0),
        comm.algorithms.ring,
    ],
)
def test_the_librarys_collectives_hold(function: Any) -> None:
    some = [law for law in LAWS if law not in ("processes", "bytes")]
    assert set(collective_holds(function, world_sizes=[3], only=some).outcomes().values()) == {"ok"}


@pytest.mark.parametrize("law", WRONG)
def test_a_wrong_collective_is_noticed(law: str) -> None:
    row = collective_holds(WRONG[law], world_sizes=[3], only=[law])[law]
    assert row.outcome == "wrong", row
    assert "rank " in row.words or "runs eagerly" in row.words


def test_what_does_not_apply() -> None:
    """A maximum has no transpose; other processes cannot import a lambda."""
    table = collective_holds(partial(comm.all_reduce, op="max"), world_sizes=[2], only=["adjoint", "precision"])
    assert table.outcomes() == {"precision": "ok", "adjoint": "refused"}
    assert "has no transpose" in table["adjoint"].words
    local = comm.table.composed(lambda x, group=None: comm.all_reduce(x.detach(), group))
    assert set(collective_holds(local, world_sizes=[2], only=["adjoint", "bytes"]).outcomes().values()) == {"not applicable"}


def test_integers() -> None:
    table = collective_holds(right, world_sizes=[2], dtypes=[torch.int64], only=["leaves", "precision", "start"])
    assert table["start"].outcome == "ok"


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"function": plain}, TypeError, "is not a collective: pass comm.all_gather or its like, or put your function under"),
        ({"function": comm.table.composed(lambda x: 1.0)}, TypeError, "returns float for a tensor"),
        ({"world_sizes": []}, ValueError, "pass at least one of each"),
        ({"only": []}, ValueError, "pass some of the laws start, input"),
        ({"shape": ()}, ValueError, "pass at least one of each"),
        ({"only": ["starts"]}, ValueError, "pass some of the laws start, input"),
    ],
)
def test_bad_input(given: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        collective_holds(**{"function": right, "only": ["start"], **given})
