"""Hessian spectrum: the extreme eigenvalues during training, by Lanczos iteration under ZeRO-3.

Lanczos needs products with the Hessian alone (Ghorbani et al. 2019, arXiv:1901.10159): the eigenvalues of a small tridiagonal
matrix approach the largest and the smallest of the Hessian's. Here the params and gradients are in shards.

Law: on a model that is small enough, the extreme values are those of the whole Hessian, with ZeRO-3 and without.
"""

from typing import Any

import torch
from shared import first, hessian_times, loss_fn, rows, table
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T


def lanczos(step: fds.Step, state: fds.State, batch: Any, rounds: int) -> Tensor:
    """Approximate eigenvalues, in rising order. The vectors are made orthogonal twice in each round."""
    shapes = {path: leaf.shape for path, leaf in step.params(state).items()}
    generator, dtype = torch.Generator().manual_seed(0), step.params(state)["head"].dtype
    vector = torch.randn(sum(shape.numel() for shape in shapes.values()), generator=generator, dtype=dtype)
    vector, basis = vector / vector.norm(), []
    matrix = torch.zeros(rounds, rounds, dtype=dtype)
    for k in range(rounds):
        basis.append(vector)
        parts = vector.split([shape.numel() for shape in shapes.values()])
        whole = {path: part.view(shape) for (path, shape), part in zip(shapes.items(), parts, strict=True)}
        product = hessian_times(step, state, batch, whole)
        vector = torch.cat([product[path].flatten() for path in shapes])
        matrix[k, k] = vector @ basis[k]
        known = torch.stack(basis)
        for _ in range(2):
            vector = vector - known.T @ (known @ vector)
        if k + 1 < rounds:
            matrix[k, k + 1] = matrix[k + 1, k] = vector.norm()
            vector = vector / vector.norm()
    return torch.linalg.eigvalsh(matrix)


def law() -> None:
    """The extreme eigenvalues are the Hessian's."""
    params = {"a": torch.randn(3, 4, dtype=torch.float64), "head": torch.randn(4, 2, dtype=torch.float64)}
    x = torch.randn(8, 3, dtype=torch.float64)

    def loss(params: Any, x: Tensor) -> Tensor:
        return (torch.tanh(x @ params["a"]) @ params["head"]).square().mean()

    def program(*strategy: fds.Transform) -> Tensor:
        step, here = fds.compose(*strategy)(fds.train_step(loss, fds.sgd(0.1))), comm.world()
        return lanczos(step, step.init(params), x.chunk(here.size)[here.rank], 20)

    flat = torch.cat([params["a"].flatten(), params["head"].flatten()])
    whole = torch.autograd.functional.hessian(lambda f: loss({"a": f[:12].view(3, 4), "head": f[12:].view(4, 2)}, x), flat)
    wanted = torch.linalg.eigvalsh(whole)[[0, -1]]
    for found in (program(), *comm.simulate(program, T.zero(3), world_size=2)):
        torch.testing.assert_close(found[[0, -1]], wanted, rtol=1e-6, atol=1e-8)


def run(steps: int, every: int, rounds: int) -> list[tuple[int, float, float, float]]:
    """Loss and spectrum during training, of one rank."""
    step = T.zero(3)(fds.train_step(loss_fn, fds.sgd(0.3, momentum=0.9)))
    state, lines = step.init(first()), []
    for index in range(steps + 1):
        if index % every == 0:
            values = lanczos(step, state, rows(10**6, count=256), rounds)
            loss = step.evaluate(state, rows(10**6, count=256)).item()
            lines.append((index, loss, values[-1].item(), values[0].item()))
        state, _ = step(state, rows(index))
    return lines


def main(steps: int = 120, every: int = 30, rounds: int = 16, ranks: int = 2) -> str:
    """The largest and the smallest eigenvalue every so many steps."""
    return table(["step", "loss", "largest", "smallest"], comm.simulate(run, steps, every, rounds, world_size=ranks)[0])


TINY = {"steps": 2, "every": 2, "rounds": 2}

if __name__ == "__main__":
    law()
    print(main())
