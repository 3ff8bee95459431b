"""Optimizers: pure pairs over lists of tensors, on torch's own fused kernels."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw
from torch.optim.sgd import sgd as torch_sgd

from functional_ds.base import tree
from functional_ds.base.weighted import Weighted

from .by_leaf import ByLeaf, Where, by_decay
from .kernels import check, check_betas, divided, found_inf, gradients, reals, widened, zeros

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
        skips: whether ``update`` heeds ``grads.skip``; for one that does not, ``skipping.guarded`` does, with a copy.
    """

    init: Callable[[list[Tensor]], Any]
    update: Callable[[list[Tensor], Weighted, Any, Rate], tuple[list[Tensor], Any]]
    name: str = "optimizer"
    skips: bool = False

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


def adamw(
    lr: float,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    decay: Where | None = None,
) -> Optimizer | ByLeaf:
    """AdamW (Loshchilov and Hutter 2019), torch's fused kernel, which also divides by the gradients' weight.

    Complex tensors are taken as pairs of reals. ``decay``, a regular expression or a function of a path, says which leaves
    decay; None for all.

    Raises:
        ValueError: a negative number, or betas outside [0, 1).
    """
    check(lr=lr, eps=eps, weight_decay=weight_decay)
    check_betas(betas)
    if decay is not None:
        return by_decay(lambda part: adamw(lr, betas=betas, eps=eps, weight_decay=part), weight_decay, decay)

    def init(params: list[Tensor]) -> AdamState:
        steps = [torch.zeros((), dtype=torch.float32, device=p.device) for p in params]
        return AdamState(steps, zeros(params), zeros(params))

    def update(params: list[Tensor], grads: Weighted, state: AdamState, rate: Rate) -> tuple[list[Tensor], AdamState]:
        torch_adamw(
            reals(params),
            gradients(grads, params),
            state.exp_avg,
            state.exp_avg_sq,
            [],
            state.steps,
            fused=True,
            grad_scale=grads.weight,
            found_inf=found_inf(grads),
            amsgrad=False,
            beta1=betas[0],
            beta2=betas[1],
            lr=lr * rate,
            weight_decay=weight_decay,
            eps=eps,
            maximize=False,
        )
        return params, state

    return Optimizer(init, update, f"adamw(lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay})", skips=True)


def sgd(
    lr: float,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    decay: Where | None = None,
) -> Optimizer | ByLeaf:
    """Stochastic gradient descent with momentum, torch's fused kernel; ``decay`` as in ``adamw``.

    Raises:
        ValueError: a negative number, or nesterov without momentum.
    """
    check(lr=lr, momentum=momentum, weight_decay=weight_decay)
    if nesterov and not momentum:
        raise ValueError("nesterov=True needs momentum > 0")
    if decay is not None:
        rest = {"momentum": momentum, "nesterov": nesterov}
        return by_decay(lambda part: sgd(lr, weight_decay=part, **rest), weight_decay, decay)  # type: ignore[arg-type]

    def init(params: list[Tensor]) -> SGDState:
        return SGDState(zeros(params) if momentum else [])

    def update(params: list[Tensor], grads: Weighted, state: SGDState, rate: Rate) -> tuple[list[Tensor], SGDState]:
        kernel = functools.partial(
            torch_sgd,
            fused=True,
            grad_scale=grads.weight,
            found_inf=found_inf(grads),
            weight_decay=weight_decay,
            momentum=momentum,
            lr=lr * rate,  # type: ignore[arg-type]
            dampening=0.0,
            nesterov=nesterov,
            maximize=False,
        )
        widened(kernel, reals(params), gradients(grads, params), state.momentum or [None] * len(params))
        return params, state

    return Optimizer(
        init, update, f"sgd(lr={lr}, momentum={momentum}, nesterov={nesterov}, weight_decay={weight_decay})", skips=True
    )


def as_optimizer(pair: Any) -> Optimizer | ByLeaf:
    """An ``Optimizer`` as it is; an optax-shaped pair (``init(params)``, ``update(grads, state, params=...)``) adapted.

    Such a pair returns additive updates. ``rate`` scales them, which for a learning rate that enters linearly (optax's and
    TorchOpt's do) is the same as scaling the learning rate. It must move every element alike: in stages 1 to 3 of ``zero`` it
    gets shards with pieces of many leaves, so a norm that it takes (clipping, LARS, Adafactor) is a shard's, and nothing can
    tell. Clip with ``T.clip``; write what sees leaves as a ``ByLeaf``.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(pair, Optimizer | ByLeaf):
        return pair
    if not callable(getattr(pair, "init", None)) or not callable(getattr(pair, "update", None)):
        raise TypeError(f"optimizer={pair!r} is neither an fds optimizer nor an optax-shaped pair of init and update")
    keep = {"inplace": False} if "inplace" in inspect.signature(pair.update).parameters else {}

    def update(params: list[Tensor], grads: Weighted, state: Any, rate: Rate) -> tuple[list[Tensor], Any]:
        updates, state = pair.update(divided(grads, params), state, params=params, **keep)
        for p, change in zip(params, updates, strict=True):
            p.add_(change * rate)
        return params, state

    return Optimizer(pair.init, update, f"{type(pair).__name__}(...)")
