"""LAMB."""

from math import inf
from typing import Literal

import torch
from torch import Tensor

from functional_ds.base.weighted import Weighted, weight_dtype
from functional_ds.sharding.leaf_map import LeafMap

from .adam import AdamState
from .kernels import check, check_betas, means, reals
from .optimizer import Optimizer, PerParameter, Rate
from .param_groups import PathFilter, by_decay


def lamb(
    lr: float,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    trust: tuple[float, float] = (0.0, inf),
    correction: Literal["moments", "rate"] | None = "moments",
    decay: PathFilter | None = None,
) -> PerParameter:
    """LAMB (You et al. 2020, arXiv:1904.00962): Adam with the update of each leaf scaled to its norm.

    ```
    u = m̂ / (√v̂ + eps) + weight_decay · w          m̂, v̂ as in Adam
    w ← w - lr · clamp(‖w‖ / ‖u‖, *trust) · u       for each leaf; the ratio is 1 where either norm is 0
    ```

    With ``correction="rate"``, m and v are not corrected, and the learning rate is multiplied by √(1 - β₂ᵗ) / (1 - β₁ᵗ), as in
    DeepSpeed's kernels. Since the trust ratio sees uncorrected updates, early steps differ.

    Equals the single-device optimizer in every ZeRO stage.

    Cost: in stages 1 to 3 an all-reduce of 2 numbers per leaf: each rank sends 16 L (n-1)/n bytes for L leaves in fp32. In
    stage 0 nothing is sent.

    Args:
        lr: the learning rate.
        betas: the decay rates of the running means.
        eps: added to the square root.
        weight_decay: decoupled, but part of ``u``.
        trust: bounds of the trust ratio; DeepSpeed's are (0.01, 10).
        correction: bias correction of the "moments" or of the learning "rate"; None for neither.
        decay: a regular expression or a function of a path that selects the leaves with weight decay; None for all.

    Raises:
        ValueError: a hyperparameter is out of range; at ``init``: a leaf is sharded by ``tensor_parallel``.

    >>> import functional_ds as fds
    >>> step = fds.train_step(lambda params, x: (params["w"] * x).sum(), lamb(0.5))
    >>> state, _ = step(step.init({"w": torch.full((4,), 2.0)}), torch.ones(4))
    >>> step.params(state)["w"].round(decimals=3).tolist()  # moves by half its norm
    [1.0, 1.0, 1.0, 1.0]
    """
    check(lr=lr, eps=eps, weight_decay=weight_decay)
    check_betas(betas)
    if not 0 <= trust[0] <= trust[1]:
        raise ValueError(f"trust={trust} must be bounds: 0 <= low <= high")
    if correction not in ("moments", "rate", None):
        raise ValueError(f"correction={correction!r} is unknown; use 'moments', 'rate' or None")
    if decay is not None:
        return by_decay(lamb, lr, weight_decay, decay, betas=betas, eps=eps, trust=trust, correction=correction)

    def direction(p: Tensor, grad: Tensor, count: Tensor, mean: Tensor, square: Tensor) -> Tensor:
        count.add_(1)
        mean.lerp_(grad, 1 - betas[0])
        square.mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
        if correction != "moments":
            return (mean / square.sqrt().add_(eps)).add_(p, alpha=weight_decay)
        done = count.to(weight_dtype(p.dtype))
        root = (square / (1 - betas[1] ** done)).sqrt_().add_(eps)
        return (mean / (1 - betas[0] ** done)).div_(root).add_(p, alpha=weight_decay)

    def make(leaf_map: LeafMap) -> Optimizer:
        leaf_map.refuse_slices("lamb")

        def update(params: list[Tensor], grads: Weighted, state: AdamState, rate: Rate) -> tuple[list[Tensor], AdamState]:
            rows = zip(reals(params), means(grads, params), state.steps, state.exp_avg, state.exp_avg_sq, strict=True)
            changes = [_shaped(direction(*row), p) for row, p in zip(rows, params, strict=True)]
            before, along = leaf_map.views(params), leaf_map.views(changes)
            norms, length = leaf_map.sums(_squares, params, changes).sqrt().unbind(-1)
            ratio = torch.where((norms > 0) & (length > 0), (norms / length).clamp(*trust), torch.ones_like(norms))
            if correction == "rate":
                for change, count in zip(changes, state.steps, strict=True):
                    done = count.to(weight_dtype(change.dtype))
                    change.mul_((1 - betas[1] ** done).sqrt() / (1 - betas[0] ** done))
            for shard, p, change in zip(leaf_map.shards, before, along, strict=True):
                p.sub_(change.mul_(ratio[shard.leaf] * lr * rate))
            return params, state

        return Optimizer(AdamState.fresh, update)

    numbers = f"lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}, trust={trust}"
    return PerParameter(make, f"lamb({numbers}{'' if correction == 'moments' else f', correction={correction!r}'})")


def _shaped(change: Tensor, p: Tensor) -> Tensor:
    """A change in the parameter's shape and dtype; a scalar in half precision was promoted by the count."""
    return torch.view_as_complex(change) if p.is_complex() else change.to(p.dtype).view_as(p)


def _squares(*parts: Tensor) -> Tensor:
    return torch.stack([torch.linalg.vector_norm(x) for x in reals([*parts])]).square()
