"""Adam and AdamW: one kernel, which differs in how weights decay."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam as torch_adam

from functional_ds.base import tree
from functional_ds.base.weighted import Weighted

from .formula import formula, root, tensors
from .kernels import check, check_betas, counts, found_inf, run_fused, zeros
from .optimizer import Hyper, Optimizer, PerParameter, Rate
from .param_groups import PathFilter, by_decay

__all__ = ["AdamState", "adam", "adam_optimizer", "adamw"]

_MANY = 2.0**60  # updates, after which betaᵗ is 0 in fp32 and fp64


@tree.record
class AdamState:
    """Adam's state: how many updates each tensor has seen, and the two running moments."""

    steps: list[Tensor]
    exp_avg: list[Tensor]
    exp_avg_sq: list[Tensor]

    @staticmethod
    def fresh(params: list[Tensor]) -> "AdamState":
        """The state before the first update."""
        return AdamState(counts(params), zeros(params), zeros(params))


def adamw(
    lr: Hyper,
    *,
    betas: tuple[Hyper, Hyper] = (0.9, 0.999),
    eps: Hyper = 1e-8,
    weight_decay: Hyper = 1e-2,
    bias_correction: bool = True,
    decay: PathFilter | None = None,
) -> Optimizer | PerParameter:
    """AdamW (Loshchilov and Hutter 2019), by torch's fused kernel, which also divides by the gradients' weight.

    Complex tensors are treated as pairs of reals.

    Args:
        lr: the learning rate.
        betas: the decay rates of the two running means.
        eps: added to the root.
        weight_decay: decoupled from the gradient.
        bias_correction: whether the means are divided by 1 - betaᵗ, as they start from zero.
        decay: a regular expression or a function of a path: which leaves decay; None for all.

    Raises:
        ValueError: a negative number, or betas outside [0, 1).
    """
    if decay is not None:
        return by_decay(adamw, lr, weight_decay, decay, betas=betas, eps=eps, bias_correction=bias_correction)
    return adam_optimizer(
        "adamw", lr, betas=betas, eps=eps, weight_decay=weight_decay, decoupled=True, corrects=bias_correction
    )


def adam(
    lr: Hyper,
    *,
    betas: tuple[Hyper, Hyper] = (0.9, 0.999),
    eps: Hyper = 1e-8,
    weight_decay: Hyper = 0.0,
    bias_correction: bool = True,
    decay: PathFilter | None = None,
) -> Optimizer | PerParameter:
    """Adam (Kingma and Ba 2015), by torch's fused kernel.

    Args:
        lr: the learning rate.
        betas: the decay rates of the two running means.
        eps: added to the root.
        weight_decay: this many times the parameter is added to its gradient, as ``torch.optim.Adam`` does.
        bias_correction: whether the means are divided by 1 - betaᵗ, as they start from zero.
        decay: a regular expression or a function of a path: which leaves decay; None for all.

    Raises:
        ValueError: a negative number, or betas outside [0, 1).

    >>> import functional_ds as fds
    >>> step = fds.train_step(lambda params, x: (params["w"] * x).sum(), adam(0.5))
    >>> state, _ = step(step.init({"w": torch.ones(2)}), torch.tensor([1.0, -2.0]))
    >>> step.params(state)["w"].round(decimals=3).tolist()  # at first by lr, whatever the gradient's size
    [0.5, 1.5]
    """
    if decay is not None:
        return by_decay(adam, lr, weight_decay, decay, betas=betas, eps=eps, bias_correction=bias_correction)
    return adam_optimizer(
        "adam", lr, betas=betas, eps=eps, weight_decay=weight_decay, decoupled=False, corrects=bias_correction
    )


def adam_optimizer(
    name: str, lr: Hyper, *, betas: tuple[Hyper, Hyper], eps: Hyper, weight_decay: Hyper, decoupled: bool, corrects: bool = True
) -> Optimizer:
    """Either of them: ``decoupled`` says whether weights decay by themselves (AdamW) or through the gradient (Adam).

    Without ``corrects`` the kernel is told of so many updates that 1 - betaᵗ is 1.
    """
    check(lr=lr, eps=eps, weight_decay=weight_decay)
    check_betas(betas)

    def kernel(
        params: list[Tensor], grads: list[Tensor], means: list[Tensor], squares: list[Tensor], steps: list[Tensor], **more: Any
    ) -> None:
        torch_adam(
            params,
            grads,
            means,
            squares,
            [],
            steps,
            fused=True,
            decoupled_weight_decay=decoupled,
            amsgrad=False,
            beta1=betas[0],
            beta2=betas[1],
            weight_decay=float(weight_decay),
            eps=float(eps),
            maximize=False,
            **more,
        )

    def update(params: list[Tensor], grads: Weighted, state: AdamState, rate: Rate) -> tuple[list[Tensor], AdamState]:
        steps = state.steps if corrects else [torch.full_like(count, _MANY) for count in state.steps]
        run_fused(kernel, params, grads, state.exp_avg, state.exp_avg_sq, steps, lr=lr * rate)
        if not corrects:
            skipped = found_inf(grads)
            for count in state.steps:
                count.add_(1 if skipped is None else 1 - skipped)
        return params, state

    def rule(p: Tensor, grad: Tensor, lr: Tensor, count: Tensor, mean: Tensor, square: Tensor) -> tuple[Tensor, ...]:
        if decoupled:
            p = p * (1 - lr * weight_decay)
        else:
            grad = grad + weight_decay * p
        count, mean = count + 1, mean + (grad - mean) * (1 - betas[0])
        square = betas[1] * square + (1 - betas[1]) * grad * grad
        t = count.to(torch.promote_types(count.dtype, p.dtype))
        one, other = (1 - beta**t if corrects else 1.0 for beta in betas)
        return p - lr / one * mean / (root(square) / other**0.5 + eps), count, mean, square

    shown = f"{name}(lr={lr!r}, betas={betas}, eps={eps!r}, weight_decay={weight_decay!r}"
    shown += ")" if corrects else ", bias_correction=False)"
    given = tensors(lr=lr, beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=weight_decay)
    apart = formula(rule, lr)
    return Optimizer(AdamState.fresh, update, shown, skips=True, elementwise=True, formula=apart, tensors=given)
