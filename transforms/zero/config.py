"""The arguments of ``zero``, validated before anything is allocated."""

import inspect
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any, Literal

import attrs

from functional_ds import comm
from functional_ds.sharding.grouping import UnitOf
from functional_ds.sharding.layout import Layout
from functional_ds.sharding.path_patterns import nearest
from functional_ds.sharding.segment import Segment

from .combine import Combine
from .process_groups import ProcessGroups

AGGREGATIONS = ("reduce_scatter", "all_reduce", "owner")

_OF_STAGE_3 = ("prefetch", "max_live_units", "persistence_threshold", "hpz")
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


def _integer(least: int) -> Any:
    def check(record: Any, attribute: Any, value: Any) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{attribute.name}={value!r} must be a whole number, at least {least}")

    return check


def _is_stage(config: Any, field: Any, value: Any) -> None:
    if type(value) is not int or value not in (0, 1, 2, 3):
        raise ValueError(f"stage={value!r}: ZeRO has the stages 0, 1, 2 and 3")


def _as_collective(value: Any) -> Any:
    """Wraps a function that calls collectives, so that it can be started asynchronously."""
    return comm.table.composed(value) if callable(value) and not hasattr(value, "request") else value


@attrs.frozen(eq=False, repr=False)
class ZeroConfig:
    """The arguments of ``zero``, which documents them.

    Raises:
        ValueError: a value is out of range, unknown, or would change nothing in this stage.
        TypeError: a group is not a ``comm.Group``, or a collective is not callable.
    """

    stage: Literal[0, 1, 2, 3] = attrs.field(validator=_is_stage)
    group: comm.Group | None = None
    intra_node: comm.Group | int | None = attrs.field(default=None, kw_only=True)
    replicate: comm.Group | None = attrs.field(default=None, kw_only=True)
    unit_of: UnitOf | None = attrs.field(default=None, kw_only=True)
    reshard_last_units: bool = attrs.field(default=False, kw_only=True)
    prefetch: int = attrs.field(default=1, kw_only=True, validator=_integer(0))
    max_live_units: int = attrs.field(default=2, kw_only=True, validator=_integer(1))
    persistence_threshold: int = attrs.field(default=0, kw_only=True, validator=_integer(0))
    hpz: bool = attrs.field(default=False, kw_only=True)
    aggregate: Literal["reduce_scatter", "all_reduce", "owner"] | Combine = attrs.field(default="reduce_scatter", kw_only=True)
    gradient_predivide_factor: float = attrs.field(default=1.0, kw_only=True)
    all_gather: Callable[..., Any] = attrs.field(default=comm.all_gather, kw_only=True, converter=_as_collective)
    reduce_scatter: Callable[..., Any] = attrs.field(default=comm.reduce_scatter, kw_only=True, converter=_as_collective)
    all_reduce: Callable[..., Any] = attrs.field(default=comm.all_reduce, kw_only=True, converter=_as_collective)

    def __attrs_post_init__(self) -> None:
        self._check_groups()
        self._check_values()
        self._check_collectives()
        self._check_stage()
        if self.group is not None:
            ProcessGroups.by(self)  # raises an error for groups that do not factor

    # -- what follows from it ------------------------------------------------------------------------------------------

    def layout(self, params: Any, n: int, ranks: Sequence[int] | None = None) -> Layout:
        """The layout of ``params`` in the shards of ``n`` ranks, in shard order; None for ranks 0 to n - 1."""
        return Layout.of(
            params,
            n,
            self.unit_of,
            persistent=lambda leaf: 0 < self.persistence_threshold >= leaf.numel(),
            owned=self.aggregate == "owner",
            ranks=ranks,
        )

    def stays_whole(self, segment: Segment) -> bool:
        """Whether every rank stores the segment's params whole between steps."""
        return self.stage < 3 or segment.persistent

    @property
    def used(self) -> tuple[str, ...]:
        """Which of the replaceable collectives this configuration uses."""
        if isinstance(self.aggregate, Combine):
            return ("all_gather",) if self.stage else ()
        if self.stage == 0:
            return ("all_reduce",)
        return () if self.aggregate == "owner" else ("all_gather", self.aggregate)

    @property
    def replaced(self) -> list[str]:
        """Which collectives are not comm's own."""
        return [name for name in _COLLECTIVES if getattr(self, name) is not getattr(comm, name)]

    @property
    def inexact(self) -> bool:
        """Whether a gather may give other values than the shards hold."""
        return "all_gather" in self.replaced

    def __repr__(self) -> str:
        where = "world" if self.group is None else f"{self.group.name!r} of {self.group.size}"
        changed = [
            (field.name, getattr(self, field.name))
            for field in attrs.fields(ZeroConfig)
            if field.name not in ("stage", "group") and getattr(self, field.name) != field.default
        ]
        return f"zero({', '.join([str(self.stage), where, *(f'{name}={_short(value)}' for name, value in changed)])})"

    # -- checks --------------------------------------------------------------------------------------------------------

    def _check_groups(self) -> None:
        for name in ("group", "replicate"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, comm.Group):
                raise TypeError(f"{name}={value!r} is not a group: pass mesh['dp'], comm.world() or None")
            if value is not None and value.rank < 0:
                raise ValueError(f"{name}={value!r}: this rank is not in it")
        size = self.intra_node
        number = isinstance(size, int) and not isinstance(size, bool)
        if size is not None and not number and not isinstance(size, comm.Group):
            raise TypeError(f"intra_node={size!r} is neither a group nor a number of ranks: pass mesh['intra'] or 4")

    def _check_values(self) -> None:
        if isinstance(self.aggregate, Combine):
            for name in self._changed(("replicate", "gradient_predivide_factor")):
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: with aggregate={self.aggregate} its function sums the gradients, over "
                    "the group and undivided; leave it out"
                )
        elif self.aggregate not in AGGREGATIONS:
            raise ValueError(
                f"aggregate={self.aggregate!r} is unknown: use one of {', '.join(AGGREGATIONS)}, or T.Combine(reduce); "
                f"{nearest(str(self.aggregate), AGGREGATIONS)}"
            )
        factor: Any = self.gradient_predivide_factor
        if not isinstance(factor, int | float) or not isfinite(factor) or factor <= 0:
            raise ValueError(f"gradient_predivide_factor={factor!r}: gradients are divided by a positive number")

    def _check_collectives(self) -> None:
        for name in _COLLECTIVES:
            value = getattr(self, name)
            if not callable(value):
                raise TypeError(
                    f"{name}={value!r} is not a collective: pass comm.{name}, comm.codecs.compressed(comm.{name}, ...) or the "
                    "like"
                )
            self._check_arguments(name, value)
            others = [other for other in _COLLECTIVES if other != name and value is getattr(comm, other)]
            if others:
                raise ValueError(f"{name}=comm.{others[0]}: it does something else; pass it as {others[0]}=, or leave it out")
        for name in self.replaced:
            if name not in self.used:
                raise ValueError(
                    f"{name}={getattr(self, name)}: stage {self.stage} with aggregate={self.aggregate!r} uses "
                    f"{' and '.join(self.used) or 'broadcast and reduce'}, so this one would change nothing"
                )

    def _check_arguments(self, name: str, value: Callable[..., Any]) -> None:
        options = {"tiled": False} if name == "reduce_scatter" else {}
        signature = inspect.signature(value)
        try:
            signature.bind("x", "group", **options)
        except TypeError:
            shown = ", ".join(("x", "group", *(f"{key}={option}" for key, option in options.items())))
            raise TypeError(
                f"{name}={_short(value)} takes {signature}, and zero calls it as {_short(value)}({shown})"
            ) from None

    def _check_stage(self) -> None:
        for name in self._changed(_OF_STAGE_3) if self.stage < 3 else ():
            raise ValueError(
                f"{name}={getattr(self, name)!r}: stage {self.stage} keeps all params whole, so this would change nothing; "
                "it is for stage 3"
            )
        whole = () if isinstance(self.aggregate, Combine) else ("aggregate",)
        for name in self._changed(("intra_node", *whole)) if self.stage == 0 else ():
            raise ValueError(f"{name}={getattr(self, name)!r}: stage 0 has no shards and always uses all_reduce")
        if self.hpz and self.intra_node is None:
            raise ValueError("hpz=True: pass the ranks that share a node: intra_node=mesh['intra'], or a number of ranks")
        if self.aggregate == "owner" and self.intra_node is not None:
            raise ValueError(
                f"intra_node={self.intra_node!r}: with aggregate='owner' each unit has one owner and one level of groups; "
                "leave it out"
            )

    def _changed(self, names: tuple[str, ...]) -> list[str]:
        fields = attrs.fields_dict(ZeroConfig)
        return [name for name in names if getattr(self, name) != fields[name].default]


def _short(value: Any) -> str:
    if isinstance(value, comm.Group):
        return f"{value.name!r} of {value.size}"
    return str(getattr(value, "__name__", value))
