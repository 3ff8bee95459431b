"""Other optimizers for other leaves."""

from collections.abc import Mapping
from typing import Any

from functional_ds.sharding.leaf_map import LeafMap, find

from .adamw_sgd import as_optimizer
from .by_leaf import ByLeaf, Where, named, routed

__all__ = ["route"]


def route(rules: Mapping[Where, Any], others: Any) -> ByLeaf:
    """The first rule whose key names a leaf's path moves that leaf, ``others`` the rest: param groups.

    Law: each leaf moves as it would if its optimizer had all leaves. Nothing is sent but what the rules themselves send.

    Args:
        rules: from a regular expression, or a function of a path, to an optimizer.
        others: the optimizer of what no rule names.

    Raises:
        TypeError: a value is no optimizer.
        ValueError: at ``init``: a regular expression matches no trained leaf.

    >>> import functional_ds as fds
    >>> import torch
    >>> slow_head = route({"^head": fds.sgd(0.1)}, fds.sgd(1.0))
    >>> step = fds.train_step(lambda params, x: (params["head"] * x).sum() + (params["body"] * x).sum(), slow_head)
    >>> state, _ = step(step.init({"body": torch.zeros(1), "head": torch.zeros(1)}), torch.ones(1))
    >>> {path: round(leaf.item(), 3) for path, leaf in step.params(state).items()}
    {'body': -1.0, 'head': -0.1}
    """
    wheres, pairs, rest = list(rules), [as_optimizer(rule) for rule in rules.values()], as_optimizer(others)

    def choose(parts: LeafMap) -> list[int]:
        hits = [find(parts, where, "rules") for where in wheres]
        return [next((i for i, found in enumerate(hits) if leaf in found), len(hits)) for leaf in range(len(parts.leaves))]

    names = [f"{named(where)}: {pair}" for where, pair in zip(wheres, pairs, strict=True)]
    return routed(f"route({{{', '.join(names)}}}, {rest})", choose, (*pairs, rest))
