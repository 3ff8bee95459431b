"""More optimizers that move every element alike: ZeRO changes nothing for them, and they send nothing."""

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad as torch_adagrad
from torch.optim.adam import adam as torch_adam

from functional_ds.base import tree
from functional_ds.base.weighted import Weighted

from .adamw_sgd import AdamState, Optimizer, Rate
from .by_leaf import ByLeaf, Where, by_decay
from .kernels import check, check_betas, found_inf, gradients, means, reals, zeros

__all__ = ["AdagradState", "LionState", "adagrad", "adam", "lion"]


@tree.record
class AdagradState:
    """Adagrad's state: how many updates each tensor has seen, and the sums of squares."""

    steps: list[Tensor]
    sums: list[Tensor]


@tree.record
class LionState:
    """Lion's state: the running mean of the gradients."""

    exp_avg: list[Tensor]


def adam(
    lr: float,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decay: Where | None = None,
) -> Optimizer | ByLeaf:
    """Adam (Kingma and Ba 2015), torch's fused kernel; weight decay is a part of the gradient, as ``torch.optim.Adam`` has it.

    ``decay``, a regular expression or a function of a path, says which leaves decay; None for all.

    Raises:
        ValueError: a negative number, or betas outside [0, 1).

    >>> import functional_ds as fds
    >>> step = fds.train_step(lambda params, x: (params["w"] * x).sum(), adam(0.5))
    >>> state, _ = step(step.init({"w": torch.ones(2)}), torch.tensor([1.0, -2.0]))
    >>> step.params(state)["w"].round(decimals=3).tolist()  # at first by lr, whatever the gradient's size
    [0.5, 1.5]
    """
    check(lr=lr, eps=eps, weight_decay=weight_decay)
    check_betas(betas)
    if decay is not None:
        return by_decay(lambda part: adam(lr, betas=betas, eps=eps, weight_decay=part), weight_decay, decay)

    def init(params: list[Tensor]) -> AdamState:
        return AdamState(_counts(params), zeros(params), zeros(params))

    def update(params: list[Tensor], grads: Weighted, state: AdamState, rate: Rate) -> tuple[list[Tensor], AdamState]:
        torch_adam(
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

    return Optimizer(init, update, f"adam(lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay})", skips=True)


def adagrad(
    lr: float,
    *,
    initial: float = 0.0,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    decay: Where | None = None,
) -> Optimizer | ByLeaf:
    """Adagrad (Duchi, Hazan, Singer 2011), torch's fused kernel; ``decay`` as in ``adam``.

    Args:
        lr: the learning rate.
        initial: what the sums of squares start from.
        eps: added to their roots.
        weight_decay: added to the gradient, times the parameter.
        decay: which leaves decay.

    Raises:
        ValueError: a negative number.

    >>> import functional_ds as fds
    >>> step = fds.train_step(lambda params, x: (params["w"] * x).sum(), adagrad(0.5))
    >>> state = step.init({"w": torch.ones(1)})
    >>> for _ in range(2):
    ...     state, _ = step(state, torch.ones(1))  # by lr, then by lr / √2
    >>> round(step.params(state)["w"].item(), 4)
    0.1464
    """
    check(lr=lr, initial=initial, eps=eps, weight_decay=weight_decay)
    if decay is not None:
        return by_decay(lambda part: adagrad(lr, initial=initial, eps=eps, weight_decay=part), weight_decay, decay)

    def init(params: list[Tensor]) -> AdagradState:
        return AdagradState(_counts(params), [total.fill_(initial) for total in zeros(params)])

    def update(params: list[Tensor], grads: Weighted, state: AdagradState, rate: Rate) -> tuple[list[Tensor], AdagradState]:
        torch_adagrad(
            reals(params),
            gradients(grads, params),
            state.sums,
            state.steps,
            fused=True,
            grad_scale=grads.weight,
            found_inf=found_inf(grads),
            lr=lr * rate,  # type: ignore[arg-type]
            weight_decay=weight_decay,
            lr_decay=0.0,
            eps=eps,
            maximize=False,
        )
        return params, state

    name = f"adagrad(lr={lr}, initial={initial}, eps={eps}, weight_decay={weight_decay})"
    return Optimizer(init, update, name, skips=True)


def lion(
    lr: float,
    *,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    decay: Where | None = None,
) -> Optimizer | ByLeaf:
    """Lion (Chen et al. 2023, arXiv:2302.06675), the sign of a mean; half of Adam's state. ``decay`` as in ``adam``.

    ```
    p ← p - lr (sign(β₁ m + (1 - β₁) g) + weight_decay p)
    m ← β₂ m + (1 - β₂) g
    ```

    Raises:
        ValueError: a negative number, or betas outside [0, 1).

    >>> import functional_ds as fds
    >>> step = fds.train_step(lambda params, x: (params["w"] * x).sum(), lion(0.25))
    >>> state, _ = step(step.init({"w": torch.ones(3)}), torch.tensor([7.0, -0.1, 0.0]))
    >>> step.params(state)["w"].tolist()
    [0.75, 1.25, 1.0]
    """
    check(lr=lr, weight_decay=weight_decay)
    check_betas(betas)
    if decay is not None:
        return by_decay(lambda part: lion(lr, betas=betas, weight_decay=part), weight_decay, decay)

    def init(params: list[Tensor]) -> LionState:
        return LionState(zeros(params))

    def update(params: list[Tensor], grads: Weighted, state: LionState, rate: Rate) -> tuple[list[Tensor], LionState]:
        for p, grad, mean in zip(reals(params), means(grads, params), state.exp_avg, strict=True):
            sign = mean.lerp(grad, 1 - betas[0]).sign_()
            p.sub_(sign.add_(p, alpha=weight_decay).mul_(lr * rate))
            mean.lerp_(grad, 1 - betas[1])
        return params, state

    return Optimizer(init, update, f"lion(lr={lr}, betas={betas}, weight_decay={weight_decay})")


def _counts(params: list[Tensor]) -> list[Tensor]:
    return [torch.zeros((), dtype=torch.float32, device=p.device) for p in params]
