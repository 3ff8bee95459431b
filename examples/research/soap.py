"""SOAP and Muon: two optimizers that see whole matrices, beside AdamW, in ZeRO-3.

SOAP (Vyas et al. 2024, arXiv:2409.11321) is Adam in the basis of the eigenvectors of Shampoo's statistics, which it follows
by a QR decomposition every few updates. Muon (Liu et al. 2025, arXiv:2502.16982) takes the nearest orthogonal matrix to the
momentum. Each needs a matrix whole, and in ZeRO-3 no rank has one: ``fds.per_matrix`` brings each to the rank that has most
of it.

Law: alone and in stages 0 to 3 it is a plain loop of PyTorch in fp64.
"""

from typing import Any

import torch
from shared import assert_everywhere, first, loss_fn, rows, table, train, validation
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T

MATRICES = "^(hidden|head)$"


def soap(lr: float, every: int, betas: tuple[float, float] = (0.95, 0.95), eps: float = 1e-8) -> Any:
    """SOAP for two matrices, AdamW for all else."""

    def init(matrix: Tensor) -> dict[str, Any]:
        eye = [torch.eye(size, dtype=matrix.dtype) for size in matrix.shape]
        zeros = torch.zeros_like(matrix)
        return {"stats": [1e-6 * e for e in eye], "bases": eye, "mean": zeros, "square": zeros.clone()}

    def rule(grad: Tensor, state: dict[str, Any], step: int) -> tuple[Tensor, dict[str, Any]]:
        products = (grad @ grad.T, grad.T @ grad)
        stats = [old.lerp(new, 1 - betas[1]) for old, new in zip(state["stats"], products, strict=True)]
        left, right = state["bases"]
        if step % every == 1:  # one step of power iteration
            left, right = (torch.linalg.qr(stat @ basis).Q for stat, basis in zip(stats, (left, right), strict=True))
        mean = state["mean"].lerp(grad, 1 - betas[0])
        square = state["square"].lerp((left.T @ grad @ right) ** 2, 1 - betas[1])
        turned = left.T @ mean @ right / (1 - betas[0] ** step)
        change = left @ (turned / ((square / (1 - betas[1] ** step)).sqrt() + eps)) @ right.T
        return change, {"stats": stats, "bases": [left, right], "mean": mean, "square": square}

    return fds.per_matrix(init, rule, lr=lr, others=fds.adamw(lr), matrices=MATRICES, name="soap")


def oracle(steps: int, lr: float, every: int, beta: float = 0.95, eps: float = 1e-3) -> dict[str, Tensor]:
    """The params after some updates: the same mathematics in fp64 on whole params; ``embed`` and ``bias`` stay."""
    params = {path: leaf.double() for path, leaf in first().items()}
    kept: dict[str, list[Tensor]] = {}
    for index in range(steps):
        leaves = {path: leaf.requires_grad_() for path, leaf in params.items()}
        grads = dict(
            zip(leaves, torch.autograd.grad(loss_fn(leaves, rows(index, rank=0, size=1)), [*leaves.values()]), strict=True)
        )
        params = {path: leaf.detach() for path, leaf in params.items()}
        for path in ("hidden", "head"):
            grad, (m, n), t = grads[path], grads[path].shape, index + 1
            eyes = [torch.eye(size, dtype=grad.dtype) for size in (m, n)]
            stat_l, stat_r, left, right, mean, square = kept.get(path) or [
                1e-6 * eyes[0],
                1e-6 * eyes[1],
                *eyes,
                0 * grad,
                0 * grad,
            ]
            stat_l, stat_r = beta * stat_l + (1 - beta) * grad @ grad.T, beta * stat_r + (1 - beta) * grad.T @ grad
            if t % every == 1:
                left, right = torch.linalg.qr(stat_l @ left).Q, torch.linalg.qr(stat_r @ right).Q
            mean = beta * mean + (1 - beta) * grad
            square = beta * square + (1 - beta) * (left.T @ grad @ right) ** 2
            way = (left.T @ mean @ right) / (1 - beta**t) / ((square / (1 - beta**t)).sqrt() + eps)
            params[path] = params[path] - lr * left @ way @ right.T
            kept[path] = [stat_l, stat_r, left, right, mean, square]
    return {path: leaf.float() for path, leaf in params.items() if path in kept}


def law() -> None:
    """SOAP is its formula, wherever its matrices lie."""

    def program(*strategy: fds.Transform) -> Any:
        still = fds.param_groups({MATRICES: soap(0.01, 2, eps=1e-3)}, fds.sgd(0.0))
        params, _ = train(*strategy, optimizer=still, steps=3)
        return {path: params[path] for path in ("hidden", "head")}

    assert_everywhere(program, oracle(3, 0.01, 2), rtol=1e-3, atol=2e-4)


def run(optimizer: Any, steps: int) -> tuple[float, int]:
    """The validation loss, and the bytes that this rank sent."""
    params, sent = train(T.zero(3), optimizer=optimizer, steps=steps)
    return validation(params), sent


def main(steps: int = 100, ranks: int = 2) -> str:
    """The loss of each, with its best learning rate of a few, and the bytes."""
    adam = fds.adamw(1e-2)
    methods = {
        "AdamW": lambda scale: fds.adamw(1e-2 * scale),
        "Muon": lambda scale: fds.muon(0.05 * scale, adam, matrices=MATRICES, weight_decay=0.0, dtype=torch.float32),
        "SOAP, every 10": lambda scale: soap(1e-2 * scale, 10),
    }
    lines = []
    for name, make in methods.items():
        found = [comm.simulate(run, make(scale), steps, world_size=ranks)[0] for scale in (0.5, 1.0, 2.0)]
        losses = [loss for loss, _ in found]
        lines.append((name, *losses, f"{found[0][1]:,}"))
    return table([f"{ranks} ranks, {steps} steps", "loss, rate / 2", "rate", "rate x 2", "bytes a rank"], lines)


TINY = {"steps": 2}

if __name__ == "__main__":
    law()
    print(main())
