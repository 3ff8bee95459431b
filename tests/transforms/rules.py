"""Every optimizer, on a tree with leaves of all kinds and a loss whose gradients are exact."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import functional_ds as fds
from functional_ds import comm

ROWS = 12


def galore(rank: int = 2, every: int = 2) -> Any:
    """GaLore (Zhao et al. 2024), as a user writes it: momentum in the space of the gradient's largest singular vectors."""

    def init(matrix: Tensor) -> Any:
        kept = min(rank, *matrix.shape)
        return {"basis": matrix.new_zeros(len(matrix), kept), "momentum": matrix.new_zeros(kept, matrix.shape[1])}

    def rule(grad: Tensor, state: Any, step: int) -> tuple[Tensor, Any]:
        renewed = step % every == 1
        basis = torch.linalg.svd(grad)[0][:, : state["basis"].shape[1]].contiguous() if renewed else state["basis"]
        momentum = 0.9 * state["momentum"] + basis.T @ grad
        return basis @ momentum, {"basis": basis, "momentum": momentum}

    return fds.per_matrix(init, rule, lr=0.02, others=fds.adamw(0.1), name="galore")


def shampoo(eps: float = 0.1) -> Any:
    """Shampoo (Gupta, Koren, Singer 2018), as a user writes it, with weight decay that looks at the matrix."""

    def root(matrix: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(matrix)
        return (vectors * values.clamp(min=eps) ** -0.25) @ vectors.T

    def init(matrix: Tensor) -> Any:
        return tuple(eps * torch.eye(size, dtype=matrix.dtype) for size in matrix.shape)

    def rule(grad: Tensor, state: Any, step: int, param: Tensor) -> tuple[Tensor, Any]:
        left, right = state[0] + grad @ grad.T, state[1] + grad.T @ grad
        return root(left) @ grad @ root(right) + 0.1 * param, (left, right)

    return fds.per_matrix(init, rule, lr=0.1, others=fds.lamb(0.1), matrices="^blocks", name="shampoo")


RULES: dict[str, Any] = {
    "adam": fds.adam(0.1, weight_decay=0.1),
    "adamw": fds.adamw(0.1, weight_decay=0.1),
    "adamw, matrices decay": fds.adamw(0.1, weight_decay=0.5, decay="w$"),
    "sgd": fds.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adagrad": fds.adagrad(0.1),
    "lion": fds.lion(0.1, weight_decay=0.1, decay=lambda path: "w" in path),
    "lamb": fds.lamb(0.1, weight_decay=0.1),
    "lamb, matrices decay": fds.lamb(0.1, weight_decay=0.1, decay="w$"),
    "muon": fds.muon(0.1, fds.adamw(0.1)),
    "muon, blocks": fds.muon(0.1, fds.lamb(0.1), matrices="^blocks", nesterov=False, adjust="match_rms_adamw"),
    "galore": galore(),
    "shampoo": shampoo(),
    "one for each": fds.param_groups({"^blocks.1": fds.sgd(0.1), "scale": fds.lion(0.1)}, fds.muon(0.1, fds.adagrad(0.1))),
}


def fresh() -> Any:
    """Matrices of all forms, a scalar, an empty leaf, complex numbers, integers and a frozen leaf; no two blocks alike."""
    generator = torch.Generator().manual_seed(5)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    blocks = [{"w": leaf(4 + i, 6 - i), "b": leaf(6 - i), "scale": leaf(), "frozen": leaf(3)} for i in range(3)]
    rest = {"embed.w": leaf(11, 3), "head.w": leaf(2, 7), "none": leaf(0, 3), "which": torch.arange(3)}
    return fds.freeze({"blocks": blocks, **rest, "wave": torch.complex(leaf(3), leaf(3))}, "frozen")


def linear(params: Any, batch: Tensor) -> fds.Weighted:
    """Its gradients are small integers, whatever the params: sums over rows are exact in any order, in bf16 too."""
    total = torch.zeros(())
    for i, leaf in enumerate(fds.tree.leaves(params)):
        if leaf.is_floating_point() or leaf.is_complex():
            count = torch.arange(leaf.numel(), device=leaf.device)
            factors = ((count * (batch[:, None] + i) + batch[:, None]) % 5 - 2).sum(0)
            product = leaf.reshape(-1) * factors.to(leaf.dtype)
            total = total + (product.real + product.imag if leaf.is_complex() else product).sum().float()
    return fds.Weighted(total, float(len(batch)))


def trained(rule: str, *strategy: fds.Transform, steps: int = 3, show: Callable[..., Any] = fds.Step.params) -> Any:
    step = fds.compose(*strategy)(fds.train_step(linear, RULES[rule]))
    state, here = step.init(fresh()), comm.world()
    for count in range(steps):
        rows = torch.arange(ROWS) * (count + 1) + 7 * count
        state, _ = step(state, rows.tensor_split(here.size)[here.rank])
    return show(step, state)


def assert_close(found: Any, expected: Any, tolerance: float) -> None:
    for (path, leaf), other in zip(fds.tree.named(found), fds.tree.leaves(expected), strict=True):
        torch.testing.assert_close(leaf, other, rtol=tolerance, atol=tolerance, msg=lambda text, path=path: f"{path}: {text}")
