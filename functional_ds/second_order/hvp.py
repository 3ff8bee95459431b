"""Hessian-vector products of a step's loss."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.weighted import Weighted
from functional_ds.step.over_ranks.mesh_axes import AxisRole, axes_of
from functional_ds.step.state.state import State
from functional_ds.step.step import Step


def hvp(
    step: Step, state: State, batch: Any, vector: Sequence[Tensor], *, inner: Callable[..., Any] = Step.gradients
) -> list[Tensor]:
    """Hessian-vector product H v of the mean loss over all ranks' batches, sharded like the optimizer's tensors.

    It is the gradient of <g, v>, where g is the gradient of the loss with its graph, computed by the step's own phase
    ``gradients``: with the gathers, casts, micro-batches and reductions of its transforms. Exact in every stage of ZeRO.

    Law: on one device it equals ``torch.autograd.functional.hvp`` of the mean loss by the trained leaves. It is linear in v,
    and ``step.dot(state, u, hvp(v)) = step.dot(state, hvp(u), v)``.

    Cost: a forward pass and two backward passes, during which every rank holds the whole vector. ZeRO-3 gathers each unit as in
    a step, and sends v as ``step.params`` sends the params. The codec of ``T.compressed_gradients`` applies to H v as to
    gradients.

    Args:
        step: whose loss.
        state: unchanged.
        batch: this rank's.
        vector: tensors like ``step.trained(state)``.
        inner: within a transform's own ``gradients``: its ``inner``, to avoid calling the transform again.

    Raises:
        ValueError: the vector does not match; ranks divide the model or the sequence, as in tensor parallelism.

    >>> import functional_ds as fds
    >>> step = fds.train_step(lambda params, x: (params["w"] ** 3 * x).sum(), fds.sgd(0.1))
    >>> state = step.init({"w": torch.tensor([1.0, 2.0])})
    >>> hvp(step, state, torch.ones(2), [torch.tensor([1.0, 10.0])])  # 6 w v
    [tensor([  6., 120.])]
    """
    for axis in axes_of(step):
        if axis.role not in (AxisRole.BATCH, AxisRole.APART):
            raise ValueError(
                f"hvp: ranks divide the model or the sequence in this step ({step}), and H v is computed of whole leaves; use "
                "a step with data parallelism only"
            )
    held = step.trained(state)
    whole = dict(tree.named(step.params(step.with_trained(state, vector))))
    paths = [leaf.path for leaf in step.leaf_map(state).leaves]

    def product(below: Any, step: Step, state: State, params: Any, batch: Any) -> tuple[Weighted, dict[str, Weighted]]:
        viewed = tree.map(lambda leaf: leaf.view_as(leaf), params)  # tensors, for any leaf types in the tree
        loss, _ = below(step, state, viewed, batch)
        leaves = dict(tree.named(viewed))
        trained = [leaves[path] for path in paths]
        grads: Sequence[Tensor | None] = torch.autograd.grad(loss.sum, trained, create_graph=True, allow_unused=True)
        curved = [_inner(g, whole[p]) for p, g in zip(paths, grads, strict=True) if g is not None and g.requires_grad]
        return Weighted(sum(curved) if curved else 0 * loss.sum, loss.weight), {}

    after, grads, _ = inner(step.wrapped("hvp", loss=product), state, batch, None, True)
    _, grads = step.reduce(after, grads)
    weight = step.sum_over_ranks(state, grads.weight)
    weight = torch.where(weight == 0, torch.inf, weight)
    return [(total / weight).view_as(leaf).to(leaf.dtype) for total, leaf in zip(grads.sum, held, strict=True)]


def _inner(grad: Tensor, v: Tensor) -> Tensor:
    """The real inner product; complex tensors are treated as pairs of reals."""
    product: Tensor = grad * v.to(grad.dtype).conj()
    return product.real.sum() if grad.is_complex() else product.sum()
