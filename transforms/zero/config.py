"""How zero is set: a record of all that can be chosen, checked before anything is allocated."""

import difflib
from collections.abc import Callable
from math import isfinite
from typing import Any

import attrs

from functional_ds import comm
from functional_ds.sharding.grouping import UnitOf
from functional_ds.sharding.layout import Layout

__all__ = ["AGGREGATIONS", "Knobs"]

AGGREGATIONS = ("reduce_scatter", "all_reduce", "owner")

_OF_STAGE_3 = {"prefetch": 1, "live": 2, "persist": 0, "secondary": False}  # with their defaults
_MEANS = ("all_gather", "reduce_scatter", "all_reduce")


def _whole(least: int) -> Any:
    def check(record: Any, attribute: Any, value: Any) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{attribute.name}={value!r} must be a whole number, at least {least}")

    return check


@attrs.frozen(kw_only=True)
class Knobs:
    """What ``zero`` was asked for; see there.

    Raises:
        ValueError: a value that is out of range, unknown, or would change nothing in this stage.
        TypeError: a group that is no group, a collective that is no function.
    """

    stage: int
    group: comm.Group | None = None
    inside: comm.Group | int | None = None
    replicate: comm.Group | None = None
    unit_of: UnitOf | None = None
    keep: bool = True
    prefetch: int = attrs.field(default=1, validator=_whole(0))
    live: int = attrs.field(default=2, validator=_whole(1))
    persist: int = attrs.field(default=0, validator=_whole(0))
    secondary: bool = False
    aggregate: str = "reduce_scatter"
    predivide: float = 1.0
    all_gather: Callable[..., Any] = comm.all_gather
    reduce_scatter: Callable[..., Any] = comm.reduce_scatter
    all_reduce: Callable[..., Any] = comm.all_reduce

    def __attrs_post_init__(self) -> None:
        if type(self.stage) is not int or self.stage not in (0, 1, 2, 3):
            raise ValueError(f"stage={self.stage!r}: ZeRO has the stages 0, 1, 2 and 3")
        self._check_groups()
        self._check_words()
        self._check_means()
        self._check_use()
        for name in self.given():
            if name not in self.used():
                raise ValueError(
                    f"{name}={getattr(self, name)}: stage {self.stage} with aggregate={self.aggregate!r} uses "
                    f"{' and '.join(self.used()) or 'broadcast and reduce'}, so this one would change nothing"
                )

    def _check_groups(self) -> None:
        for name in ("group", "replicate"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, comm.Group):
                raise TypeError(f"{name}={value!r} is no group: pass mesh['dp'], comm.world() or None")
            if value is not None and value.rank < 0:
                raise ValueError(f"{name}={value!r}: this rank is not in it")
        number = isinstance(self.inside, int) and not isinstance(self.inside, bool)
        if self.inside is not None and not number and not isinstance(self.inside, comm.Group):
            raise TypeError(f"inside={self.inside!r} is neither a group nor a number of ranks: pass mesh['intra'] or 4")

    def _check_words(self) -> None:
        if self.aggregate not in AGGREGATIONS:
            near = difflib.get_close_matches(str(self.aggregate), AGGREGATIONS, 1, 0.0)[0]
            raise ValueError(
                f"aggregate={self.aggregate!r} is unknown: use one of {', '.join(AGGREGATIONS)}; the nearest is {near!r}"
            )
        divisor: Any = self.predivide
        if not isinstance(divisor, int | float) or not isfinite(divisor) or divisor <= 0:
            raise ValueError(f"predivide={self.predivide!r}: gradients are divided by a positive number")

    def _check_means(self) -> None:
        for name in _MEANS:
            value = getattr(self, name)
            if not callable(value):
                raise TypeError(
                    f"{name}={value!r} is no collective: pass comm.{name}, comm.compressed(comm.{name}, ...) or the like"
                )
            others = [other for other in _MEANS if other != name and value is getattr(comm, other)]
            if others:
                raise ValueError(f"{name}=comm.{others[0]}: it does something else; pass it as {others[0]}=, or leave it out")

    def _check_use(self) -> None:
        for name, default in _OF_STAGE_3.items():
            if self.stage < 3 and getattr(self, name) != default:
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: stage {self.stage} keeps all params whole, so this would change nothing; "
                    "it is for stage 3"
                )
        if self.stage == 0:
            for name, usual in {"inside": None, "aggregate": "reduce_scatter"}.items():
                if getattr(self, name) != usual:
                    raise ValueError(f"{name}={getattr(self, name)!r}: stage 0 has no shards and always uses all_reduce")
        if self.secondary and self.inside is None:
            raise ValueError("secondary=True: say inside which ranks the second shards lie: inside=mesh['intra'], or a number")
        if self.aggregate == "owner" and self.inside is not None:
            raise ValueError(
                f"inside={self.inside!r}: with aggregate='owner' a unit has one owner and travels in one hop; leave it out"
            )

    def used(self) -> tuple[str, ...]:
        """The collectives that carry params and gradients, of those that can be given."""
        if self.stage == 0:
            return ("all_reduce",)
        return {
            "reduce_scatter": ("all_gather", "reduce_scatter"),
            "all_reduce": ("all_gather", "all_reduce"),
            "owner": (),
        }[self.aggregate]

    def given(self) -> list[str]:
        """The collectives that are not comm's own."""
        return [name for name in _MEANS if getattr(self, name) is not getattr(comm, name)]

    @property
    def inexact(self) -> bool:
        """Whether what is gathered may differ from what is stored."""
        return "all_gather" in self.given()

    def layout(self, params: Any, n: int) -> Layout:
        """How params lie in shards of n ranks."""
        return Layout.of(
            params,
            n,
            self.unit_of,
            persistent=lambda leaf: self.persist > 0 and leaf.numel() <= self.persist,
            owned=self.aggregate == "owner",
        )

    def __str__(self) -> str:
        said = ("keep", "prefetch", "live", "persist", "secondary", "aggregate", "predivide", "unit_of", *_MEANS)
        default = {field.name: field.default for field in attrs.fields(Knobs)}
        changed = [(name, getattr(self, name)) for name in said if getattr(self, name) != default[name]]
        shown = "".join(f", {name}={getattr(value, '__name__', value)}" for name, value in changed)
        where = "world" if self.group is None else f"{self.group.name!r} of {self.group.size}"
        for name in ("inside", "replicate"):
            value = getattr(self, name)
            if value is not None:
                where += f", {name}={value if isinstance(value, int) else f'{value.name!r} of {value.size}'}"
        return f"zero({self.stage}, {where}{shown})"
