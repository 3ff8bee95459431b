"""Param groups: different optimizers, or weight decays, for different leaves."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.byte_ranges import begin_together
from functional_ds.base.weighted import Weighted
from functional_ds.sharding.leaf_map import LeafMap, TensorRange, match_leaves

from .bind import BoundOptimizer
from .formula import out_of_place
from .optimizer import Hyper, Optimizer, PerParameter, Rate, as_optimizer

PathFilter = str | Callable[[str], bool]


@tree.record
class GroupStates:
    """The optimizer states of several param groups.

    Attributes:
        states: the states of the groups that have leaves.
        rules: the index of each group's rule.
        leaves: the paths of each group's leaves.
    """

    states: tuple[Any, ...]
    rules: tuple[int, ...] = tree.static()
    leaves: tuple[tuple[str, ...], ...] = tree.static()


def param_groups(rules: Mapping[PathFilter, Any], others: Any) -> PerParameter:
    """Uses different optimizers for different leaves: the first rule that matches a leaf's path, else ``others``.

    Law: each leaf is updated as if its optimizer had all leaves. No communication is added to that of the optimizers.

    Args:
        rules: from a regular expression, or a function of a path, to an optimizer.
        others: the optimizer of the leaves that match no rule.

    Raises:
        TypeError: a value is not an optimizer.
        ValueError: at ``init``: a regular expression matches no trained leaf.

    >>> import functional_ds as fds
    >>> import torch
    >>> slow_head = param_groups({"^head": fds.sgd(0.1)}, fds.sgd(1.0))
    >>> step = fds.train_step(lambda params, x: (params["head"] * x).sum() + (params["body"] * x).sum(), slow_head)
    >>> state, _ = step(step.init({"body": torch.zeros(1), "head": torch.zeros(1)}), torch.ones(1))
    >>> {path: round(leaf.item(), 3) for path, leaf in step.params(state).items()}
    {'body': -1.0, 'head': -0.1}
    """
    filters, optimizers, rest = list(rules), [as_optimizer(rule) for rule in rules.values()], as_optimizer(others)

    def choose(leaf_map: LeafMap) -> list[int]:
        hits = [match_leaves(leaf_map, pattern, "rules") for pattern in filters]
        return [
            next((i for i, matched in enumerate(hits) if leaf in matched), len(hits)) for leaf in range(len(leaf_map.leaves))
        ]

    names = [f"{shown_filter(pattern)}: {rule}" for pattern, rule in zip(filters, optimizers, strict=True)]
    return grouped(f"param_groups({{{', '.join(names)}}}, {rest})", choose, (*optimizers, rest))


def by_decay(
    rule: Callable[..., Optimizer | PerParameter], lr: Hyper, weight_decay: Hyper, decay: PathFilter, **options: Any
) -> PerParameter:
    """``rule(lr, weight_decay=weight_decay, **options)`` for leaves that match ``decay``, without weight decay for the others.

    Args:
        rule: the optimizer.
        lr: the learning rate of both.
        weight_decay: the weight decay of matching leaves.
        decay: a regular expression or a function of a path.
        options: further arguments of both.
    """
    rules = [rule(lr, weight_decay=part, **options) for part in (weight_decay, 0.0)]

    def choose(leaf_map: LeafMap) -> list[int]:
        hits = match_leaves(leaf_map, decay, "decay")
        return [0 if leaf in hits else 1 for leaf in range(len(leaf_map.leaves))]

    return grouped(f"{rules[0]} where {shown_filter(decay)}", choose, rules)


def grouped(name: str, choose: Callable[[LeafMap], Sequence[int]], rules: Sequence[Optimizer | PerParameter]) -> PerParameter:
    """Optimizer ``rules[choose(leaf_map)[leaf]]`` for each leaf; rules without leaves have no state.

    Each rule gets views of the stored tensors that are as long as the order of the leaves allows, so its kernels run on few
    large tensors.
    """

    def groups_of(leaf_map: LeafMap, rules: Sequence[Optimizer | PerParameter]) -> _Groups:
        chosen = choose(leaf_map)
        groups, members = list[_RuleLeaves](), []
        for index, rule in enumerate(rules):
            extents, inner = leaf_map.select(leaf for leaf, which in enumerate(chosen) if which == index)
            if inner.leaves:  # otherwise no rank has leaves for it
                groups.append(_RuleLeaves(extents, inner, BoundOptimizer(rule)))
                groups[-1].rule.at(groups[-1].get_leaf_map)  # raises if the rule is not correct for such tensors
                members.append((index, tuple(leaf.path for leaf in inner.leaves)))
        return _Groups(tuple(groups), tuple(index for index, _ in members), tuple(paths for _, paths in members))

    def make(leaf_map: LeafMap) -> Optimizer:
        made = groups_of(leaf_map, rules)
        return Optimizer(made.init, made.update, name, skips=True, skips_unused=True)

    def formula(leaf_map: LeafMap) -> Optimizer:
        made = groups_of(leaf_map, [out_of_place(rule) for rule in rules])
        return Optimizer(made.init, made.moved, name, skips=True, skips_unused=True)

    return PerParameter(make, name, formula)


def shown_filter(where: PathFilter) -> str:
    """A filter's text, for names and errors."""
    return getattr(where, "__name__", repr(where))


@attrs.frozen(eq=False)
class _RuleLeaves:
    extents: tuple[TensorRange, ...]
    leaf_map: LeafMap
    rule: BoundOptimizer

    def get_leaf_map(self) -> LeafMap:
        return self.leaf_map

    def views(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [extent.view(tensors) for extent in self.extents]


@attrs.frozen(eq=False)
class _Groups:
    groups: tuple[_RuleLeaves, ...]
    rules: tuple[int, ...]
    leaves: tuple[tuple[str, ...], ...]

    def init(self, params: list[Tensor]) -> GroupStates:
        """The state of each group."""
        states = tuple(group.rule.at(group.get_leaf_map).init(group.views(params)) for group in self.groups)
        return GroupStates(states, self.rules, self.leaves)

    def update(self, params: list[Tensor], grads: Weighted, state: GroupStates, rate: Rate) -> tuple[list[Tensor], GroupStates]:
        """Updates each rule's views; results in other memory are copied to them."""
        new_params, after = self._updated(params, grads, state, rate)
        for group, moved in zip(self.groups, new_params, strict=True):
            for view, other in zip(group.views(params), moved, strict=True):
                if not begin_together(other, view):
                    view.copy_(other)
        return params, after

    def moved(self, params: list[Tensor], grads: Weighted, state: GroupStates, rate: Rate) -> tuple[list[Tensor], GroupStates]:
        """``update`` out of place, for params each of which is a leaf."""
        new_params, after = self._updated(params, grads, state, rate)
        places = (extent.tensor for group in self.groups for extent in group.extents)
        new = dict(zip(places, (one for moved in new_params for one in moved), strict=True))
        return [new[place].view_as(p) for place, p in enumerate(params)], after

    def _updated(
        self, params: list[Tensor], grads: Weighted, state: GroupStates, rate: Rate
    ) -> tuple[list[list[Tensor]], GroupStates]:
        dense = [grad.contiguous() for grad in grads.sum]
        new_params, states = [], []
        for group, old in zip(self.groups, state.states, strict=True):
            group_grads = tree.replace(grads, sum=group.views(dense))
            moved, new = group.rule.update(group.views(params), group_grads, old, rate=rate, leaf_map=group.get_leaf_map)
            new_params.append(moved)
            states.append(new)
        return new_params, tree.replace(state, states=tuple(states))
