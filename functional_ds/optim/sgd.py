"""Stochastic gradient descent."""

import functools

from torch import Tensor
from torch.optim.sgd import sgd as torch_sgd

from functional_ds.base import tree
from functional_ds.base.weighted import Weighted

from .kernels import check, run_fused, widened, zeros
from .optimizer import Optimizer, PerParameter, Rate
from .param_groups import PathFilter, by_decay

__all__ = ["SGDState", "sgd"]


@tree.record
class SGDState:
    """SGD's state: momentum buffers, none without momentum."""

    momentum: list[Tensor]


def sgd(
    lr: float,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    decay: PathFilter | None = None,
) -> Optimizer | PerParameter:
    """Stochastic gradient descent with momentum, by torch's fused kernel.

    Args:
        lr: the learning rate.
        momentum: the factor of the momentum buffer, as ``torch.optim.SGD`` has it; 0 keeps no buffer.
        nesterov: whether the momentum is Nesterov's.
        weight_decay: this many times the parameter is added to its gradient.
        decay: a regular expression or a function of a path: which leaves decay; None for all.

    Raises:
        ValueError: a negative number, or nesterov without momentum.
    """
    check(lr=lr, momentum=momentum, weight_decay=weight_decay)
    if nesterov and not momentum:
        raise ValueError("nesterov=True needs momentum > 0")
    if decay is not None:
        return by_decay(sgd, lr, weight_decay, decay, momentum=momentum, nesterov=nesterov)

    def init(params: list[Tensor]) -> SGDState:
        return SGDState(zeros(params) if momentum else [])

    def update(params: list[Tensor], grads: Weighted, state: SGDState, rate: Rate) -> tuple[list[Tensor], SGDState]:
        if params and params[0].is_meta:  # no values, and no kernel of torch's
            return params, state
        kernel = functools.partial(
            torch_sgd,
            fused=True,
            weight_decay=weight_decay,
            momentum=momentum,
            dampening=0.0,
            nesterov=nesterov,
            maximize=False,
        )
        run_fused(functools.partial(widened, kernel), params, grads, state.momentum or [None] * len(params), lr=lr * rate)
        return params, state

    name = f"sgd(lr={lr}, momentum={momentum}, nesterov={nesterov}, weight_decay={weight_decay})"
    return Optimizer(init, update, name, skips=True, elementwise=True)
