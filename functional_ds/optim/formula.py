"""Out-of-place updates of optimizers, which can be differentiated and batched."""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.torch_private import in_torch_func, is_transformed
from functional_ds.base.weighted import Weighted

from .kernels import means, reals
from .optimizer import Optimizer, PerParameter, Rate


def formula(rule: Callable[..., tuple[Tensor, ...]], lr: float | Tensor) -> Callable[..., tuple[list[Tensor], Any]]:
    """An optimizer's out-of-place update, which autograd and ``torch.func`` can differentiate and batch.

    Args:
        rule: ``p, g, lr, *state -> p, *state`` for a tensor, its mean gradient and its entries of the state's lists.
        lr: the learning rate, which is multiplied by the step's ``rate``.
    """

    def update(params: list[Tensor], grads: Weighted, state: Any, rate: float | Tensor) -> tuple[list[Tensor], Any]:
        rows = attrs.astuple(state, recurse=False)  # lists like the params, and empty ones
        inputs = [*zip(reals(params), means(grads, params), *filter(None, rows), strict=True)]
        moved = [rule(p, g, lr * rate, *moments) for p, g, *moments in inputs]
        kept = [
            [new.to(old.dtype) for new, old in zip(row, (p, *moments), strict=True)]
            for row, (p, _, *moments) in zip(moved, inputs, strict=True)
        ]
        columns = iter([[*column] for column in zip(*kept, strict=True)])
        new_params = next(columns, [])
        after = type(state)(*(next(columns) if row else [] for row in rows))
        return [torch.view_as_complex(new) if p.is_complex() else new for new, p in zip(new_params, params, strict=True)], after

    return update


def root(square: Tensor) -> Tensor:
    """The square root of a mean of squares, with derivative 0 at 0, where what it divides is 0, too."""
    known = square > 0
    return torch.where(known, torch.where(known, square, 1.0).sqrt(), 0.0)


def tensors(**numbers: float | Tensor) -> tuple[str, ...]:
    """The names of hyperparameters that only ``formula`` supports: tensors, except a learning rate without gradient."""
    return tuple(
        name for name, x in numbers.items() if isinstance(x, Tensor) and (name != "lr" or x.requires_grad or is_transformed(x))
    )


def out_of_place(rule: Optimizer | PerParameter) -> Optimizer | PerParameter:
    """The optimizer with an out-of-place update, for ``fds.differentiable``.

    Raises:
        ValueError: it is a ``PerParameter`` without a formula.
    """
    if isinstance(rule, Optimizer):
        update = rule.update

        def copied(params: list[Tensor], grads: Weighted, state: Any, rate: Rate) -> tuple[list[Tensor], Any]:
            copies = tree.map(lambda x: x.clone() if isinstance(x, Tensor) else x, (params, grads, state))
            params, grads, state = copies
            try:
                return update(params, grads, state, rate)
            except RuntimeError as error:
                if not in_torch_func() or "inplace" not in str(error):
                    raise
                raise RuntimeError(
                    f"differentiable: {rule} writes into tensors that are the same for all of torch.func.vmap: let its update "
                    "return new tensors, or give it one that does, fds.Optimizer(..., formula=)"
                ) from error

        return attrs.evolve(rule, update=rule.formula or copied, skips=False, elementwise=True, tensors=())
    if rule.formula is None:
        raise ValueError(
            f"differentiable: {rule} has no derivative here, as its update writes into params: use fds.sgd, adam, adamw, "
            "adagrad, lion, fds.param_groups of these, or an fds.Optimizer or an optax-shaped pair made of torch functions"
        )
    return PerParameter(rule.formula, rule.name)
