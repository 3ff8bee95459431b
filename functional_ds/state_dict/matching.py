"""Which tensor of a checkpoint fills which shard of a state, and how the two differ."""

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Protocol

import attrs
import torch

from functional_ds.sharding.leaf_region import LeafRegion
from functional_ds.step.state.slots import Role

from .describe import TensorShard
from .errors import StructureError

# The forms in which a leaf of the model is stored, the most exact first. A state need not have those of the checkpoint.
FORMS = (Role.MASTER.value, Role.EXACT.value, "params")
_POLICY = (f"{Role.SETTING.value}.*",)  # comes and goes with the precision
_SHOWN = 8


def fits(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name, or the part before its slash or first dot, matches. Masters are named params."""
    role, _, leaf = name.partition("/")
    names = {name, role, role.partition(".")[0]} | ({"params", f"params/{leaf}"} if role in FORMS else set())
    return any(fnmatchcase(candidate, pattern) for candidate in names for pattern in patterns)


@attrs.frozen
class Choice:
    """What a caller wants to load, as patterns of names; see ``load``."""

    only: tuple[str, ...] | None
    allow_missing: tuple[str, ...]
    allow_extra: tuple[str, ...]

    @staticmethod
    def of(only: str | Sequence[str] | None, *, missing: str | Sequence[str], extra: str | Sequence[str]) -> "Choice":
        """From the arguments ``only``, ``allow_missing`` and ``allow_extra`` of ``load``."""
        return Choice(None if only is None else patterns_of(only), patterns_of(missing), patterns_of(extra))

    def check(self, known: Collection[str]) -> None:
        """Raises ValueError if a pattern of ``only`` matches no name, and so would load nothing."""
        for pattern in self.only or ():
            if not any(fits(name, (pattern,)) for name in known):
                raise ValueError(f"only={pattern!r} matches nothing in like, which has {_listed(known)}")

    def wants(self, name: str) -> bool:
        """Whether this name is to be loaded."""
        return self.only is None or fits(name, self.only)


def patterns_of(given: str | Sequence[str]) -> tuple[str, ...]:
    """An argument that is one pattern, or several."""
    return (given,) if isinstance(given, str) else tuple(given)


@attrs.define
class Differences:
    """The names in which a state and a checkpoint differ."""

    missing: set[str] = attrs.field(factory=set)
    extra: set[str] = attrs.field(factory=set)
    other: set[str] = attrs.field(factory=set)

    def add(self, theirs: "Differences") -> None:
        """Adds another rank's differences."""
        self.missing |= theirs.missing
        self.extra |= theirs.extra
        self.other |= theirs.other

    def refuse(self, what: str) -> None:
        """Raises StructureError, which lists the differences, if there are any."""
        lists = [
            ("missing in the checkpoint (allow_missing=... keeps like's values)", self.missing),
            ("in the checkpoint and not in like (allow_extra=... leaves them out)", self.extra),
            ("of another kind", self.other),
        ]
        lines = [f"\n  {title}: {_listed(names)}" for title, names in lists if names]
        if any(name.startswith(f"{Role.ATTRIBUTE.value}.") for name in self.missing | self.extra | self.other):
            lines.append(
                "\n  attributes are what a module's forward has set: give a list that grows a fixed length, or make it a tensor"
            )
        if lines:
            raise StructureError(f"{what} has another structure than like:{''.join(lines)}")


def _listed(names: Collection[str]) -> str:
    shown = sorted(names)[:_SHOWN]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


class StoredShape(Protocol):
    """A tensor of a checkpoint without its values."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def numel(self) -> int: ...
    def holds(self, region: LeafRegion, start: int, stop: int) -> bool: ...


def per_rank_name(name: str, rank: int) -> str:
    """The name of a rank's own value, where ranks have different ones.

    >>> per_rank_name("slots.error", 3)
    'slots.error@3'
    """
    return f"{name}@{rank}"


def match(
    shards: Sequence[TensorShard],
    known: Collection[str],
    *,
    stored: Mapping[str, StoredShape],
    choice: Choice,
    rank: int | None,
) -> tuple[list[str | None], Differences]:
    """For each shard of a state the name of the stored tensor that fills it, or None; and the differences.

    Args:
        shards: this rank's.
        known: the names of all ranks' shards.
        stored: the checkpoint's tensors by name.
        choice: what to load.
        rank: this rank, if the checkpoint was saved by as many ranks, so that each gets its own values back; else None.
    """
    matcher = _Matcher(known, stored, choice, rank)
    sources = [matcher.source(shard) for shard in shards]
    matcher.find_extra()
    return sources, matcher.differences


@attrs.frozen(eq=False)
class _Matcher:
    known: Collection[str]
    stored: Mapping[str, StoredShape]
    choice: Choice
    rank: int | None
    differences: Differences = attrs.field(factory=Differences)
    per_rank: set[str] = attrs.field(init=False)  # names of which each rank saved its own value

    @per_rank.default
    def _per_rank(self) -> set[str]:
        return {base for base, is_per_rank in map(without_rank, self.stored) if is_per_rank}

    def source(self, shard: TensorShard) -> str | None:
        """The name of the tensor that fills a shard; None to leave it. Records differences."""
        if not self.choice.wants(shard.name):
            return None
        name = self.best_form(shard)
        if name not in self.stored and name in self.per_rank:
            if self.rank is None:
                self.leave(shard, "there are other ranks now")
                return None
            name = per_rank_name(name, self.rank)
        there = self.stored.get(name)
        if there is None:
            optional = fits(shard.name, (*self.choice.allow_missing, *_POLICY)) or self.counts_empty(shard)
            if shard.view.numel() and not optional:
                self.differences.missing.add(shard.name)
            return None
        if there.shape != shard.shape:
            self.differences.other.add(f"{shard.name} ({list(there.shape)} there, {list(shard.shape)} here)")
            return None
        if not there.holds(shard.region, shard.offset, shard.offset + shard.view.numel()):
            self.leave(shard, "this rank had another slice")
            return None
        if not _converts(there.dtype, shard.view.dtype):
            self.differences.other.add(f"{shard.name} ({there.dtype} there, {shard.view.dtype} here)")
            return None
        return name

    def leave(self, shard: TensorShard, why: str) -> None:
        """Keeps like's value of a per-rank tensor; records a difference, unless it may be missing."""
        if not fits(shard.name, self.choice.allow_missing):
            self.differences.other.add(f"{shard.name} (each rank had its own, and {why}; allow_missing=... keeps like's)")

    def best_form(self, shard: TensorShard) -> str:
        """The form of a leaf to read: its own if state and checkpoint have the same forms and dtype, else the most precise."""
        name, (role, _, leaf) = shard.name, shard.name.partition("/")
        if role not in FORMS:
            return name
        here = [form for form in FORMS if f"{form}/{leaf}" in self.known]
        there = [form for form in FORMS if f"{form}/{leaf}" in self.stored]
        same = here == there and self.stored[name].dtype == shard.view.dtype
        return name if same or not there else f"{there[0]}/{leaf}"

    def counts_empty(self, shard: TensorShard) -> bool:
        """Whether it is a count of an empty leaf, which not every stage stores."""
        model = self.stored.get(f"params/{shard.name.partition('/')[2]}")
        return shard.shared and model is not None and not model.numel

    def find_extra(self) -> None:
        """Records what the checkpoint has and no rank needs."""
        allowed = (*self.choice.allow_extra, *_POLICY)
        for name, tensor in self.stored.items():
            base = name if name in self.known else without_rank(name)[0]
            role, _, leaf = base.partition("/")
            model = self.stored.get(f"params/{leaf}", tensor)
            wanted = base in self.known or (role in FORMS and f"params/{leaf}" in self.known)
            empty = not (tensor.numel and model.numel)
            if not wanted and not empty and self.choice.wants(base) and not fits(base, allowed):
                self.differences.extra.add(base)


def without_rank(name: str) -> tuple[str, bool]:
    """A name without the rank whose own value it is, and whether it had one: the inverse of ``per_rank_name``."""
    base, at, rank = name.rpartition("@")
    return (base, True) if at and rank.isdecimal() else (name, False)


def _converts(stored: torch.dtype, wanted: torch.dtype) -> bool:
    return stored == wanted or (stored.is_floating_point and wanted.is_floating_point)
