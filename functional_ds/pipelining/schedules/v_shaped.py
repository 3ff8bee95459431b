"""Schedules whose stages go down the ranks and up again: rank r of p holds stages r and 2 p - 1 - r.

So the last rank sends itself nothing, the first rank holds both ends of the model, and all ranks have the same number of
micro-batches in flight.
"""

from collections import deque

import numpy as np

from .action import Action, Codes, Kind, microbatches, pack, packed
from .generators import check, weave
from .schedule import Schedule, stage_to_rank


def zbv(p: int, m: int) -> Schedule:
    """Zero bubbles with 1F1B's memory: split backwards, and two chunks a rank in a V.

    ::

        |F0F1F2f0i0w0f1i1w1F3I0W0f2i2w2F4I1W1f3i3w3I2W2f4i4w4I3W3I4W4..|
        |..F0f0F1f1i0w0F2I0W0f2i1w1F3I1W1f3i2w2F4I2W2f4i3w3I3i4I4W3w4W4|

    Capitals are the first chunk, small letters the second.

    Makespan, unit times, m >= 2 p - 1: 6 m + p - 1 in chunk times, without gaps on any rank. In flight: 2 p chunks at most,
    the activations of p micro-batches of a whole rank's layers.

    Source: Qi et al. 2024, Pipeline parallelism with controllable memory; the V is there in Qi et al. 2023 too.

    Raises:
        ValueError: fewer than one rank or micro-batch.

    >>> print(zbv(1, 2))
    2 stages on 1 ranks, 2 micro-batches
    rank 0: 0F0 1F0 1I0 1W0 0F1 0I0 0W0 1F1 1I1 1W1 0I1 0W1
    """
    check(p, m, 2)
    n = max(m, 2 * p - 1)  # below that, the order is that of 2 p - 1 with the last ones left out
    every = np.arange(n)
    rows = []
    for rank in range(p):
        down, up = rank, 2 * p - 1 - rank
        f, i, w = (pack(kind, down, every) for kind in (Kind.F, Kind.I, Kind.W))
        F, I, W = (pack(kind, up, every) for kind in (Kind.F, Kind.I, Kind.W))  # noqa: E741
        first = 2 * (p - rank) - 1
        ahead, back = first + rank, p - rank  # forwards of the first chunk, backwards of the second, when rounds begin
        full = n - ahead  # rounds in which all six are there; then `first` chunk's forwards are over
        rounds = n - p
        row = np.concatenate(
            [
                f[:first],
                weave(F[:rank], f[first:ahead]),
                weave(F[rank:p], I[:back], W[:back]),
                weave(f[ahead:], i[:full], w[:full], *(x[at : at + full] for x, at in ((F, p), (I, back), (W, back)))),
                weave(i[full:rounds], w[full:rounds], F[p + full :], I[back + full : n - rank], W[back + full : n - rank]),
                weave(i[rounds : rounds + rank], I[n - rank :]),
                weave(i[rounds + rank :], w[rounds : n - rank]),
                W[n - rank :],
                w[n - rank :],
            ]
        )
        rows.append(row[microbatches(row) < m] if m < n else row)
    return Schedule(rows, stage_to_rank(p, 2, "v"), m)


class _RowBuilder:
    """A rank's row as it grows. A stage's forwards and backwards take its next micro-batch; backwards for weights may wait."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.counts: dict[tuple[Kind, int], int] = {}
        self.waiting: deque[Action] = deque()

    def _next(self, kind: Kind, stage: int) -> int:
        self.counts[kind, stage] = self.counts.get((kind, stage), -1) + 1
        return self.counts[kind, stage]

    def forward(self, stage: int) -> None:
        """Appends a stage's next forward."""
        self.actions.append(Action(Kind.F, stage, self._next(Kind.F, stage)))

    def backward(self, stage: int, *, split: bool = False) -> None:
        """Appends a stage's next backward; with ``split`` the backward for inputs, and the one for weights waits."""
        microbatch = self._next(Kind.B, stage)
        self.actions.append(Action(Kind.I if split else Kind.B, stage, microbatch))
        if split:
            self.waiting.append(Action(Kind.W, stage, microbatch))

    def weights(self) -> None:
        """Appends the backward for weights that waits longest, if any."""
        if self.waiting:
            self.actions.append(self.waiting.popleft())


def dualpipe_v(p: int, m: int) -> Schedule:
    """DualPipe cut in half: two chunks a rank in a V, a forward of one paired with a backward of the other.

    In its main part each rank alternates a forward of one chunk and a full backward of the other. A runtime that computes both
    at the same time hides the messages of one behind the arithmetic of the other. Backwards are split only while the pipeline
    fills and drains.

    Makespan, unit times: 6 m + p - 1 in chunk times, the minimum, since the last rank starts p - 1 late; rank r has gaps of
    p - 1 - r in all. In flight: 2 p + 1 chunks at most.

    Source: DeepSeek-AI 2024, DeepSeek-V3 technical report, and its DualPipe; cut in half: Sea AI Lab 2025.

    Raises:
        ValueError: fewer than one rank, or fewer micro-batches than stages, 2 p.

    >>> print(dualpipe_v(1, 3))
    2 stages on 1 ranks, 3 micro-batches
    rank 0: 0F0 1F0 0F1 1B0 1F1 0B0 0F2 1B1 1F2 0B1 1B2 0I2 0W2
    """
    check(p, m, 2)
    if m < 2 * p:
        raise ValueError(f"m={m}: dualpipe_v on p={p} ranks needs at least 2 p = {2 * p} micro-batches; zbv takes fewer")
    return Schedule([_dualpipe_row(p, m, rank) for rank in range(p)], stage_to_rank(p, 2, "v"), m)


def _dualpipe_row(p: int, m: int, rank: int) -> Codes:
    row, down, up, below = _RowBuilder(), rank, 2 * p - 1 - rank, p - 1 - rank
    for _ in range(2 * below):
        row.forward(down)
    for _ in range(rank + 1):
        row.forward(down)
        row.forward(up)
    for _ in range(below):
        row.backward(up, split=True)
        row.weights()
        row.forward(up)
    for turn in range(m - p):  # the main part; the first chunk's forwards end before the second's
        if turn < m - 2 * p + rank + 1:
            row.forward(down)
        row.backward(up)
        row.forward(up)
        row.backward(down)
    for turn in range(2 * (rank + 1)):  # the first chunk's backwards are even turns' followers
        row.backward(down if turn % 2 else up, split=turn > rank)
    for _ in range(below):
        row.weights()
        row.backward(down, split=True)
    while row.waiting:
        row.weights()
    return packed(row.actions)
