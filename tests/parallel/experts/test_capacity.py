"""Law 52: what capacity drops, in groups of fixed rows, depends on no partition."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_ds import comm, moe
from tests.parallel.experts.oracle import numbers

TOKENS, E, ROWS = 24, 5, 4


def expected(routing: moe.Routing, limit: int, drop: str) -> list[list[bool]]:
    """One choice after the other, in the order of their claims."""
    found = [[False] * routing.experts.shape[1] for _ in routing.experts]
    for start in range(0, TOKENS, ROWS):
        choices = [(t, j) for t in range(start, start + ROWS) for j in range(routing.experts.shape[1])]
        if drop == "probability":
            choices.sort(key=lambda c: -float(routing.weights[c]))
        taken: Counter[int] = Counter()
        for t, j in choices:
            expert = int(routing.experts[t, j])
            taken[expert] += 1
            found[t][j] = taken[expert] <= limit
    return found


@pytest.mark.law(52)
@given(
    k=st.integers(1, 3),
    factor=st.sampled_from((0.4, 1.0, 1.7, 5.0)),
    drop=st.sampled_from(("position", "probability")),
    parts=st.sampled_from((1, 2, 3, 6)),
    seed=st.integers(0, 100),
)
def test_dropping_is_by_groups_whatever_the_partition(k: int, factor: float, drop: Any, parts: int, seed: int) -> None:
    """On the whole batch as the loop says; on each of several parts the same."""
    logits, capacity = numbers(TOKENS, E, seed=seed), moe.Capacity(factor, rows=ROWS, drop=drop)
    whole = moe.route(logits, k, capacity=capacity)
    assert whole.kept is not None
    assert whole.limit == capacity.limit(k, E)
    assert whole.kept.tolist() == expected(whole, capacity.limit(k, E), drop)
    cut = [moe.route(rows, k, capacity=capacity).kept for rows in logits.chunk(parts)]
    assert torch.equal(torch.cat([kept for kept in cut if kept is not None]), whole.kept)


@pytest.mark.law(52)
@pytest.mark.parametrize("way", ["all_to_all", "gather"])
def test_with_capacity_ranks_are_one_device(way: Any) -> None:
    """The mixture on 1, 2 and 3 ranks, with tokens dropped."""
    logits, x, scale = numbers(TOKENS, 6), numbers(TOKENS, 3, seed=1), torch.arange(1.0, 7.0, dtype=torch.float64)

    def program() -> Any:
        group = comm.world()
        routing = moe.route(logits.chunk(group.size)[group.rank], 2, capacity=moe.Capacity(0.9, rows=ROWS))
        mine = scale.chunk(group.size)[group.rank]
        return moe.exchange(
            lambda rows, groups: rows * mine[groups.expert_of_row(len(rows)).long()][:, None],
            x.chunk(group.size)[group.rank],
            routing=routing,
            group=group,
            way=way,
        )

    whole = torch.cat(comm.simulate(program, world_size=1))
    for ranks in (2, 3):
        assert torch.allclose(torch.cat(comm.simulate(program, world_size=ranks)), whole)


def test_what_a_capacity_cannot_be() -> None:
    for arguments, words in (
        ({"factor": 0.0, "rows": 2}, "factor=0.0"),
        ({"factor": 1.0, "rows": 0}, "rows=0"),
        ({"factor": 1.0, "rows": 2.5}, "rows=2.5: an integer above 0"),
        ({"factor": 1.0, "rows": 2, "drop": "late"}, "drop='late': one of 'error'"),
    ):
        with pytest.raises(ValueError, match=words):
            moe.Capacity(**arguments)
    assert moe.Capacity(1.0, rows=3) == moe.Capacity(1.0, rows=3)


def test_no_tokens_overflow_nothing() -> None:
    found = moe.route(torch.zeros(0, 4), 2, capacity=moe.Capacity(1.0, rows=3, drop="error"))
    assert found.check().load().tolist() == [0, 0, 0, 0]
