"""``Action``: one thing that a rank does in a pipelined step; and packed actions, one 64-bit integer each.

A schedule of thousands of ranks has millions of actions, so it holds arrays of packed ones.
"""

import re
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[np.int64]

ALL = -1  # the micro-batch of actions on a stage's parameters


class Kind(IntEnum):
    """What an action does with its stage. ``F``, ``I``, ``W`` and ``B`` compute; the others move data.

    ``F``: forward. ``I``: backward for the inputs' gradients. ``W``: backward for the weights' gradients, after ``I``. ``B``:
    both in one. ``SEND_F``, ``RECV_F``: activations, to the next stage and from the previous one. ``SEND_B``, ``RECV_B``:
    gradients, to the previous stage and from the next one. ``GATHER``: gathers a stage's sharded parameters. ``EVICT``: frees
    them again. ``REDUCE``: reduces a stage's gradients over the ranks that share it.

    >>> Kind["SEND_F"], str(Action(Kind.B, 1, 2))
    (<Kind.SEND_F: 4>, '1B2')
    """

    F = 0
    I = 1  # noqa: E741  (the literature's letters)
    W = 2
    B = 3
    SEND_F = 4
    RECV_F = 5
    SEND_B = 6
    RECV_B = 7
    GATHER = 8
    EVICT = 9
    REDUCE = 10

    def __str__(self) -> str:
        return self.name


COMPUTE = (Kind.F, Kind.I, Kind.W, Kind.B)
MESSAGES = (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)

_CELL = re.compile(rf"(\d+)({'|'.join(sorted(Kind.__members__, key=len, reverse=True))})(\d*)")


class Action(NamedTuple):
    """An action of a schedule, on one stage and one micro-batch.

    Attributes:
        kind: what it does.
        stage: the stage's number.
        microbatch: the micro-batch's number; ``ALL`` (-1) for gather, evict and reduce.

    >>> Action(Kind.F, 0, 3), Action.of("1SEND_B2") == Action(Kind.SEND_B, 1, 2)
    (0F3, True)
    """

    kind: Kind
    stage: int
    microbatch: int = ALL

    def __repr__(self) -> str:
        return f"{self.stage}{self.kind.name}{self.microbatch if self.microbatch >= 0 else ''}"

    def __str__(self) -> str:
        return repr(self)

    @staticmethod
    def of(text: str) -> "Action":
        """The action that is written as stage, kind, micro-batch: ``0F3``, ``2RECV_F0``, ``1GATHER``.

        Raises:
            ValueError: the text has another form, or a number is too large to be packed.
        """
        match = _CELL.fullmatch(text)
        if match is None or (match[3] == "") == (Kind[match[2]] < Kind.GATHER):
            kinds = ", ".join(Kind.__members__)
            raise ValueError(
                f"{text!r} is not an action: write stage, kind, micro-batch, as in 0F3 or 1GATHER; kinds are {kinds}"
            )
        made = Action(Kind[match[2]], int(match[1]), int(match[3]) if match[3] else ALL)
        if made.stage >= MOST_STAGES or made.microbatch >= MOST_MICROBATCHES:
            raise ValueError(
                f"{text!r} is out of range: stages are 0 to {MOST_STAGES - 1}, micro-batches 0 to {MOST_MICROBATCHES - 1}"
            )
        return made


# -- packed: 4 bits of kind, 20 of stage, 24 of micro-batch + 1 ----------------------------------------------------------

_STAGE, _KIND = 24, 44
MOST_STAGES, MOST_MICROBATCHES = 1 << (_KIND - _STAGE), (1 << _STAGE) - 1
_KINDS = tuple(Kind)


def pack(kind: Kind | Codes, stage: int | Codes, microbatch: int | Codes) -> Codes:
    """Packs actions; arrays and numbers broadcast."""
    packed = (np.asarray(kind, np.int64) << _KIND) | (np.asarray(stage, np.int64) << _STAGE)
    return np.atleast_1d(packed | (np.asarray(microbatch, np.int64) + 1))


def kinds(codes: Codes) -> Codes:
    """The kinds of packed actions."""
    return codes >> _KIND


def stages(codes: Codes) -> Codes:
    """The stages of packed actions."""
    return (codes >> _STAGE) & (MOST_STAGES - 1)


def microbatches(codes: Codes) -> Codes:
    """The micro-batches of packed actions."""
    return (codes & MOST_MICROBATCHES) - 1


def unpack(codes: Codes) -> tuple[Action, ...]:
    """Packed actions as records."""
    columns = kinds(codes).tolist(), stages(codes).tolist(), microbatches(codes).tolist()
    return tuple(Action(_KINDS[k], s, j) for k, s, j in zip(*columns, strict=True))


def packed(actions: Sequence[Action]) -> Codes:
    """Packs records.

    Raises:
        ValueError: a stage or a micro-batch is negative, or too large to be packed.
    """
    for place, (kind, stage, microbatch) in enumerate(actions):
        held = 0 <= stage < MOST_STAGES and ALL <= microbatch < MOST_MICROBATCHES
        if not held or (microbatch == ALL) != (kind >= Kind.GATHER):
            raise ValueError(
                f"place {place}: {kind.name} with stage={stage}, microbatch={microbatch}; stages are 0 to {MOST_STAGES - 1}, "
                f"micro-batches 0 to {MOST_MICROBATCHES - 1}, or ALL ({ALL}) for gather, evict and reduce"
            )
    flat = np.array(actions, np.int64).reshape(-1, 3)
    return pack(flat[:, 0], flat[:, 1], flat[:, 2])
