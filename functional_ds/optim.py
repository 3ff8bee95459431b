"""Optimizers: pure pairs over lists of tensors, on torch's own fused kernels."""

import inspect
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw
from torch.optim.sgd import sgd as torch_sgd

from . import tree
from .weighted import Weighted

__all__ = ["AdamState", "Optimizer", "SGDState", "adamw", "as_optimizer", "sgd"]

Rate = float | Tensor


@attrs.frozen
class Optimizer:
    """An ``init``/``update`` pair.

    Attributes:
        init: from the trained tensors to the optimizer's state.
        update: ``(params, grads, state, rate) -> (params, state)``. It owns its arguments and may write into them. The
            gradients are a ``Weighted`` list: what the kernel applies is ``grads.sum / grads.weight``. ``rate`` multiplies
            the learning rate.
        name: for printing.
    """

    init: Callable[[list[Tensor]], Any]
    update: Callable[[list[Tensor], Weighted, Any, Rate], tuple[list[Tensor], Any]]
    name: str = "optimizer"

    def __str__(self) -> str:
        return self.name


@tree.record
class AdamState:
    """AdamW's state: how many updates each tensor has seen, and the two running moments."""

    steps: list[Tensor]
    exp_avg: list[Tensor]
    exp_avg_sq: list[Tensor]


@tree.record
class SGDState:
    """SGD's state: momentum buffers, none without momentum."""

    momentum: list[Tensor]


def _reals(tensors: list[Tensor]) -> list[Tensor]:
    """As kernels want them: complex numbers as pairs of reals."""
    return [torch.view_as_real(t) if t.is_complex() else t for t in tensors]


def _gradients(grads: Weighted, params: list[Tensor]) -> list[Tensor]:
    """Laid out like the parameters and in their dtype, because the fused kernels walk all in step."""
    return _reals([grad.to(p.dtype).contiguous() for grad, p in zip(grads.sum, params, strict=True)])


def _zeros(params: list[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(p, memory_format=torch.contiguous_format) for p in _reals(params)]


def _check(**numbers: float) -> None:
    for name, value in numbers.items():
        if not value >= 0:
            raise ValueError(f"{name}={value} must not be negative")


def adamw(
    lr: float,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> Optimizer:
    """AdamW (Loshchilov and Hutter 2019), torch's fused kernel, which also divides by the gradients' weight.

    Complex tensors are taken as pairs of reals.

    Raises:
        ValueError: a negative number, or betas outside [0, 1).
    """
    _check(lr=lr, eps=eps, weight_decay=weight_decay)
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas={betas} must lie in [0, 1)")

    def init(params: list[Tensor]) -> AdamState:
        steps = [torch.zeros((), dtype=torch.float32, device=p.device) for p in params]
        return AdamState(steps, _zeros(params), _zeros(params))

    def update(params: list[Tensor], grads: Weighted, state: AdamState, rate: Rate) -> tuple[list[Tensor], AdamState]:
        torch_adamw(
            _reals(params),
            _gradients(grads, params),
            state.exp_avg,
            state.exp_avg_sq,
            [],
            state.steps,
            fused=True,
            grad_scale=grads.weight,
            amsgrad=False,
            beta1=betas[0],
            beta2=betas[1],
            lr=lr * rate,
            weight_decay=weight_decay,
            eps=eps,
            maximize=False,
        )
        return params, state

    return Optimizer(init, update, f"adamw(lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay})")


def sgd(lr: float, *, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> Optimizer:
    """Stochastic gradient descent with momentum, torch's fused kernel.

    Raises:
        ValueError: a negative number, or nesterov without momentum.
    """
    _check(lr=lr, momentum=momentum, weight_decay=weight_decay)
    if nesterov and not momentum:
        raise ValueError("nesterov=True needs momentum > 0")

    def init(params: list[Tensor]) -> SGDState:
        return SGDState(_zeros(params) if momentum else [])

    def update(params: list[Tensor], grads: Weighted, state: SGDState, rate: Rate) -> tuple[list[Tensor], SGDState]:
        torch_sgd(
            _reals(params),
            _gradients(grads, params),
            [*state.momentum] if momentum else [None] * len(params),
            fused=True,
            grad_scale=grads.weight,
            weight_decay=weight_decay,
            momentum=momentum,
            lr=lr * rate,  # type: ignore[arg-type]
            dampening=0.0,
            nesterov=nesterov,
            maximize=False,
        )
        return params, state

    return Optimizer(init, update, f"sgd(lr={lr}, momentum={momentum}, nesterov={nesterov}, weight_decay={weight_decay})")


def as_optimizer(pair: Any) -> Optimizer:
    """An ``Optimizer`` as it is; an optax-shaped pair (``init(params)``, ``update(grads, state, params=...)``) adapted.

    Such a pair returns additive updates. ``rate`` scales them, which for a learning rate that enters linearly (optax's and
    TorchOpt's do) is the same as scaling the learning rate.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(pair, Optimizer):
        return pair
    if not callable(getattr(pair, "init", None)) or not callable(getattr(pair, "update", None)):
        raise TypeError(f"optimizer={pair!r} is neither an fds optimizer nor an optax-shaped pair of init and update")
    keep = {"inplace": False} if "inplace" in inspect.signature(pair.update).parameters else {}

    def update(params: list[Tensor], grads: Weighted, state: Any, rate: Rate) -> tuple[list[Tensor], Any]:
        means = [grad.to(p.dtype) / grads.weight.to(p.dtype) for grad, p in zip(grads.sum, params, strict=True)]
        updates, state = pair.update(means, state, params=params, **keep)
        for p, change in zip(params, updates, strict=True):
            p.add_(change * rate)
        return params, state

    return Optimizer(pair.init, update, f"{type(pair).__name__}(...)")
