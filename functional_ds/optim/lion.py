"""Lion."""

from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.weighted import Weighted

from .formula import formula, tensors
from .kernels import check, check_betas, means, reals, zeros
from .optimizer import Hyper, Optimizer, PerParameter, Rate
from .param_groups import PathFilter, by_decay


@tree.record
class LionState:
    """Lion's state: the running mean of the gradients."""

    exp_avg: list[Tensor]


def lion(
    lr: Hyper,
    *,
    betas: tuple[Hyper, Hyper] = (0.9, 0.99),
    weight_decay: Hyper = 0.0,
    decay: PathFilter | None = None,
) -> Optimizer | PerParameter:
    """Lion (Chen et al. 2023, arXiv:2302.06675): sign updates with momentum, and half of Adam's state.

    ```
    p ← p - lr (sign(β₁ m + (1 - β₁) g) + weight_decay p)
    m ← β₂ m + (1 - β₂) g
    ```

    Args:
        lr: the learning rate.
        betas: β₁ and β₂.
        weight_decay: decoupled weight decay.
        decay: a regular expression or a function of a path that selects the leaves with weight decay; None for all.

    Raises:
        ValueError: a hyperparameter is negative, or a beta is outside [0, 1).

    >>> import functional_ds as fds
    >>> import torch
    >>> step = fds.train_step(lambda params, x: (params["w"] * x).sum(), lion(0.25))
    >>> state, _ = step(step.init({"w": torch.ones(3)}), torch.tensor([7.0, -0.1, 0.0]))
    >>> step.params(state)["w"].tolist()
    [0.75, 1.25, 1.0]
    """
    check(lr=lr, weight_decay=weight_decay)
    check_betas(betas)
    if decay is not None:
        return by_decay(lion, lr, weight_decay, decay, betas=betas)

    def init(params: list[Tensor]) -> LionState:
        return LionState(zeros(params))

    def update(params: list[Tensor], grads: Weighted, state: LionState, rate: Rate) -> tuple[list[Tensor], LionState]:
        for p, grad, mean in zip(reals(params), means(grads, params), state.exp_avg, strict=True):
            sign = mean.lerp(grad, 1 - betas[0]).sign_()
            p.sub_(sign.add_(p, alpha=float(weight_decay)).mul_(lr * rate))
            mean.lerp_(grad, 1 - betas[1])
        return params, state

    def rule(p: Tensor, grad: Tensor, lr: Tensor, mean: Tensor) -> tuple[Tensor, ...]:
        sign = (mean + (grad - mean) * (1 - betas[0])).sign()
        return p - lr * (sign + weight_decay * p), mean + (grad - mean) * (1 - betas[1])

    name = f"lion(lr={lr!r}, betas={betas}, weight_decay={weight_decay!r})"
    given = tensors(lr=lr, beta1=betas[0], beta2=betas[1], weight_decay=weight_decay)
    return Optimizer(init, update, name, elementwise=True, formula=formula(rule, lr), tensors=given)
