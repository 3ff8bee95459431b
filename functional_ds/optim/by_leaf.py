"""Optimizers that treat leaves differently: functions of ``LeafMap``, and other optimizers for other leaves."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import attrs
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.weighted import Weighted
from functional_ds.sharding.leaf_map import LeafMap, Run, find

from .kernels import guarded

__all__ = ["ByLeaf", "Pair", "Placed", "Routed", "Where", "by_decay", "named", "routed"]

Where = str | Callable[[str], bool]


class Pair(Protocol):
    """``init`` and ``update`` as ``Optimizer`` has them."""

    @property
    def init(self) -> Callable[[list[Tensor]], Any]:
        """From the trained tensors to the optimizer's state."""
        ...

    @property
    def update(self) -> Callable[[list[Tensor], Weighted, Any, Any], tuple[list[Tensor], Any]]:
        """From params, gradients, state and rate to params and state."""
        ...


@attrs.frozen
class ByLeaf:
    """An optimizer that must know which elements are which leaf's.

    Attributes:
        make: from ``LeafMap`` to the pair for tensors in which the leaves lie so.
        name: for printing.
    """

    make: Callable[[LeafMap], Pair]
    name: str = "optimizer"

    def __str__(self) -> str:
        return self.name


@attrs.define(eq=False)
class Placed:
    """An optimizer where the leaves lie: its pair, made anew only when they lie otherwise."""

    rule: Any
    _last: tuple[LeafMap, Pair] | None = None

    def at(self, parts: Callable[[], LeafMap]) -> Pair:
        """The pair for these parts."""
        if not isinstance(self.rule, ByLeaf):
            return self.rule  # type: ignore[no-any-return]
        found = parts()
        if self._last is None or self._last[0] != found:
            self._last = (found, self.rule.make(found))
        return self._last[1]

    def __str__(self) -> str:
        return str(self.rule)


@tree.record
class Routed:
    """The states of several optimizers, each of other leaves.

    Attributes:
        states: those of the rules that have leaves.
        rules: which of the rules these are.
        leaves: the paths of the leaves that each has.
    """

    states: tuple[Any, ...]
    rules: tuple[int, ...] = tree.static()
    leaves: tuple[tuple[str, ...], ...] = tree.static()


def routed(name: str, choose: Callable[[LeafMap], Sequence[int]], rules: Sequence[Any]) -> ByLeaf:
    """Optimizer ``rules[choose(parts)[leaf]]`` for each leaf; the state is ``Routed``, rules without leaves left out.

    Each rule gets views of the stored tensors, as long as neighbouring leaves allow, so that its kernels run over few large
    tensors. Nothing is sent but what the rules themselves send.
    """

    def make(parts: LeafMap) -> Pair:
        chosen = choose(parts)
        routes, found = [], []
        for index, rule in enumerate(rules):
            runs, inner = parts.select(leaf for leaf, which in enumerate(chosen) if which == index)
            if inner.leaves:  # else there is nothing for it on any rank
                routes.append((runs, rule.make(inner) if isinstance(rule, ByLeaf) else rule))
                found.append((index, tuple(leaf.path for leaf in inner.leaves)))
        return _Routed(tuple(routes), tuple(index for index, _ in found), tuple(paths for _, paths in found))

    return ByLeaf(make, name)


def by_decay(rule: Callable[[float], Any], weight_decay: float, decay: Where) -> ByLeaf:
    """``rule(weight_decay)`` for the leaves that ``decay`` names, ``rule(0.0)`` for the others."""

    def choose(parts: LeafMap) -> list[int]:
        hits = find(parts, decay, "decay")
        return [0 if leaf in hits else 1 for leaf in range(len(parts.leaves))]

    return routed(f"{rule(weight_decay)} where {named(decay)}", choose, (rule(weight_decay), rule(0.0)))


def named(where: Where) -> str:
    """For printing."""
    return getattr(where, "__name__", repr(where))


@attrs.frozen
class _Routed:
    skips: ClassVar[bool] = True
    routes: tuple[tuple[tuple[Run, ...], Pair], ...]
    rules: tuple[int, ...]
    leaves: tuple[tuple[str, ...], ...]

    def init(self, params: list[Tensor]) -> Routed:
        """The state of each."""
        states = tuple(pair.init([run.of(params) for run in runs]) for runs, pair in self.routes)
        return Routed(states, self.rules, self.leaves)

    def update(self, params: list[Tensor], grads: Weighted, state: Routed, rate: Any) -> tuple[list[Tensor], Routed]:
        """Each moves its own views; what it returns in other memory is copied there."""
        states, dense = [], [grad.contiguous() for grad in grads.sum]
        for (runs, pair), old in zip(self.routes, state.states, strict=True):
            views = [run.of(params) for run in runs]
            own = tree.replace(grads, sum=[run.of(dense) for run in runs])
            moved, new = guarded(pair, views, own, old, rate)
            for view, other in zip(views, moved, strict=True):
                if other.data_ptr() != view.data_ptr():
                    view.copy_(other)
            states.append(new)
        return params, tree.replace(state, states=tuple(states))
