"""Muon: each matrix moves by its orthogonalised momentum."""

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

__all__ = ["MuonState", "muon", "orthogonalize"]

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
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) for matrices, another optimizer for all else.

    ```
    m ← momentum · m + (1 - momentum) g,   u = g + momentum (m - g) with nesterov, else m
    W ← (1 - lr · weight_decay) W - lr · factor(W) · orthogonalize(u)
    ```

    Law 19 holds in every stage: each matrix is orthogonalised whole, by its owner, the rank with most of its elements. The
    other ranks send it their parts of ``u``, and it sends back theirs of the result, both in ``dtype`` (which changes no bit:
    the iteration computes in it). Bytes that all ranks together send in an update of stage 1, 2 or 3: 2 · 2 · Σ over matrices
    of (numel - the owner's shard), which is at most 4Ψ(n-1)/n; gathering all of ``u`` on all ranks would be 2Ψ(n-1). Each rank
    computes about 1/n. In stage 0 every rank computes everything and sends nothing. The momentum lies in shards as Adam's does.

    Args:
        lr: the learning rate of the matrices.
        others: the optimizer of all leaves that are no matrices: ``fds.adamw(3e-4)``, say.
        momentum: the decay rate of the running mean.
        nesterov: whether ``u`` looks ahead.
        weight_decay: decoupled, for matrices.
        steps: of the Newton-Schulz iteration.
        adjust: ``"original"`` is factor(W) = √max(1, rows / columns); ``"match_rms_adamw"`` is 0.2 √max(rows, columns) (Liu
            et al. 2025, arXiv:2502.16982), with which learning rates and decays tuned for AdamW will do.
        matrices: a regular expression or a function of a path: which of the real two-dimensional leaves; None for all.
            Embeddings and output layers are usually left to ``others``, and so are vectors that it names.
        stacks: likewise: which of the real three-dimensional leaves are stacks of matrices along dim 0, as experts are; None
            for none.
        dtype: in which the iteration computes.

    Raises:
        ValueError: a number out of range, an unknown ``adjust``; at ``init``: ``matrices`` or ``stacks`` names no matrix, a
            complex one, or a leaf of more dims, or a matrix is cut by ``tensor_parallel``.

    >>> import functional_ds as fds
    >>> step = fds.train_step(lambda params, x: (x @ params["w"] + params["b"]).sum(), muon(0.1, fds.sgd(0.1)))
    >>> state, _ = step(step.init({"w": torch.eye(2), "b": torch.zeros(2)}), torch.eye(2))
    >>> step.params(state)["b"].tolist()
    [-0.2..., -0.2...]
    """
    check(lr=lr, weight_decay=weight_decay)
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum={momentum} must lie in [0, 1)")
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
    return on_matrices(make, others, matrices, stacks, kind="muon", name=f"muon({numbers}, {{others}})")


def _averaged(grad: Tensor, mean: Tensor, momentum: float, nesterov: bool) -> Tensor:
    mean.lerp_(grad, 1 - momentum)
    return grad.lerp(mean, momentum) if nesterov else mean


def orthogonalize(matrix: Tensor, *, steps: int = 5) -> Tensor:
    """U S' Vᵀ for a matrix U S Vᵀ, with singular values near 1, by a quintic Newton-Schulz iteration in its dtype.

    The coefficients are those of Jordan et al. 2024, which are steepest at zero: values end up within 0.7 to 1.2 or so.

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
