"""Optimizers that are written for one leaf at a time, of which a rank may have a part."""

import functools
import inspect
from collections.abc import Callable, Generator, Sequence
from typing import Any

import attrs
import optree
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.weighted import Weighted
from functional_ds.sharding.leaf_map import LeafMap, at_least_fp32

from .kernels import check, means, reals
from .optimizer import Optimizer, PerParameter, Rate

__all__ = ["LeafStates", "per_leaf"]

Rule = Callable[..., tuple[Tensor, Any] | Generator[Any, Any, tuple[Tensor, Any]]]


@tree.record
class LeafStates:
    """The state of a ``per_leaf`` optimizer.

    Attributes:
        count: how many updates were made: int64.
        kept: what the rule keeps: lists like that of the params.
    """

    count: Tensor
    kept: tuple[list[Tensor], ...]


def per_leaf(
    init: Callable[[Tensor], Any], rule: Rule, *, lr: float, weight_decay: float = 0.0, name: str | None = None
) -> PerParameter:
    """An optimizer from an elementwise rule that may ask for sums over its whole leaf: LARS, LAMB and the like.

    ```
    u, s ← rule(g, s, step)                          g = ∂L/∂W, the mean over the whole batch
    W ← (1 - lr · weight_decay) W - lr · u           lr is multiplied by the schedule's rate
    ```

    The rule gets the part of a leaf that this rank has, flat. ``total = yield part_sum`` gives it the sum over the whole leaf;
    a tuple of sums gives a tuple. The rules of all leaves take turns, so each ``yield`` is one collective for all of them.
    What the rule keeps lies in shards as Adam's moments do. Law 19 holds in every stage.

    Cost: in stages 1 to 3 an all-reduce of L k numbers for each ``yield`` of k sums, with L leaves. Else nothing is sent.

    Args:
        init: from a part to what the rule keeps at first: a tree of tensors of its shape, such as ``torch.zeros_like`` makes.
        rule: from gradient, state and ``step`` (an int64 scalar, 1 in the first update) to ``u`` and the new state, both of the
            part's shape. If it has a parameter ``param``, it gets the part there. Parts are in fp32 at least, and complex ones
            pairs of reals. It writes into none of them, and it must yield equally often for all leaves, for parts without
            elements, too.
        lr: the learning rate.
        weight_decay: decoupled.
        name: for printing and errors; the rule's by default.

    Raises:
        TypeError: ``init`` or ``rule`` is not callable.
        ValueError: a negative number; at ``init``: a leaf is cut by ``tensor_parallel``, or the state has other shapes than the
            part; in an update: rules yield unequally often, or return another shape.

    >>> import functional_ds as fds
    >>> def normalized(grad, state, step):
    ...     square = yield grad.square().sum()
    ...     return grad / square.sqrt(), state
    >>> step = fds.train_step(lambda params, x: (params["w"] * x).sum(), per_leaf(lambda part: (), normalized, lr=5.0))
    >>> state, _ = step(step.init({"w": torch.zeros(2)}), torch.tensor([3.0, 4.0]))
    >>> step.params(state)["w"].tolist()
    [-3.0, -4.0]
    """
    for what, given in (("init", init), ("rule", rule)):
        if not callable(given):
            raise TypeError(f"per_leaf: {what}={given!r} is not callable")
    check(lr=lr, weight_decay=weight_decay)
    shown = str(name or getattr(rule, "__name__", type(rule).__name__))
    takes_param = "param" in inspect.signature(rule).parameters

    def kept_as() -> optree.PyTreeSpec:
        return tree.structure(init(torch.empty(0)))

    def start(params: list[Tensor]) -> LeafStates:
        rows = []
        for p in reals(params):
            rows.append(tree.leaves(init(at_least_fp32(p.detach()))))
            if any(not isinstance(x, Tensor) or x.shape != p.shape for x in rows[-1]):
                raise ValueError(
                    f"{shown}: init must make tensors of the shape of the part that it gets, {list(p.shape)}, such as "
                    "torch.zeros_like(part); fds.per_matrix keeps others"
                )
        count = torch.zeros((), dtype=torch.int64, device=params[0].device if params else None)
        return LeafStates(count, tuple([row[i] for row in rows] for i in range(kept_as().num_leaves)))

    def make(leaf_map: LeafMap) -> Optimizer:
        leaf_map.refuse_slices(shown)
        spec, parts = kept_as(), _LeafParts.of(leaf_map)

        def update(params: list[Tensor], grads: Weighted, state: LeafStates, rate: Rate) -> tuple[list[Tensor], LeafStates]:
            count = state.count + 1
            rows = [parts.views(params, each) for each in (params, means(grads, params), *state.kept)]
            runs = []
            for param, grad, *own in zip(*rows, strict=True):
                more = {"param": at_least_fp32(param)} if takes_param else {}
                runs.append(rule(at_least_fp32(grad), tree.unflatten(spec, own), count, **more))
            found = parts.finished(runs, shown)
            for (param, _, *own), (change, new) in zip(zip(*rows, strict=True), found, strict=True):
                for old, value in zip((param, *own), (change, *tree.leaves(new)), strict=True):
                    if old.shape != value.shape:
                        raise ValueError(f"{shown}: of a part of shape {list(old.shape)} it made one of {list(value.shape)}")
                moved = (lr * rate * change).to(param.dtype)  # before the param is written, which it may be a view of
                param.mul_(1 - lr * rate * weight_decay).sub_(moved)
                for old, value in zip(own, tree.leaves(new), strict=True):
                    old.copy_(value)
            return params, tree.replace(state, count=count)

        return Optimizer(start, update, shown)

    return PerParameter(make, f"{shown}(lr={lr}, weight_decay={weight_decay})")


@attrs.frozen
class _LeafParts:
    """This rank's parts of all leaves; of leaves that other ranks have, parts without elements."""

    leaf_map: LeafMap
    leaves: tuple[int, ...]

    @staticmethod
    def of(leaf_map: LeafMap) -> "_LeafParts":
        here = [shard.leaf for shard in leaf_map.shards]
        return _LeafParts(leaf_map, (*here, *(i for i in range(len(leaf_map.leaves)) if i not in here)))

    def views(self, params: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
        """The parts of tensors like the params; of complex ones, and pairs of reals, pairs of reals."""
        pairs = zip(params, tensors, strict=True)
        alike = [torch.view_as_complex(x) if p.is_complex() and not x.is_complex() else x for p, x in pairs]
        found, group = self.leaf_map.views(alike), self.leaf_map.group
        device = params[0].device if params else None if group is None else group.world.device
        dtypes = [self.leaf_map.leaves[leaf].dtype for leaf in self.leaves[len(found) :]]
        return reals([*found, *(torch.empty(0, dtype=dtype, device=device) for dtype in dtypes)])

    def finished(self, runs: Sequence[Any], what: str) -> list[Any]:
        """What rules return; the sums that they yield are added up over the parts of their leaves, one collective a turn."""
        results = [*runs]
        told: dict[int, Any] = {place: None for place, run in enumerate(runs) if isinstance(run, Generator)}
        while told:
            asked: dict[int, Any] = {}
            for place, total in told.items():
                try:
                    asked[place] = runs[place].send(total)
                except StopIteration as end:
                    results[place] = end.value
            if asked and (len(asked) < len(told) or len({_count(each) for each in asked.values()}) > 1):
                raise ValueError(f"{what}: it must yield equally often, and equally many sums, for all leaves")
            told = self._totals(asked) if asked else {}
        return results

    def _totals(self, asked: dict[int, Any]) -> dict[int, Any]:
        sums = {place: torch.stack(each) if isinstance(each, tuple) else each for place, each in asked.items()}
        wide = functools.reduce(torch.promote_types, (each.dtype for each in sums.values()), torch.float32)
        zero = torch.zeros_like(sums[min(sums)], dtype=wide)
        rows = [zero for _ in self.leaf_map.leaves]
        for place, each in sums.items():
            rows[self.leaves[place]] = rows[self.leaves[place]] + each.to(wide)
        total = self.leaf_map.total(torch.stack(rows))
        return {
            p: total[self.leaves[p]].unbind() if isinstance(each, tuple) else total[self.leaves[p]] for p, each in asked.items()
        }


def _count(sums: Any) -> int:
    """How many sums a rule has asked for at once."""
    return len(sums) if isinstance(sums, tuple) else -1
