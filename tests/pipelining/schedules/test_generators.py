"""Law 32 for every generator, and what bounds what is in flight."""

import numpy as np
import pytest

from functional_ds.pipelining import (
    Kind,
    Schedule,
    breadth_first,
    by_name,
    dualpipe_v,
    gpipe,
    in_flight,
    inference,
    interleaved_one_f_one_b,
    one_f_one_b,
    stage_to_rank,
    validate,
    zb_2p,
    zb_h1,
    zbv,
)
from tests.pipelining.cases import SIZES, everyone


def flows(schedule: Schedule, *, training: bool) -> None:
    """Law 32 by brute force: one action at a time, whichever rank can go on."""
    done: set[tuple[str, int, int]] = set()
    rows, last = [list(row) for row in schedule], schedule.stages - 1
    while any(rows):
        before = len(done)
        for rank, row in enumerate(rows):
            while row:
                kind, stage, j = row[0]
                needs = {
                    Kind.F: [("forward", stage - 1, j)] if stage else [],
                    Kind.W: [("input", stage, j)],
                }.get(kind, [("forward", stage, j)] + ([("input", stage + 1, j)] if stage < last else []))
                if not done.issuperset(needs):
                    break
                made = {Kind.F: ["forward"], Kind.I: ["input"], Kind.W: ["weight"], Kind.B: ["input", "weight"]}[kind]
                for what in made:
                    assert (what, stage, j) not in done
                    done.add((what, stage, j))
                assert schedule.placement[stage] == rank
                row.pop(0)
        assert len(done) > before, "nobody can go on"
    assert len(done) == schedule.stages * schedule.microbatches * (3 if training else 1)


@pytest.mark.law(32)
def test_data_flows_in_every_schedule() -> None:
    """Law 32, for all p <= 5, m <= 11, v <= 3."""
    for p in range(1, 6):
        for m in range(1, 12):
            for schedule in everyone(p, m):
                flows(schedule, training=True)
            for v in (1, 2, 3):
                flows(inference(p, m, v=v), training=False)


@pytest.mark.law(35)
def test_in_flight() -> None:
    """Law 35, for all p <= 16, m <= 64: m; min(p - s, m); min(m v, 2 (p - s - 1) + (v - 1) p + 1); p; 2 p - 1; 2 p chunks."""
    for p, m in SIZES:
        ranks = range(p)
        assert in_flight(gpipe(p, m)) == (m,) * p
        assert in_flight(one_f_one_b(p, m)) == tuple(min(p - s, m) for s in ranks)
        assert in_flight(zb_h1(p, m)) == (min(p, m),) * p
        assert in_flight(zb_2p(p, m)) == (min(2 * p - 1, m),) * p
        assert max(in_flight(zbv(p, m))) == 2 * min(p, m)
        if m % p == 0:
            for v in (1, 2, 3):
                expected = tuple(min(m * v, 2 * (p - s - 1) + (v - 1) * p + 1) for s in ranks)
                assert in_flight(interleaved_one_f_one_b(p, m, v=v)) == expected
        if m <= 8:
            assert in_flight(breadth_first(p, m, v=2)) == (2 * m,) * p
        if m == max(2 * p, 40):
            assert max(in_flight(dualpipe_v(p, m))) == 2 * p + 1


def test_named_are_the_generators_for_a_placement() -> None:
    """Each places its stages as asked; a placement that none has gives none."""
    for placement in (stage_to_rank(4), stage_to_rank(4, 3), stage_to_rank(4, 2), stage_to_rank(4, 2, "v"), (0, 1, 2, 3, 2)):
        found = by_name(4, 8, placement)
        assert all(validate(schedule).placement == placement for schedule in found.values())
        assert len(found) == (0 if len(placement) == 5 else 4 if len(placement) == 4 else 2)


@pytest.mark.parametrize("generator", [inference, gpipe, one_f_one_b, interleaved_one_f_one_b, zb_h1, zb_2p, zbv, dualpipe_v])
@pytest.mark.parametrize(("p", "m", "message"), [(0, 4, "p=0"), (2, 0, "m=0"), (-1, 4, "p=-1")])
def test_sizes_that_no_schedule_has(generator, p: int, m: int, message: str) -> None:
    """They are refused by name."""
    with pytest.raises(ValueError, match=message):
        generator(p, m)


@pytest.mark.parametrize("generator", [inference, gpipe, one_f_one_b, interleaved_one_f_one_b, zb_h1, zb_2p, zbv, dualpipe_v])
def test_sizes_are_ints(generator) -> None:
    """What comes of a division is refused by name; numpy's are as good as Python's."""
    with pytest.raises(TypeError, match=r"m=4\.0: a number of micro-batches is an int, not a float"):
        generator(2, 8 / 2)
    with pytest.raises(TypeError, match=r"p=2\.5: a number of ranks is an int"):
        generator(2.5, 4)
    assert generator(np.int64(2), np.int64(4)) == generator(2, 4)


def test_too_few_microbatches() -> None:
    """The refusal says how many it takes, and what takes fewer."""
    with pytest.raises(ValueError, match=r"m=7: dualpipe_v on p=4 ranks needs at least 2 p = 8 micro-batches; zbv takes fewer"):
        dualpipe_v(4, 7)
    with pytest.raises(ValueError, match="v=0"):
        breadth_first(2, 2, v=0)
