"""What of a checkpoint comes where in a state, and where the two differ."""

import re
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase

import attrs
import torch

from functional_ds.state_dict.describe import Held
from functional_ds.step.slots import Role

from .errors import StructureError
from .manifest import Manifest, Stored
from .shard_plan import own_name

__all__ = ["Choice", "Differences", "match"]

# The forms in which a leaf of the model is stored, the most exact first. A state need not have those of the checkpoint.
_FORMS = (Role.MASTER.value, Role.EXACT.value, "params")  # the forms of a leaf, the best first
_COMES_AND_GOES = (f"{Role.SETTING.value}.*",)
_SHOWN = 8
_SLICE = re.compile(r"\[\d+ of \d+\]$")  # of a leaf that tensor parallelism has cut


def fits(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name, or what is before its slash, matches; masters are params, and a leaf's name stands for its slices."""
    role, _, leaf = name.partition("/")
    names = {name, role} | ({"params", f"params/{leaf}"} if role in _FORMS else set())
    names |= {_SLICE.sub("", each) for each in names}
    return any(fnmatchcase(each, pattern) for each in names for pattern in patterns)


@attrs.frozen
class Choice:
    """What a caller wants: patterns of names."""

    only: tuple[str, ...] | None
    allow_missing: tuple[str, ...]
    allow_extra: tuple[str, ...]

    @staticmethod
    def of(only: str | Sequence[str] | None, missing: str | Sequence[str], extra: str | Sequence[str]) -> "Choice":
        """From what ``load`` was given."""
        return Choice(None if only is None else _patterns(only), _patterns(missing), _patterns(extra))

    def check(self, known: Collection[str]) -> None:
        """Raises ValueError where a pattern of ``only`` means nothing that there is, so that it would load nothing."""
        for pattern in self.only or ():
            if not any(fits(name, (pattern,)) for name in known):
                raise ValueError(f"only={pattern!r} matches nothing in like, which has {_listed(known)}")

    def wants(self, name: str) -> bool:
        """Whether it is to be loaded."""
        return self.only is None or fits(name, self.only)


def _patterns(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


@attrs.define
class Differences:
    """Where a state and a checkpoint differ, in names."""

    missing: set[str] = attrs.field(factory=set)
    extra: set[str] = attrs.field(factory=set)
    other: set[str] = attrs.field(factory=set)

    def add(self, found: "Differences") -> None:
        """Another rank's, too."""
        self.missing |= found.missing
        self.extra |= found.extra
        self.other |= found.other

    def refuse(self, what: str) -> None:
        """Raises StructureError, which lists them, where there are any."""
        lists = [
            ("missing in the checkpoint (allow_missing=... keeps like's values)", self.missing),
            ("in the checkpoint and not in like (allow_extra=... leaves them out)", self.extra),
            ("of another kind", self.other),
        ]
        lines = [f"\n  {title}: {_listed(names)}" for title, names in lists if names]
        if lines:
            raise StructureError(f"{what} has another structure than like:{''.join(lines)}")


def _listed(names: Collection[str]) -> str:
    shown = sorted(names)[:_SHOWN]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def match(
    held: Sequence[Held], known: Collection[str], manifest: Manifest, choice: Choice, rank: int, ranks: int
) -> tuple[list[str | None], Differences]:
    """For each stretch of a state the name of what it is to be filled from, None to leave it; and what does not fit.

    ``known`` are all ranks' names.
    """
    tensors, found = manifest.tensors, Differences()
    split = {name: _split(name) for name in tensors}
    apart = {base for base, own in split.values() if own}
    sources = [
        _source(h, known, tensors, choice, found, rank if ranks == manifest.summary.ranks else None, apart) for h in held
    ]
    for name, stored in tensors.items():
        base = name if name in known else split[name][0]
        role, _, leaf = base.partition("/")
        model = tensors.get(f"params/{leaf}", stored)
        there = base in known or (role in _FORMS and f"params/{leaf}" in known)
        if (
            not there
            and stored.numel
            and model.numel
            and choice.wants(base)
            and not fits(base, (*choice.allow_extra, *_COMES_AND_GOES))
        ):
            found.extra.add(base)
    return sources, found


def _split(name: str) -> tuple[str, bool]:
    """A name without the rank whose own value it is, and whether it had one."""
    base, at, rank = name.rpartition("@")
    return (base, True) if at and rank.isdecimal() else (name, False)


def _source(
    held: Held,
    known: Collection[str],
    tensors: Mapping[str, Stored],
    choice: Choice,
    found: Differences,
    rank: int | None,
    apart: Collection[str],
) -> str | None:
    if not choice.wants(held.name):
        return None
    name = _form(held, known, tensors)
    if name not in tensors and name in apart:
        if rank is None:
            if not fits(held.name, choice.allow_missing):
                found.other.add(
                    f"{held.name} (each rank had its own, and there are other ranks now; allow_missing=... keeps like's)"
                )
            return None
        name = own_name(name, rank)
    stored = tensors.get(name)
    if stored is None:
        if held.view.numel() and not fits(held.name, (*choice.allow_missing, *_COMES_AND_GOES)) and not _idle(held, tensors):
            found.missing.add(held.name)
        return None
    if stored.shape != held.shape:
        found.other.add(f"{held.name} ({list(stored.shape)} there, {list(held.shape)} here)")
        return None
    if not _converts(stored.dtype, held.view.dtype):
        found.other.add(f"{held.name} ({stored.dtype} there, {held.view.dtype} here)")
        return None
    return name


def _form(held: Held, known: Collection[str], tensors: Mapping[str, Stored]) -> str:
    """The leaf in the form that it is to be taken from: its own if both have the same forms, in one dtype; else the best."""
    name, (role, _, leaf) = held.name, held.name.partition("/")
    if role not in _FORMS:
        return name
    here = [form for form in _FORMS if f"{form}/{leaf}" in known]
    there = [form for form in _FORMS if f"{form}/{leaf}" in tensors]
    same = here == there and tensors[name].dtype == held.view.dtype
    return name if same or not there else f"{there[0]}/{leaf}"


def _idle(held: Held, tensors: Mapping[str, Stored]) -> bool:
    """Whether it is a count of an empty leaf, which not all ways to store it have."""
    model = tensors.get(f"params/{held.name.partition('/')[2]}")
    return held.shared and model is not None and not model.numel


def _converts(stored: torch.dtype, wanted: torch.dtype) -> bool:
    return stored == wanted or (stored.is_floating_point and wanted.is_floating_point)
