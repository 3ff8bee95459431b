"""Compressed gradients: PowerSGD, top-k and signs in one picture of loss against bytes.

Each rank sends less than its gradient, and adds what it has left out to its next one (error feedback): two thin factors of
each matrix (PowerSGD, Vogels et al. 2019, arXiv:1905.13727), or the largest elements (top-k, Stich et al. 2018,
arXiv:1809.07599), which can go between replicas, each with ZeRO over its own ranks. Or it sends a sign an element, and the
majority decides (signSGD, Bernstein et al. 2018, arXiv:1810.05291). The bytes are the ledger's.

Law: factors of full rank and all elements give the plain mean of the gradients; with loss, all ranks still have equal bits; a
vote of two ranks moves only where both agree.
"""

from typing import Any

import torch
from shared import first, loss_fn, rows, table, train, validation
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.step import Axis, AxisRole


def power_sgd(rank: int) -> fds.Transform:
    """Two factors of each matrix's gradient, by one step of subspace iteration; vectors go as they are."""

    def init(leaves: list[Tensor], group: comm.Group) -> list[Any]:
        def of(leaf: Tensor) -> Any:
            right = torch.randn(leaf.shape[-1], min(rank, *leaf.shape), generator=torch.Generator().manual_seed(0))
            return {"owed": torch.zeros_like(leaf), "right": right}

        return [of(leaf) if leaf.dim() == 2 else None for leaf in leaves]

    def compressed(grad: Tensor, kept: Any, group: comm.Group) -> tuple[Tensor, Any]:
        if kept is None:
            return comm.all_reduce(grad, group, op="avg"), None
        grad = grad + kept["owed"]
        left = torch.linalg.qr(comm.all_reduce(grad @ kept["right"], group, op="avg")).Q
        right = comm.all_reduce(grad.T @ left, group, op="avg")
        return left @ right.T, {"owed": grad - left @ right.T, "right": right}

    def reduce(grads: list[Tensor], memory: list[Any], group: comm.Group) -> tuple[list[Tensor], list[Any]]:
        found = [compressed(grad, kept, group) for grad, kept in zip(grads, memory, strict=True)]
        return [grad for grad, _ in found], [kept for _, kept in found]

    return T.replicated(reduce=reduce, init=init, slot="power_sgd", name=f"power_sgd({rank})")


def top_k_between(replicas: comm.Group, keep: float) -> fds.Transform:
    """Sums the largest elements that each replica's ``T.zero`` has: in stages 1 to 3 those of shards, another method."""

    def init(inner: Any, step: fds.Step, params: Any) -> fds.State:
        state = inner(step, params)
        return state.put(top_k=[torch.zeros_like(leaf) for leaf in step.trained(state)])

    def reduce(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        state, grads = inner(step, state, grads)
        owed = [grad.view_as(old) + old for grad, old in zip(grads.sum, state.slots["top_k"], strict=True)]
        least = [x.abs().flatten().topk(max(1, round(keep * x.numel()))).values[-1] for x in owed]
        sent = [torch.where(x.abs() < limit, 0, x) for x, limit in zip(owed, least, strict=True)]
        state = state.put(top_k=[x - part for x, part in zip(owed, sent, strict=True)])
        return state, fds.Weighted(comm.all_reduce(sent, replicas), grads.weight)

    axes = [Axis(replicas, AxisRole.BATCH, summed_in="reduce")]
    return fds.wrap(f"top_k({keep})", slot="top_k", axes=axes, init=init, reduce=reduce)


def vote() -> fds.Transform:
    """The sign of the sum of the ranks' signs, in a byte each."""

    def reduce(grads: list[Tensor], memory: Any, group: comm.Group) -> tuple[list[Tensor], Any]:
        signs = comm.all_reduce([grad.sign().to(torch.int8) for grad in grads], group)
        return [total.sign().to(grad.dtype) for total, grad in zip(signs, grads, strict=True)], memory

    return T.replicated(reduce=reduce, name="vote")


def run(strategy: fds.Transform, optimizer: Any, steps: int) -> tuple[float, int]:
    """The validation loss, and the bytes that a rank sent."""
    params, sent = train(strategy, optimizer=optimizer, steps=steps)
    return validation(params), sent


def law() -> None:
    """Without loss they are the plain mean; with loss, all ranks still have the same params."""

    def program(strategy: fds.Transform, steps: int = 2) -> Any:
        return train(strategy, optimizer=fds.sgd(0.1), steps=steps)[0]

    (wanted, _) = comm.simulate(program, T.zero(0), world_size=2)
    for exact in (power_sgd(256), T.compressed_gradients(comm.codecs.TopK(1.0))):
        torch.testing.assert_close(comm.simulate(program, exact, world_size=2)[0], wanted, rtol=1e-4, atol=1e-5)
    for lossy in (power_sgd(1), T.compressed_gradients(comm.codecs.TopK(0.1)), vote()):
        one, other = comm.simulate(program, lossy, world_size=2)
        assert all(torch.equal(one[path], other[path]) for path in first())

    def between(stage: int, keep: float) -> Any:
        mesh = comm.mesh(replicas=2, inner=2)
        return program(fds.compose(T.zero(stage, mesh["inner"]), top_k_between(mesh["replicas"], keep)))

    for stage in range(4):
        for found in comm.simulate(between, stage, 1.0, world_size=4):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        lossy_runs = comm.simulate(between, stage, 0.1, world_size=4)
        assert all(torch.equal(lossy_runs[0][path], run[path]) for run in lossy_runs for path in wanted)

    def slopes() -> dict[str, Tensor]:
        params = {path: leaf.requires_grad_() for path, leaf in first().items()}
        return dict(zip(params, torch.autograd.grad(loss_fn(params, rows(0)), [*params.values()]), strict=True))

    one, other = comm.simulate(slopes, world_size=2)
    voted = comm.simulate(program, vote(), 1, world_size=2)[0]
    for path, start in first().items():
        agreed = (one[path].sign() + other[path].sign()).sign()
        torch.testing.assert_close(voted[path], start - 0.1 * agreed)


def main(steps: int = 150, ranks: int = 4) -> str:
    """Loss and bytes of each."""
    heavy = fds.sgd(0.3, momentum=0.9)
    methods = {
        "fp32 mean": (T.zero(0), heavy),
        "PowerSGD, rank 8": (power_sgd(8), heavy),
        "PowerSGD, rank 2": (power_sgd(2), heavy),
        "top 1/16": (T.compressed_gradients(comm.codecs.TopK(1 / 16)), heavy),
        "top 1/64": (T.compressed_gradients(comm.codecs.TopK(1 / 64)), heavy),
        "votes of signs": (vote(), fds.sgd(2e-3)),
    }
    lines = []
    for name, (strategy, optimizer) in methods.items():
        loss, sent = comm.simulate(run, strategy, optimizer, steps, world_size=ranks)[0]
        lines.append((name, loss, f"{sent:,}"))
    return table([f"{ranks} ranks, {steps} steps", "loss", "bytes a rank"], lines)


TINY = {"steps": 2, "ranks": 2}

if __name__ == "__main__":
    law()
    print(main())
