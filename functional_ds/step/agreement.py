"""Whether ranks that train together have the same step, compared once before the first message."""

import hashlib
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, Protocol

import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.comm.record.call_recorder import current_recorder

from .fingerprint import Entry, described, without_names
from .phases import Layer

__all__ = ["check_same_step", "entries", "noting_first_step", "warn_of_lone_ranks"]

_LONGEST = 400  # characters of what a rank has, in a message


class Composed(Protocol):
    """The part of a step that ranks compare."""

    @property
    def layers(self) -> tuple[Layer, ...]: ...
    @property
    def options(self) -> Mapping[str, Any]: ...
    @property
    def buffers(self) -> str: ...
    @property
    def skips_unused(self) -> bool: ...


def entries(step: Composed) -> dict[str, Entry]:
    """What all ranks of a step must have alike, by name.

    Neither the loss nor the batch is among it: these may be a rank's own, as may the names of groups.

    >>> import functional_ds as fds
    >>> from functional_ds import transforms as T
    >>> step = fds.compose(T.accumulate(2), T.clip(1.0))(fds.train_step(lambda params, x: x.sum(), fds.sgd(0.1)))
    >>> print(entries(step)["transforms"])
    accumulate(2) -> clip(1.0)
    """
    groups = _groups(step)
    layers = [_of_layer(layer, groups) for layer in step.layers]
    return {
        "functional_ds": Entry(version("functional-ds")),
        "torch": Entry(torch.__version__.partition("+")[0]),
        **{name: Entry(str(value), described(value)) for name, value in step.options.items()},
        "buffers": Entry(repr(step.buffers)),
        "unused": Entry(repr("skip" if step.skips_unused else "zeros")),
        "transforms": Entry(" -> ".join(map(str, layers)) or "none", " ".join(layer.exact for layer in layers)),
    }


def _of_layer(layer: Layer, groups: Sequence[comm.Group]) -> Entry:
    if layer.options is None:
        return Entry(without_names(layer.name, groups))
    name = layer.name.partition("(")[0]
    shown = (f"{option}={getattr(value, '__name__', None) or value}" for option, value in layer.options.items())
    return Entry(f"{name}({', '.join(shown)})", described(layer.options))


def _groups(step: Composed) -> list[comm.Group]:
    """The groups of its transforms that have this rank and others, each once, in the order of the transforms."""
    given = [comm.world() if group is None else group for layer in step.layers for group in layer.groups]
    return list({group.ranks: group for group in given if group.size > 1 and group.rank >= 0}.values())


def check_same_step(step: Composed) -> None:
    """Refuses steps that differ among the ranks that train together: those of the groups of the transforms, along all axes.

    Cost: one all-reduce of 16 bytes a group, on its channel "control"; the texts, where they differ.

    Raises:
        ValueError: on all ranks: names what differs, and which ranks have what.
    """
    groups = _groups(step)
    if not groups:
        return
    mine, channels = entries(step), [group.channel("control") for group in groups]
    number = int.from_bytes(hashlib.sha256(repr(mine).encode()).digest()[:7], "big")
    least: Tensor = torch.tensor([number, -number], device=channels[0].world.device)
    for channel in channels:
        channel.world.agreed(f"a step of {mine['optimizer']} with {mine['transforms']} ({number:x})", channel)
        least = comm.all_reduce(least, channel, op="min")  # over one axis after the other: over the whole mesh
    low, high = least.tolist()
    if low == -high:
        return
    told = {groups[0].ranks[groups[0].rank]: mine}
    for channel in channels:
        for others in comm.all_gather_object(told, channel):
            told |= others
    raise ValueError(f"init: ranks that train together have different steps. {_differences(told)}. {_MEND}")


@contextmanager
def noting_first_step(step: Composed, *, is_first: bool) -> Iterator[comm.Ledger | None]:
    """Counts what a first step sends; None where it need not: a transform has a group, or there is nobody to send to."""
    here = comm.world()
    counts = is_first and here.size > 1 and here.rank == 0 and not any(layer.groups for layer in step.layers)
    if not counts or comm.is_symmetric(here) or current_recorder() is not None:
        yield None
        return
    with comm.ledger() as sent:
        yield sent


def warn_of_lone_ranks(step: Composed, sent: comm.Ledger | None) -> None:
    """Warns of a first step that has sent nothing, so that each rank trains a model of its own; one rank says so."""
    if sent is None or any(len(row.ranks) > 1 for row in sent.rows):
        return
    warnings.warn(
        f"{step}: the first step has sent nothing between the {comm.world().size} ranks, so each trains a model by itself, on "
        "its own batches: compose T.zero(0), which sums gradients over the ranks. If that is what you want, say so by a group "
        "of one rank, T.zero(0, comm.new_group([comm.world().rank])), or ignore this warning",
        stacklevel=3,
    )


_MEND = "Compose the same step on every rank, and choose by rank only what a batch or a loss is made of"


def _differences(told: Mapping[int, Mapping[str, Entry]]) -> str:
    lines = []
    for name in dict.fromkeys(name for entry in told.values() for name in entry):
        having: dict[Entry | None, list[int]] = {}
        for rank in sorted(told):
            having.setdefault(told[rank].get(name), []).append(rank)
        if len(having) > 1:
            alike = len({entry and entry.shown for entry in having}) == 1
            texts = _shortened(["none" if entry is None else entry.exact if alike else entry.shown for entry in having])
            lines.append(f"{name}: {'; '.join(map(_having, having.values(), texts))}")
    return ". ".join(lines)


def _having(ranks: Sequence[int], text: str) -> str:
    return f"rank {ranks[0]} has {text}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have {text}"


def _shortened(texts: Sequence[str]) -> list[str]:
    """Long texts from shortly before the first place where they differ."""
    if max(map(len, texts)) <= _LONGEST:
        return [*texts]
    common = sum(1 for _ in itertools.takewhile(lambda letters: len({*letters}) == 1, zip(*texts, strict=False)))
    start = max(0, common - _LONGEST // 4)
    return [f"{'...' * bool(start)}{text[start : start + _LONGEST]}{'...' * (len(text) > start + _LONGEST)}" for text in texts]
