"""Adagrad."""

import functools

from torch import Tensor
from torch.optim.adagrad import adagrad as torch_adagrad

from functional_ds.base import tree
from functional_ds.base.weighted import Weighted

from .formula import formula, root, tensors
from .kernels import check, counts, run_fused, zeros
from .optimizer import Hyper, Optimizer, PerParameter, Rate
from .param_groups import PathFilter, by_decay


@tree.record
class AdagradState:
    """Adagrad's state: each tensor's number of updates, and the sums of squared gradients."""

    steps: list[Tensor]
    sums: list[Tensor]


def adagrad(
    lr: Hyper,
    *,
    initial: float = 0.0,
    eps: Hyper = 1e-10,
    weight_decay: Hyper = 0.0,
    decay: PathFilter | None = None,
) -> Optimizer | PerParameter:
    """Adagrad (Duchi, Hazan, Singer 2011), as ``torch.optim.Adagrad``, with torch's fused kernel.

    ```
    g ← g + weight_decay · p
    s ← s + g²,   p ← p - lr · g / (√s + eps)
    ```

    Args:
        lr: the learning rate.
        initial: the initial value of the sums of squares.
        eps: added to their square roots.
        weight_decay: L2 penalty.
        decay: a regular expression or a function of a path that selects the leaves with weight decay; None for all.

    Raises:
        ValueError: a hyperparameter is negative.

    >>> import functional_ds as fds
    >>> import torch
    >>> step = fds.train_step(lambda params, x: (params["w"] * x).sum(), adagrad(0.5))
    >>> state = step.init({"w": torch.ones(1)})
    >>> for _ in range(2):
    ...     state, _ = step(state, torch.ones(1))  # moves by lr, then by lr / √2
    >>> round(step.params(state)["w"].item(), 4)
    0.1464
    """
    check(lr=lr, initial=initial, eps=eps, weight_decay=weight_decay)
    if decay is not None:
        return by_decay(adagrad, lr, weight_decay, decay, initial=initial, eps=eps)

    def init(params: list[Tensor]) -> AdagradState:
        return AdagradState(counts(params), [total.fill_(initial) for total in zeros(params)])

    def update(params: list[Tensor], grads: Weighted, state: AdagradState, rate: Rate) -> tuple[list[Tensor], AdagradState]:
        if params and params[0].is_meta:  # torch's kernel does not support meta tensors
            return params, state
        kernel = functools.partial(
            torch_adagrad, fused=True, weight_decay=float(weight_decay), lr_decay=0.0, eps=float(eps), maximize=False
        )
        run_fused(kernel, params, grads, state.sums, state.steps, lr=lr * rate)
        return params, state

    def rule(p: Tensor, grad: Tensor, lr: Tensor, count: Tensor, total: Tensor) -> tuple[Tensor, ...]:
        grad = grad + weight_decay * p
        total = total + grad * grad
        return p - lr * grad / (root(total) + eps), count + 1, total

    name = f"adagrad(lr={lr!r}, initial={initial}, eps={eps!r}, weight_decay={weight_decay!r})"
    given = tensors(lr=lr, eps=eps, weight_decay=weight_decay)
    return Optimizer(init, update, name, skips=True, elementwise=True, formula=formula(rule, lr), tensors=given)
