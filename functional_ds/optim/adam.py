"""Adam and AdamW."""

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

_MANY = 2.0**60  # a number of updates t for which betaᵗ is 0 in fp32 and fp64


@tree.record
class AdamState:
    """Adam's state: each tensor's number of updates, and the running means of gradients and squared gradients."""

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
    """AdamW (Loshchilov and Hutter 2019), as ``torch.optim.AdamW``, with torch's fused kernel.

    ```
    m ← β₁ m + (1 - β₁) g,   v ← β₂ v + (1 - β₂) g²
    p ← (1 - lr · weight_decay) p - lr · m̂ / (√v̂ + eps)        m̂ = m / (1 - β₁ᵗ),  v̂ = v / (1 - β₂ᵗ)
    ```

    Complex tensors are treated as pairs of reals.

    Args:
        lr: the learning rate.
        betas: β₁ and β₂.
        eps: added to the square root.
        weight_decay: decoupled weight decay.
        bias_correction: whether m and v are corrected for their initial value of zero.
        decay: a regular expression or a function of a path that selects the leaves with weight decay; None for all.

    Raises:
        ValueError: a hyperparameter is negative, or a beta is outside [0, 1).

    >>> import functional_ds as fds
    >>> step = fds.train_step(lambda params, x: (params["w"] * x).sum(), adamw(0.5, weight_decay=0.5))
    >>> state, _ = step(step.init({"w": torch.ones(2)}), torch.tensor([1.0, -2.0]))
    >>> step.params(state)["w"].round(decimals=3).tolist()  # decays by 0.25, then moves by lr
    [0.25, 1.25]
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
    """Adam (Kingma and Ba 2015), as ``torch.optim.Adam``, with torch's fused kernel.

    As ``adamw``, except that weight decay is an L2 penalty: ``weight_decay · p`` is added to the gradient.

    Args:
        lr: the learning rate.
        betas: the decay rates of the two running means.
        eps: added to the square root.
        weight_decay: L2 penalty.
        bias_correction: whether the means are corrected for their initial value of zero.
        decay: a regular expression or a function of a path that selects the leaves with weight decay; None for all.

    Raises:
        ValueError: a hyperparameter is negative, or a beta is outside [0, 1).

    >>> import functional_ds as fds
    >>> step = fds.train_step(lambda params, x: (params["w"] * x).sum(), adam(0.5))
    >>> state, _ = step(step.init({"w": torch.ones(2)}), torch.tensor([1.0, -2.0]))
    >>> step.params(state)["w"].round(decimals=3).tolist()  # the first update moves by lr
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
    """AdamW (``decoupled``) or Adam; without ``corrects`` the kernel gets a step count for which 1 - betaᵗ is 1."""
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
