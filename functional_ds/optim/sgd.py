"""Stochastic gradient descent."""

import functools

from torch import Tensor
from torch.optim.sgd import sgd as torch_sgd

from functional_ds.base import tree
from functional_ds.base.weighted import Weighted

from .formula import formula, tensors
from .kernels import check, run_fused, widened, zeros
from .optimizer import Hyper, Optimizer, PerParameter, Rate
from .param_groups import PathFilter, by_decay


@tree.record
class SGDState:
    """SGD's state: the momentum buffers; empty without momentum."""

    momentum: list[Tensor]


def sgd(
    lr: Hyper,
    *,
    momentum: Hyper = 0.0,
    nesterov: bool = False,
    weight_decay: Hyper = 0.0,
    decay: PathFilter | None = None,
) -> Optimizer | PerParameter:
    """Stochastic gradient descent with momentum, as ``torch.optim.SGD``, with torch's fused kernel.

    ```
    g ← g + weight_decay · p,   b ← momentum · b + g
    p ← p - lr · b              with nesterov: p - lr (g + momentum · b)
    ```

    Args:
        lr: the learning rate.
        momentum: the momentum factor; 0 stores no buffer.
        nesterov: whether to use Nesterov momentum.
        weight_decay: L2 penalty.
        decay: a regular expression or a function of a path that selects the leaves with weight decay; None for all.

    Raises:
        ValueError: a hyperparameter is negative, or ``nesterov`` is set without momentum.

    >>> import functional_ds as fds
    >>> import torch
    >>> step = fds.train_step(lambda params, x: (params["w"] * x).sum(), sgd(0.5, momentum=0.5))
    >>> state = step.init({"w": torch.zeros(1)})
    >>> for _ in range(2):
    ...     state, _ = step(state, torch.ones(1))  # moves by 0.5, then by 0.75
    >>> step.params(state)["w"].tolist()
    [-1.25]
    """
    check(lr=lr, momentum=momentum, weight_decay=weight_decay)
    keeps = isinstance(momentum, Tensor) or bool(momentum)
    if nesterov and not keeps:
        raise ValueError("nesterov=True needs momentum > 0")
    if decay is not None:
        return by_decay(sgd, lr, weight_decay, decay, momentum=momentum, nesterov=nesterov)

    def init(params: list[Tensor]) -> SGDState:
        return SGDState(zeros(params) if keeps else [])

    def update(params: list[Tensor], grads: Weighted, state: SGDState, rate: Rate) -> tuple[list[Tensor], SGDState]:
        if params and params[0].is_meta:  # torch's kernel does not support meta tensors
            return params, state
        kernel = functools.partial(
            torch_sgd,
            fused=True,
            weight_decay=float(weight_decay),
            momentum=float(momentum),
            dampening=0.0,
            nesterov=nesterov,
            maximize=False,
        )
        run_fused(functools.partial(widened, kernel), params, grads, state.momentum or [None] * len(params), lr=lr * rate)
        return params, state

    def rule(p: Tensor, grad: Tensor, lr: Tensor, mean: Tensor | None = None) -> tuple[Tensor, ...]:
        grad = grad + weight_decay * p
        if mean is None:
            return (p - lr * grad,)
        mean = momentum * mean + grad
        return p - lr * (grad + momentum * mean if nesterov else mean), mean

    name = f"sgd(lr={lr!r}, momentum={momentum!r}, nesterov={nesterov}, weight_decay={weight_decay!r})"
    given = tensors(lr=lr, momentum=momentum, weight_decay=weight_decay)
    return Optimizer(init, update, name, skips=True, elementwise=True, formula=formula(rule, lr), tensors=given)
