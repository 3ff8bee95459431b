"""Optimizers from an update rule for a whole matrix, or for a leaf."""

import functools
import inspect
import re
import reprlib
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


@tree.record
class MatrixStates:
    """The state of a ``per_matrix`` optimizer on one rank.

    Attributes:
        count: the number of updates: int64, on the host.
        whole: the rule's state for each matrix that this rank owns, by the matrix's path.
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
    """Makes an optimizer from an update rule for a whole matrix, as in Shampoo, SOAP or GaLore, for every ZeRO stage.

    ```
    u, s ← rule(g, s, step)                          g = ∂L/∂W, the mean over the whole batch
    W ← (1 - lr · weight_decay) W - lr · u           lr is multiplied by the schedule's rate
    ```

    Equals the single-device optimizer in every ZeRO stage. In stages 1 to 3 each matrix has an owner, the rank with most of its
    elements: it receives the other ranks' parts of the gradient, runs the rule on the whole matrix, and sends back their parts
    of ``u``. Only the owner has the rule's state. In stage 0 each rank runs the rule for all matrices.

    Cost: in stages 1 to 3, 2 · itemsize · M bytes over all ranks, with M = Σ over matrices of (numel - the owner's shard) ≤
    Ψ(n-1)/n, and 3 · itemsize · M if the rule takes ``param``. ``init`` sends itemsize · M once. In stage 0 nothing is sent.

    Checkpoints store the rule's state by the matrix's path, so it can be loaded in any stage and on any number of ranks. With a
    dynamic loss scale the host waits in each step to learn whether it is skipped. ``T.offload`` does not support it.

    Args:
        init: from a matrix to the rule's initial state for it, a pytree of tensors.
        rule: from gradient, state and ``step`` (an int, 1 in the first update) to ``u``, of the matrix's shape, and the new
            state; may modify its arguments in place. A parameter ``param`` gets the matrix. It must be deterministic, and
            independent of the other matrices.
        lr: the learning rate of the matrices.
        others: the optimizer of all other leaves, such as ``fds.adamw(3e-4)``.
        weight_decay: decoupled weight decay of the matrices.
        matrices: a regular expression or a function of a path that selects from the real two-dimensional leaves; None for all.
            Vectors that it matches are left to ``others``.
        stacks: likewise, selects real three-dimensional leaves that are stacks of matrices along dim 0, such as experts; None
            for none. Those of ``T.experts`` have owners among the ranks that hold the same experts.
        dtype: the dtype of the matrices, gradients and ``u`` for the rule and in messages; None for fp32, or fp64 if a leaf is.
        name: for printing and errors; by default the rule's.

    Raises:
        TypeError: ``init`` or ``rule`` is not callable.
        ValueError: a hyperparameter is negative; at ``init``: ``matrices`` or ``stacks`` matches no matrix, a complex one or a
            leaf of more dims, or a matrix is sharded by ``tensor_parallel``; in an update: ``u`` has another shape than the
            matrix.

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
                change, new[path] = _returned(rule(grad, state.whole[path], step, **further), shown, path, grad)
                return change.to(travels)

            rows = [owned.leaf_map.views(tensors) for tensors in (means(grads, moving), *([moving] if takes_param else []))]
            changes = owned.apply(ruled, *rows, dtype=travels)
            descend(owned.leaf_map, moving, changes, lr=lr * rate, weight_decay=weight_decay)
            return params, MatrixStates(count, new)

        return Optimizer(start, update, shown, skips=True, skips_unused=True)

    return on_matrices(
        make, others, matrices, stacks, rule_name=shown, name=f"{shown}(lr={lr}, weight_decay={weight_decay}, {{others}})"
    )


def _described(optimizer: str, init: Any, rule: Any, name: str | None) -> tuple[str, bool]:
    """A rule's name, and whether it has a parameter ``param``.

    Raises:
        TypeError: ``init`` or ``rule`` is not callable.
    """
    for what, given in (("init", init), ("rule", rule)):
        if not callable(given):
            raise TypeError(f"{optimizer}: {what}={given!r} is not callable")
    return str(name or getattr(rule, "__name__", type(rule).__name__)), "param" in inspect.signature(rule).parameters


def _returned(given: Any, name: str, path: str, grad: Tensor) -> tuple[Tensor, Any]:
    """The update and the new state that a rule returned for a leaf.

    Raises:
        TypeError: it returned something else.
        ValueError: the update has another shape than the gradient.
    """
    if not isinstance(given, tuple | list) or len(given) != 2 or not isinstance(given[0], Tensor):
        raise TypeError(f"{name}: for {path!r} it returned {reprlib.repr(given)}, and not an update and the new state")
    if given[0].shape != grad.shape:
        raise ValueError(
            f"{name}: for {path!r} of shape {list(grad.shape)} it returned an update of shape {list(given[0].shape)}"
        )
    return given[0], given[1]


# -- rules for leaves that may be sharded -------------------------------------------------------------------------------------

Rule = Callable[..., tuple[Tensor, Any] | Generator[Any, Any, tuple[Tensor, Any]]]


@tree.record
class LeafStates:
    """The state of a ``per_leaf`` optimizer.

    Attributes:
        count: the number of updates: int64.
        kept: the rule's state: lists like the params.
    """

    count: Tensor
    kept: tuple[list[Tensor], ...]


def per_leaf(
    init: Callable[[Tensor], Any], rule: Rule, *, lr: float, weight_decay: float = 0.0, name: str | None = None
) -> PerParameter:
    """Makes an optimizer from an elementwise rule that may use sums over its whole leaf, as in LARS or LAMB.

    ```
    u, s ← rule(g, s, step)                          g = ∂L/∂W, the mean over the whole batch
    W ← (1 - lr · weight_decay) W - lr · u           lr is multiplied by the schedule's rate
    ```

    The rule gets this rank's part of a leaf, flattened. ``total = yield part_sum`` returns the sum over the whole leaf; a tuple
    of sums returns a tuple. The rules of all leaves run in lockstep, so each ``yield`` is one collective for all of them. The
    state is sharded like Adam's. Equals the single-device optimizer in every ZeRO stage.

    Cost: in stages 1 to 3 an all-reduce of L k numbers for each ``yield`` of k sums, with L leaves. Else nothing is sent.

    Args:
        init: from a tensor, which under ZeRO contains several leaves, to the rule's initial state: a pytree of tensors of the
            same shape, such as ``torch.zeros_like``.
        rule: from gradient, state and ``step`` (an int64 scalar, 1 in the first update) to ``u`` and the new state, both of the
            part's shape. A parameter ``param`` gets the part. Parts are in at least fp32; complex ones are pairs of reals. The
            rule must not modify them, and must yield equally often for all leaves, also for empty parts. ``0.9 ** step`` is
            fp32; where params are fp64, write ``0.9 ** step.to(grad.dtype)``.
        lr: the learning rate.
        weight_decay: decoupled weight decay.
        name: for printing and errors; by default the rule's.

    Raises:
        TypeError: ``init`` or ``rule`` is not callable; in an update: it yields or returns something else.
        ValueError: a hyperparameter is negative; at ``init``: a leaf is sharded by ``tensor_parallel``, or the state has other
            shapes than the tensor; in an update: rules yield unequally often, or return another shape.

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
            rows = [parts.views(params, tensors) for tensors in (params, means(grads, params), *state.kept)]
            runs = []
            for param, grad, *states in zip(*rows, strict=True):
                more = {"param": at_least_fp32(param)} if takes_param else {}
                runs.append(rule(at_least_fp32(grad), tree.unflatten(spec, states), count, **more))
            paths = [leaf_map.leaves[leaf].path for leaf in parts.leaves]
            for path, (param, _, *states), given in zip(
                paths, zip(*rows, strict=True), parts.finished(runs, shown), strict=True
            ):
                change, new = _returned(given, shown, path, param)
                news = tree.leaves(new)
                if [getattr(x, "shape", None) for x in news] != [x.shape for x in states]:
                    raise ValueError(
                        f"{shown}: for {path!r} it returned the state {reprlib.repr(new)}; init made {spec} of this shape"
                    )
                moved = (lr * rate * change).to(param.dtype)  # before the param is written, which it may be a view of
                param.mul_(1 - lr * rate * weight_decay).sub_(moved)
                for old, value in zip(states, news, strict=True):
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
    rule_name: str,
    name: str,
) -> PerParameter:
    """Uses the optimizer of ``make`` for real matrices, and ``others`` for all other leaves.

    Args:
        make: from the owners of the matrices to their optimizer.
        others: the optimizer of all other leaves.
        matrices: selects the matrices; None for all.
        stacks: selects the three-dimensional leaves that are stacks of matrices; None for none.
        rule_name: the optimizer's name in errors.
        name: for printing, with ``{others}`` for the name of that optimizer.
    """
    rest = as_optimizer(others)

    def choose(leaf_map: LeafMap) -> list[int]:
        leaves = leaf_map.leaves
        chosen = set() if stacks is None else _chosen(leaf_map, stacks, "stacks", rule_name, dims=3)
        if matrices is None:
            chosen |= {i for i, leaf in enumerate(leaves) if len(leaf.shape) == 2 and leaf.dtype.is_floating_point}
        else:
            chosen |= _chosen(leaf_map, matrices, "matrices", rule_name, dims=2, known=chosen)
        return [0 if i in chosen else 1 for i in range(len(leaves))]

    def made(leaf_map: LeafMap) -> Optimizer:
        leaves = leaf_map.leaves
        stacked = [i for i, leaf in enumerate(leaves) if len(leaf.shape) == 3]
        beyond = [
            attrs.evolve(leaf, slices=tuple(cut for cut in leaf.slices if cut.dim)) if i in stacked else leaf
            for i, leaf in enumerate(leaves)
        ]
        attrs.evolve(leaf_map, leaves=tuple(beyond)).refuse_slices(rule_name)  # matrices of a stack may be on other ranks
        return make(MatrixOwners.choose(unstacked(leaf_map, stacked)))

    return grouped(name.replace("{others}", str(rest)), choose, (PerParameter(made, rule_name), rest))


def _chosen(
    leaf_map: LeafMap, where: PathFilter, what: str, rule_name: str, *, dims: int, known: Collection[int] = ()
) -> set[int]:
    """The real leaves of ``dims`` dims that match an argument; matching vectors and scalars are left to ``others``.

    Raises:
        ValueError: it matches complex matrices, or leaves of more dims that are not ``known``; it is an expression that matches
            no leaf of ``dims`` dims, here or in other param groups and pipeline stages.
    """
    leaves, shown = leaf_map.leaves, f"{rule_name}: {what}={shown_filter(where)}"
    named = match_leaves(leaf_map, where, what)
    for leaf in (leaves[i] for i in sorted(named) if i not in known):
        size = f"of shape {list(leaf.shape)}"
        if leaf.dtype.is_complex and len(leaf.shape) > 1:
            raise ValueError(
                f"{shown} names the leaf {leaf.path!r} {size}, which is complex, and {rule_name} takes real matrices: leave it "
                f"out of {what}=, so that others= updates it, or train its real and imaginary parts as two leaves"
            )
        if len(leaf.shape) > dims:
            mend = "name it in stacks=, if it is a stack of matrices, or " if len(leaf.shape) == 3 else ""
            raise ValueError(
                f"{shown} names the leaf {leaf.path!r} {size}, and {rule_name} takes leaves of {dims} dims there: {mend}leave "
                f"it out of {what}=, so that others= updates it"
            )
    fit = {i for i in named if len(leaves[i].shape) == dims}
    if not fit and isinstance(where, str) and not any(re.search(where, path) for path in leaf_map.other_paths):
        some = [f"{leaves[i].path!r} of shape {list(leaves[i].shape)}" for i in sorted(named)[:3]]
        raise ValueError(
            f"{shown} names no leaf of {dims} dims, so {rule_name} has nothing to update; it names "
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
        leaf_map: the layout of the matrices in ``params``.
        params: the tensors to update.
        changes: one flat tensor for each of this rank's shards.
        lr: the learning rate of this update.
        weight_decay: decoupled weight decay.
        factor: from a matrix's rows and columns to the factor of its change.
    """
    for p in params:
        p.mul_(1 - lr * weight_decay)
    for shard, p, change in zip(leaf_map.shards, leaf_map.views(params), changes, strict=True):
        rows, columns = leaf_map.leaves[shard.leaf].shape
        p.sub_(change.to(p.dtype).mul_(lr * factor(rows, columns)))
