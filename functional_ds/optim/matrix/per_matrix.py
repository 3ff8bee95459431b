"""Optimizers that are written as a rule for one whole matrix, or for one leaf, at a time."""

import functools
import inspect
import re
from collections.abc import Callable, Collection, Generator
from typing import Any

import attrs
import optree
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.weighted import Weighted
from functional_ds.optim.kernels import check, means, reals
from functional_ds.optim.optimizer import Optimizer, PerParameter, Rate, as_optimizer
from functional_ds.optim.param_groups import PathFilter, grouped, shown_filter
from functional_ds.sharding.leaf_map import LeafMap, at_least_fp32, match_leaves
from functional_ds.sharding.leaf_parts import LeafParts
from functional_ds.sharding.leaf_selection import LeafSelection, Unused
from functional_ds.sharding.matrix_owners import MatrixOwners
from functional_ds.sharding.stacks import unstacked

__all__ = ["LeafStates", "MatrixStates", "descend", "on_matrices", "per_leaf", "per_matrix"]


@tree.record
class MatrixStates:
    """The state of a ``per_matrix`` optimizer on one rank.

    Attributes:
        count: how many updates were made: int64, on the host.
        whole: what the rule keeps for each matrix that this rank owns, by the matrix's path.
    """

    count: Tensor
    whole: dict[str, Any]


def per_matrix(
    init: Callable[[Tensor], Any],
    rule: Callable[..., tuple[Tensor, Any]],
    *,
    lr: float,
    others: Any,
    weight_decay: float = 0.0,
    matrices: PathFilter | None = None,
    stacks: PathFilter | None = None,
    dtype: torch.dtype | None = None,
    name: str | None = None,
) -> PerParameter:
    """An optimizer from a rule for one whole matrix: GaLore, Shampoo, SOAP and the like, correct in every ZeRO stage.

    ```
    u, s ← rule(g, s, step)                          g = ∂L/∂W, the mean over the whole batch
    W ← (1 - lr · weight_decay) W - lr · u           lr is multiplied by the schedule's rate
    ```

    Law 19 holds in every stage: under ZeRO 1 to 3 each matrix has an owner, the rank with most of its elements. The others
    send it their parts of the gradient; the owner runs the rule on the whole matrix and sends back their parts of ``u``. The
    rule's state lies on the owner alone. In stage 0 every rank runs the rule for every matrix, and nothing is sent.

    Bytes that all ranks together send in an update of stage 1, 2 or 3: 2 · itemsize · M with M = Σ over matrices of (numel -
    the owner's shard) ≤ Ψ(n-1)/n, and 3 · itemsize · M if the rule takes ``param``. ``init`` sends itemsize · M once.

    Checkpoints hold the rule's state by the matrix's path, so it is loaded into any stage and number of ranks. A dynamic loss
    scale makes the host wait for each step's verdict. Not for ``T.offload``, which refuses it.

    Args:
        init: from a matrix to the rule's first state for it: any tree of tensors.
        rule: from gradient, state and ``step`` (an int, 1 in the first update) to ``u``, of the matrix's shape, and the new
            state. It owns its arguments and may write into them. If it has a parameter ``param``, it gets the matrix there.
            It must be deterministic, and must not depend on the other matrices.
        lr: the learning rate of the matrices.
        others: the optimizer of all leaves that are no matrices: ``fds.adamw(3e-4)``, say.
        weight_decay: decoupled, for matrices.
        matrices: a regular expression or a function of a path: which of the real two-dimensional leaves; None for all. Vectors
            that it names are left to ``others``.
        stacks: likewise: which of the real three-dimensional leaves are stacks of matrices along dim 0, as experts are; None
            for none. Those of ``T.experts`` have owners among the ranks that hold the same experts.
        dtype: in which matrices, gradients and ``u`` travel and the rule gets them; None for fp32, or fp64 where a leaf is.
        name: for printing and errors; the rule's by default.

    Raises:
        TypeError: ``init`` or ``rule`` is not callable.
        ValueError: a negative number; at ``init``: ``matrices`` or ``stacks`` names no matrix, a complex one, or a leaf of more
            dims, or a matrix is cut by ``tensor_parallel``; in an update: ``u`` has another shape than the matrix.

    >>> import functional_ds as fds
    >>> def rule(grad, momentum, step):  # momentum, scaled to a norm of 1
    ...     momentum = 0.9 * momentum + grad
    ...     return momentum / momentum.norm(), momentum
    >>> normalized = per_matrix(torch.zeros_like, rule, lr=0.5, others=fds.sgd(0.5))
    >>> step = fds.train_step(lambda params, x: (x @ params["w"] + params["b"]).sum(), normalized)
    >>> state, _ = step(step.init({"w": torch.ones(2, 2), "b": torch.ones(2)}), torch.ones(1, 2))
    >>> step.params(state)["w"].tolist()
    [[0.75, 0.75], [0.75, 0.75]]
    """
    check(lr=lr, weight_decay=weight_decay)
    shown, takes_param = _described("per_matrix", init, rule, name)

    def make(owners: MatrixOwners) -> Optimizer:
        leaf_map = owners.leaf_map
        leaves = leaf_map.leaves
        travels = dtype or functools.reduce(torch.promote_types, (leaf.dtype for leaf in leaves), torch.float32)

        def start(params: list[Tensor]) -> MatrixStates:
            whole = owners.gather([shard.to(travels) for shard in leaf_map.views(params)], travels)
            states = {leaves[i].path: init(matrix) for i, matrix in whole.items() if matrix.numel()}
            return MatrixStates(torch.zeros((), dtype=torch.int64), states)

        def update(params: list[Tensor], grads: Weighted, state: MatrixStates, rate: Rate) -> tuple[list[Tensor], MatrixStates]:
            if grads.skip is not None and bool(grads.skip):
                return params, state
            count, new, unused = state.count + 1, dict(state.whole), grads.unused or Unused(frozenset(), {})
            owned, moving = owners, params
            if unused.paths:
                used = [i for i, leaf in enumerate(leaves) if (leaf.stack or leaf.path) not in unused.paths]
                some = LeafSelection.of(leaf_map, used)
                owned, moving = owners.select(some.leaf_map), some.views(params)
                grads = tree.replace(grads, sum=some.views(grads.sum))

            def ruled(leaf: int, grad: Tensor, *param: Tensor) -> Tensor:
                spec = owned.leaf_map.leaves[leaf]
                path, further = spec.path, {"param": param[0]} if takes_param else {}
                step = int(count) - unused.idle.get(spec.stack or path, 0)
                found, new[path] = rule(grad, state.whole[path], step, **further)
                if found.shape != grad.shape:
                    raise ValueError(
                        f"{shown}: for {path!r} of shape {list(grad.shape)} it returned an update of shape {list(found.shape)}"
                    )
                return found.to(travels)

            rows = [owned.leaf_map.views(each) for each in (means(grads, moving), *([moving] if takes_param else []))]
            changes = owned.apply(ruled, *rows, dtype=travels)
            descend(owned.leaf_map, moving, changes, lr=lr * rate, weight_decay=weight_decay)
            return params, MatrixStates(count, new)

        return Optimizer(start, update, shown, skips=True, skips_unused=True)

    return on_matrices(
        make, others, matrices, stacks, kind=shown, name=f"{shown}(lr={lr}, weight_decay={weight_decay}, {{others}})"
    )


def _described(optimizer: str, init: Any, rule: Any, name: str | None) -> tuple[str, bool]:
    """A rule's name for printing, and whether it has a parameter ``param``.

    Raises:
        TypeError: ``init`` or ``rule`` is not callable.
    """
    for what, given in (("init", init), ("rule", rule)):
        if not callable(given):
            raise TypeError(f"{optimizer}: {what}={given!r} is not callable")
    return str(name or getattr(rule, "__name__", type(rule).__name__)), "param" in inspect.signature(rule).parameters


# -- rules for leaves of which a rank may have a part -------------------------------------------------------------------------

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
    check(lr=lr, weight_decay=weight_decay)
    shown, takes_param = _described("per_leaf", init, rule, name)

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
        spec, parts = kept_as(), LeafParts.of(leaf_map)

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


# -- which leaves are matrices -------------------------------------------------------------------------------------------


def on_matrices(
    make: Callable[[MatrixOwners], Optimizer],
    others: Any,
    matrices: PathFilter | None,
    stacks: PathFilter | None = None,
    *,
    kind: str,
    name: str,
) -> PerParameter:
    """``make``'s optimizer for real matrices, ``others`` for all else.

    Args:
        make: from the owners of the matrices to their optimizer.
        others: the optimizer of all other leaves.
        matrices: which of the matrices; None for all.
        stacks: which of the leaves of three dims are stacks of matrices; None for none.
        kind: the optimizer's name in errors.
        name: for printing, with ``{others}`` where that optimizer's name goes.
    """
    rest = as_optimizer(others)

    def choose(leaf_map: LeafMap) -> list[int]:
        leaves = leaf_map.leaves
        found = set() if stacks is None else _chosen(leaf_map, stacks, "stacks", kind, dims=3)
        if matrices is None:
            found |= {i for i, leaf in enumerate(leaves) if len(leaf.shape) == 2 and leaf.dtype.is_floating_point}
        else:
            found |= _chosen(leaf_map, matrices, "matrices", kind, dims=2, known=found)
        return [0 if i in found else 1 for i in range(len(leaves))]

    def made(leaf_map: LeafMap) -> Optimizer:
        leaves = leaf_map.leaves
        stacked = [i for i, leaf in enumerate(leaves) if len(leaf.shape) == 3]
        beyond = [
            attrs.evolve(leaf, slices=tuple(cut for cut in leaf.slices if cut.dim)) if i in stacked else leaf
            for i, leaf in enumerate(leaves)
        ]
        attrs.evolve(leaf_map, leaves=tuple(beyond)).refuse_slices(kind)  # matrices of a stack may lie on other ranks
        return make(MatrixOwners.choose(unstacked(leaf_map, stacked)))

    return grouped(name.replace("{others}", str(rest)), choose, (PerParameter(made, kind), rest))


def _chosen(leaf_map: LeafMap, where: PathFilter, what: str, kind: str, *, dims: int, known: Collection[int] = ()) -> set[int]:
    """The real leaves of ``dims`` dims that an argument names. Vectors and scalars among what it names are the others'.

    Raises:
        ValueError: it names complex matrices, or leaves of more dims that are not ``known``; it is an expression that names no
            leaf of ``dims`` dims, here or in other param groups and pipeline stages.
    """
    leaves, shown = leaf_map.leaves, f"{kind}: {what}={shown_filter(where)}"
    named = match_leaves(leaf_map, where, what)
    for leaf in (leaves[i] for i in sorted(named) if i not in known):
        size = f"of shape {list(leaf.shape)}"
        if leaf.dtype.is_complex and len(leaf.shape) > 1:
            raise ValueError(
                f"{shown} names the leaf {leaf.path!r} {size}, which is complex, and {kind} takes real matrices: leave it out "
                f"of {what}=, so that others= moves it, or train its real and imaginary parts as two leaves"
            )
        if len(leaf.shape) > dims:
            mend = "name it in stacks=, if it is a stack of matrices, or " if len(leaf.shape) == 3 else ""
            raise ValueError(
                f"{shown} names the leaf {leaf.path!r} {size}, and {kind} takes leaves of {dims} dims there: {mend}leave it "
                f"out of {what}=, so that others= moves it"
            )
    fit = {i for i in named if len(leaves[i].shape) == dims}
    if not fit and isinstance(where, str) and not any(re.search(where, path) for path in leaf_map.other_paths):
        some = [f"{leaves[i].path!r} of shape {list(leaves[i].shape)}" for i in sorted(named)[:3]]
        raise ValueError(
            f"{shown} names no leaf of {dims} dims, so {kind} has nothing to move; it names "
            f"{', '.join(some) or 'no trained leaf'}"
        )
    return fit


def descend(
    leaf_map: LeafMap,
    params: list[Tensor],
    changes: list[Tensor],
    *,
    lr: Rate,
    weight_decay: float,
    factor: Callable[[int, int], float] = lambda rows, columns: 1.0,
) -> None:
    """``W ← (1 - lr · weight_decay) W - lr · factor(*W.shape) · change`` in place, on this rank's shards of the matrices.

    Args:
        leaf_map: where the matrices lie in ``params``.
        params: the tensors that are changed.
        changes: one flat tensor for each of this rank's shards.
        lr: the learning rate of this update.
        weight_decay: decoupled.
        factor: from a matrix's rows and columns to the factor of its change.
    """
    for p in params:
        p.mul_(1 - lr * weight_decay)
    for shard, p, change in zip(leaf_map.shards, leaf_map.views(params), changes, strict=True):
        rows, columns = leaf_map.leaves[shard.leaf].shape
        p.sub_(change.to(p.dtype).mul_(lr * factor(rows, columns)))
