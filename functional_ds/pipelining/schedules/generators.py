"""Schedules whose stages go down the ranks, once or in a loop.

The pictures are those of ``text(timeline(...))``: a line for each rank, two columns for each unit of time, dots where the rank
is idle. F is a forward, B a backward (two units), I and W its halves, each with its micro-batch. Bubble: the idle fraction of
the makespan, if all stages take equally long and messages take no time. In flight: the micro-batches (with several chunks, the
pairs of micro-batch and chunk) that a rank has forwarded and whose backward is not complete there.

Each function takes p ranks and m micro-batches and returns a schedule. The executor runs any schedule.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from numbers import Integral
from typing import Any

import numpy as np

from .action import MOST_MICROBATCHES, MOST_STAGES, Codes, Kind, pack
from .schedule import Schedule, stage_to_rank


def check(p: Any, m: Any, v: Any = 1) -> None:
    """Raises an error for sizes that no schedule has.

    Args:
        p: ranks.
        m: micro-batches.
        v: chunks on each rank.
    """
    for name, value, what, most in (
        ("p", p, "ranks", MOST_STAGES // max(v, 1)),
        ("m", m, "micro-batches", MOST_MICROBATCHES - 1),
        ("v", v, "chunks on each rank", MOST_STAGES),
    ):
        if not isinstance(value, Integral):
            raise TypeError(f"{name}={value!r}: a number of {what} is an int, not a {type(value).__name__}")
        if not 1 <= int(value) <= most:
            raise ValueError(f"{name}={value!r}: a schedule has 1 to {most} {what}")


def weave(*columns: Codes) -> Codes:
    """One of each column in turn; all columns have the same length."""
    return np.stack(columns, axis=1).ravel()


def _single(p: int, m: int, row: Callable[[int, Callable[[Kind], Codes]], Sequence[Codes]]) -> Schedule:
    """A schedule with one stage a rank; ``row(rank, codes)`` gives a rank's row in pieces, ``codes(kind)`` all its actions."""
    every = np.arange(m)
    rows = [np.concatenate(row(rank, lambda kind, rank=rank: pack(kind, rank, every))) for rank in range(p)]  # type: ignore[misc]
    return Schedule(rows, range(p), m)


def inference(p: int, m: int, *, v: int = 1) -> Schedule:
    """Forwards only. Micro-batches go in groups of p through all of a rank's v chunks before the next group comes.

    ::

        |F0F1F2F3....|
        |..F0F1F2F3..|
        |....F0F1F2F3|

    Makespan: (m v + p - 1) tF in chunk times, if p divides m or v = 1. Bubble: (p - 1) / (m v + p - 1).

    Args:
        p: ranks.
        m: micro-batches.
        v: chunks on each rank.

    Raises:
        ValueError: fewer than one rank, micro-batch or chunk.

    >>> print(inference(2, 3))
    2 stages on 2 ranks, 3 micro-batches
    rank 0: 0F0 0F1 0F2
    rank 1: 1F0 1F1 1F2
    """
    check(p, m, v)
    chunk, microbatch = _virtual(_groups(p, m), v)
    return Schedule([pack(Kind.F, chunk * p + rank, microbatch) for rank in range(p)], stage_to_rank(p, v), m)


def gpipe(p: int, m: int) -> Schedule:
    """All forwards, then all backwards.

    ::

        |F0F1F2F3......B0--B1--B2--B3--|
        |..F0F1F2F3B0--B1--B2--B3--....|

    Makespan: (m + p - 1) (tF + tB). Bubble: (p - 1) / (m + p - 1). In flight: m.

    Source: Huang et al. 2019, GPipe.

    Raises:
        ValueError: fewer than one rank or micro-batch.

    >>> print(gpipe(2, 2))
    2 stages on 2 ranks, 2 micro-batches
    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1F1 1B0 1B1
    """
    check(p, m)
    return _single(p, m, lambda rank, codes: (codes(Kind.F), codes(Kind.B)))


def one_f_one_b(p: int, m: int) -> Schedule:
    """One forward, one backward, after a warm-up of as many forwards as there are later stages.

    ::

        |F0F1F2........B0--F3B1--F4B2--..B3--..B4--|
        |..F0F1....B0--F2B1--F3B2--F4B3--..B4--....|
        |....F0B0--F1B1--F2B2--F3B3--F4B4--........|

    Makespan: (m + p - 1) (tF + tB). Bubble: (p - 1) / (m + p - 1). In flight: min(p - s, m) on rank s.

    Source: PipeDream-Flush, Narayanan et al. 2021, Memory-efficient pipeline-parallel DNN training.

    Raises:
        ValueError: fewer than one rank or micro-batch.

    >>> print(one_f_one_b(2, 3))
    2 stages on 2 ranks, 3 micro-batches
    rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
    rank 1: 1F0 1B0 1F1 1B1 1F2 1B2
    """
    check(p, m)

    def row(rank: int, codes: Callable[[Kind], Codes]) -> Sequence[Codes]:
        ahead = min(p - 1 - rank, m)
        forward, backward = codes(Kind.F), codes(Kind.B)
        return forward[:ahead], weave(forward[ahead:], backward[: m - ahead]), backward[m - ahead :]

    return _single(p, m, row)


# -- several chunks a rank, in a loop -----------------------------------------------------------------------------------


def _groups(p: int, m: int) -> list[int]:
    """How many micro-batches go through a chunk before the rank turns to the next: p, or more if p does not divide m.

    Fewer would not keep p ranks busy, and a short last group can deadlock.
    """
    count = max(1, m // p)
    return [m // count + (group < m % count) for group in range(count)]


def _virtual(groups: Sequence[int], v: int, *, backwards: bool = False) -> tuple[Codes, Codes]:
    """Chunk and micro-batch of each visit, group by group."""
    chunks, microbatches, first = [], [], 0
    for size in groups:
        chunks.append(np.repeat(np.arange(v)[:: -1 if backwards else 1], size))
        microbatches.append(np.tile(np.arange(first, first + size), v))
        first += size
    return np.concatenate(chunks), np.concatenate(microbatches)


def interleaved_one_f_one_b(p: int, m: int, *, v: int = 2) -> Schedule:
    """1F1B with v chunks of the model on each rank, p stages apart: a v-th of the bubble for v times the messages.

    Makespan, p divides m: (m v + p - 1) (tF + tB) in chunk times. Bubble: (p - 1) / (m v + p - 1). In flight on rank s, p
    divides m: min(m v, 2 (p - s - 1) + (v - 1) p + 1) chunks.

    p need not divide m: then micro-batches go through the chunks in groups of almost equal sizes, at least p.

    Source: Narayanan et al. 2021, Efficient large-scale language model training on GPU clusters using Megatron-LM.

    Args:
        p: ranks.
        m: micro-batches.
        v: chunks on each rank.

    Raises:
        ValueError: fewer than one rank, micro-batch or chunk.

    >>> print(interleaved_one_f_one_b(2, 2, v=2))
    4 stages on 2 ranks, 2 micro-batches
    rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    rank 1: 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """
    check(p, m, v)
    groups, visits = _groups(p, m), m * v
    chunk, microbatch = _virtual(groups, v)
    chunk_back, microbatch_back = _virtual(groups, v, backwards=True)
    rows = []
    for rank in range(p):
        ahead = min(visits, 2 * (p - 1 - rank) + (v - 1) * groups[0])
        forward = pack(Kind.F, chunk * p + rank, microbatch)
        backward = pack(Kind.B, chunk_back * p + rank, microbatch_back)
        both = weave(forward[ahead:], backward[: visits - ahead])
        rows.append(np.concatenate([forward[:ahead], both, backward[visits - ahead :]]))
    return Schedule(rows, stage_to_rank(p, v), m)


def breadth_first(p: int, m: int, *, v: int = 2) -> Schedule:
    """All micro-batches through a rank's first chunk, then all through its second, and so on; backwards in reverse.

    A rank uses each chunk's parameters in two stretches, so sharded parameters are gathered twice a step.

    Makespan, m >= p: (m v + p - 1) (tF + tB) in chunk times. Bubble: (p - 1) / (m v + p - 1). In flight: m v chunks.

    Source: Lamy-Poirier 2023, Breadth-first pipeline parallelism.

    Args:
        p: ranks.
        m: micro-batches.
        v: chunks on each rank.

    Raises:
        ValueError: fewer than one rank, micro-batch or chunk.

    >>> print(breadth_first(2, 2, v=2))
    4 stages on 2 ranks, 2 micro-batches
    rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    rank 1: 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
    """
    check(p, m, v)
    chunk, microbatch = _virtual([m], v)
    rows = [
        np.concatenate([pack(Kind.F, chunk * p + rank, microbatch), pack(Kind.B, chunk[::-1] * p + rank, microbatch)])
        for rank in range(p)
    ]
    return Schedule(rows, stage_to_rank(p, v), m)


# -- zero bubble --------------------------------------------------------------------------------------------------------


def _zero_bubble(p: int, m: int, ahead: Callable[[int], int], behind: Callable[[int], int]) -> Schedule:
    """A warm-up of forwards, then rounds of F, I, W: on a rank, F is ``ahead`` micro-batches before I, W ``behind`` it."""

    def parts(rank: int, codes: Callable[[Kind], Codes]) -> Iterator[Codes]:
        lead, lag = min(ahead(rank), m), min(behind(rank), m)
        forward, inputs, weights = codes(Kind.F), codes(Kind.I), codes(Kind.W)
        yield forward[:lead]
        bounds = sorted({0, lag, m - lead, m, m + lag})  # between two of these rounds the same kinds of actions occur
        for start, stop in pairwise(bounds):
            columns = []
            if stop <= m - lead:
                columns.append(forward[lead + start : lead + stop])
            if stop <= m:
                columns.append(inputs[start:stop])
            if start >= lag:
                columns.append(weights[start - lag : stop - lag])
            yield weave(*columns)

    return _single(p, m, lambda rank, codes: list(parts(rank, codes)))


def zb_h1(p: int, m: int) -> Schedule:
    """1F1B with split backwards: the backwards for weights fill the wait for gradients at the end.

    ::

        |F0F1F2....I0W0F3I1W1F4I2W2I3W3I4W4|
        |..F0F1..I0F2I1W0F3I2W1F4I3W2I4W3W4|
        |....F0I0F1I1F2I2W0F3I3W1F4I4W2W3W4|

    Makespan, unit times, m >= p: 3 m + p - 1, a third of 1F1B's bubble. In flight: p at most, as 1F1B's first rank.

    Source: Qi et al. 2023, Zero bubble pipeline parallelism.

    Raises:
        ValueError: fewer than one rank or micro-batch.

    >>> print(zb_h1(2, 3))
    2 stages on 2 ranks, 3 micro-batches
    rank 0: 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    rank 1: 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    check(p, m)
    return _zero_bubble(p, m, lambda rank: p - 1 - rank, lambda rank: rank)


def zb_2p(p: int, m: int) -> Schedule:
    """A warm-up of twice as many forwards as ZB-H1: no rank is idle between its first action and its last.

    ::

        |F0F1F2F3F4I0W0F5I1W1F6I2W2I3W3I4W4I5W5I6W6....|
        |..F0F1F2I0F3I1F4I2W0F5I3W1F6I4W2I5W3I6W4W5W6..|
        |....F0I0F1I1F2I2F3I3F4I4W0F5I5W1F6I6W2W3W4W5W6|

    Makespan, unit times, m >= 2 p - 1: 3 m + p - 1, and no gaps; the ranks end one after another, as they start. In flight:
    2 p - 1 at most. With fewer micro-batches it is valid, but no better than ZB-H1.

    Source: ZB-H2 and ZB-2p of Qi et al. 2023, Zero bubble pipeline parallelism.

    Raises:
        ValueError: fewer than one rank or micro-batch.

    >>> print(zb_2p(2, 3))
    2 stages on 2 ranks, 3 micro-batches
    rank 0: 0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2
    rank 1: 1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2
    """
    check(p, m)
    return _zero_bubble(p, m, lambda rank: 2 * (p - 1 - rank), lambda rank: 2 * rank)
