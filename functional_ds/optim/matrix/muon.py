"""Muon: updates of matrices by orthogonalized momentum."""

from typing import Any, Literal

import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.weighted import Weighted
from functional_ds.optim.kernels import check, check_counts, means, zeros
from functional_ds.optim.optimizer import Optimizer, PerParameter, Rate
from functional_ds.optim.param_groups import PathFilter
from functional_ds.sharding.matrix_owners import MatrixOwners

from .per_matrix import descend, on_matrices

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7


@tree.record
class MuonState:
    """Muon's state: the running mean of the gradients."""

    momentum: list[Tensor]


def muon(
    lr: float,
    others: Any,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.1,
    steps: int = 5,
    adjust: Literal["original", "match_rms_adamw"] = "original",
    matrices: PathFilter | None = None,
    stacks: PathFilter | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> PerParameter:
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) for matrices, and another optimizer for all other leaves.

    ```
    m ← momentum · m + (1 - momentum) g,   u = g + momentum (m - g) with nesterov, else m
    W ← (1 - lr · weight_decay) W - lr · factor(W) · orthogonalize(u)
    ```

    Equals the single-device optimizer in every ZeRO stage. In stages 1 to 3 each matrix is orthogonalized by its owner, the
    rank with most of its elements: the other ranks send it their parts of ``u`` and receive their parts of the result, both in
    ``dtype``. So each rank computes about 1/n, and the momentum is sharded like Adam's. In stage 0 each rank computes all.

    Cost: in stages 1 to 3, for bf16, 4 · Σ over matrices of (numel - the owner's shard) ≤ 4Ψ(n-1)/n bytes over all ranks
    (gathering ``u`` on all ranks would send 2Ψ(n-1)). In stage 0 nothing is sent.

    Args:
        lr: the learning rate of the matrices.
        others: the optimizer of all other leaves, such as ``fds.adamw(3e-4)``.
        momentum: the decay rate of the running mean.
        nesterov: whether to use Nesterov momentum.
        weight_decay: decoupled weight decay of the matrices.
        steps: the number of Newton-Schulz iterations.
        adjust: ``"original"``: factor(W) = √max(1, rows / columns); ``"match_rms_adamw"``: 0.2 √max(rows, columns) (Liu et al.
            2025, arXiv:2502.16982), for learning rates and weight decays that were tuned for AdamW.
        matrices: a regular expression or a function of a path that selects from the real two-dimensional leaves; None for all.
            Leave embeddings and output layers to ``others``. Vectors that it matches are left to ``others``.
        stacks: likewise, selects real three-dimensional leaves that are stacks of matrices along dim 0, such as experts; None
            for none.
        dtype: the dtype of the iteration.

    Raises:
        ValueError: a hyperparameter is out of range; at ``init``: ``matrices`` or ``stacks`` matches no matrix, a complex one
            or a leaf of more dims, or a matrix is sharded by ``tensor_parallel``.

    >>> import functional_ds as fds
    >>> step = fds.train_step(lambda params, x: (x @ params["w"] + params["b"]).sum(), muon(0.1, fds.sgd(0.1)))
    >>> state, _ = step(step.init({"w": torch.eye(2), "b": torch.zeros(2)}), torch.eye(2))
    >>> step.params(state)["b"].tolist()
    [-0.2..., -0.2...]
    """
    check(lr=lr, weight_decay=weight_decay)
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum={momentum} must be in [0, 1)")
    check_counts(steps=steps)
    if adjust not in ("original", "match_rms_adamw"):
        raise ValueError(f"adjust={adjust!r} is unknown; use 'original' or 'match_rms_adamw'")

    def factor(rows: int, columns: int) -> float:
        return float(max(1, rows / max(1, columns)) ** 0.5 if adjust == "original" else 0.2 * max(rows, columns) ** 0.5)

    def make(owners: MatrixOwners) -> Optimizer:
        leaf_map = owners.leaf_map

        def update(params: list[Tensor], grads: Weighted, state: MuonState, rate: Rate) -> tuple[list[Tensor], MuonState]:
            ahead = [_averaged(g, m, momentum, nesterov) for g, m in zip(means(grads, params), state.momentum, strict=True)]
            changes = owners.apply(lambda leaf, u: orthogonalize(u, steps=steps), leaf_map.views(ahead), dtype=dtype)
            descend(leaf_map, params, changes, lr=lr * rate, weight_decay=weight_decay, factor=factor)
            return params, state

        return Optimizer(lambda params: MuonState(zeros(params)), update)

    numbers = f"lr={lr}, momentum={momentum}, nesterov={nesterov}, weight_decay={weight_decay}, adjust={adjust!r}"
    return on_matrices(make, others, matrices, stacks, rule_name="muon", name=f"muon({numbers}, {{others}})")


def _averaged(grad: Tensor, mean: Tensor, momentum: float, nesterov: bool) -> Tensor:
    mean.lerp_(grad, 1 - momentum)
    return grad.lerp(mean, momentum) if nesterov else mean


def orthogonalize(matrix: Tensor, *, steps: int = 5) -> Tensor:
    """Orthogonalizes a matrix approximately by a quintic Newton-Schulz iteration, in its dtype.

    Law: U S Vᵀ becomes U S' Vᵀ with singular values S' of about 0.7 to 1.2, with the coefficients of Jordan et al. 2024.

    >>> values = torch.linalg.svdvals(orthogonalize(torch.tensor([[3.0, 1.0], [0.0, 2.0], [1.0, 1.0]])))
    >>> bool((values > 0.6).all() and (values < 1.3).all())
    True
    """
    a, b, c = _COEFFICIENTS
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=_EPS)  # no singular value above 1
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x
