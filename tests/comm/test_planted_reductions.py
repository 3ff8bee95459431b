"""Bugs of reductions in place and of gathers in one call, each planted alone: a law must break."""

from collections.abc import Callable

import pytest
import torch

from functional_ds import comm
from tests.comm import test_donated_reduce
from tests.comm.algorithms import test_bruck
from tests.parallel import test_cut_pipelines
from tests.planting import Bug, planted

pytestmark = pytest.mark.timeout(60)

GLOO = "comm.backends.gloo"

TRANSPORT = [
    (2, Bug("what is not donated is overwritten", "comm.backends.gloo:all_reduce", "piece if in_place else None", "piece")),
    (
        3,
        Bug(
            "the third rank's own value is lost", "comm.backends.gloo:_reduce_rows.finish", "out is mine and rank > 1", "False"
        ),
    ),
    (
        3,
        Bug(
            "large sums are gathered from elsewhere",
            "comm.backends.gloo:all_reduce",
            "piece if in_place else torch.empty_like(piece)",
            "torch.empty_like(piece)",
        ),
    ),
]


def with_bugs() -> list[list[bool]]:
    """Whether each sum holds where it lay, without a bug and with each that is meant for as many ranks."""
    bugs = [bug for ranks, bug in TRANSPORT if ranks == comm.world().size]
    found = [sums()]
    for bug in bugs:
        with planted(bug):
            found.append(sums())
    return found


def sums() -> list[bool]:
    return [all(test_donated_reduce.reduced(numel, torch.float32)) for numel in (3, 700_001)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_transport_with_a_bug_breaks_the_law(ranks: int) -> None:
    sound, *broken = zip(*comm.spawn(with_bugs, world_size=ranks), strict=True)
    assert all(all(rank) for rank in sound)
    assert all(not all(map(all, ranks)) for ranks in broken)


@pytest.mark.parametrize(
    ("law", "bug"),
    [
        (
            test_bruck.test_it_is_all_gather_in_fewer_messages,
            Bug("ledgers count whole rounds", "comm.algorithms.bruck:_in_one_call", "min(have, group.size - have)", "have"),
        ),
        (
            test_donated_reduce.test_a_donated_value_has_no_graph,
            Bug(
                "a graph is cut",
                "comm.api:all_reduce",
                "any((room.requires_grad for room in rooms))",
                "False",
                shows=pytest.fail.Exception,
            ),
        ),
        (
            test_cut_pipelines.test_attention_of_a_ranks_own_positions,
            Bug(
                "stages are not asked",
                "transforms.parallel.sequence:_SequenceParallel.check_stages",
                "not step.sum_over_ranks(state, asks).item()",
                "False",
            ),
        ),
    ],
)
def test_a_bug_breaks_its_law(law: Callable[[], None], bug: Bug) -> None:
    law()
    with planted(bug), pytest.raises(bug.shows):
        law()
