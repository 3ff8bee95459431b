"""Jitted steps on real processes whose groups cross, and regions that inductor compiles: law 58."""

from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.compiling.jitted.graph_agreement import rank_collectives
from tests.compiling.test_jit import blocks, run
from tests.compiling.test_jit_backends import needs_compiler

WIDE = 8
Told = tuple[list[str], list[Tensor], list[str], list[Any]]


def crossed(stage: int, jits: bool) -> Told:
    """Losses, the state's leaves, reasons and the groups of the graph, on a mesh of tensor and data parallelism."""
    mesh = comm.mesh(dp=2, tp=2)

    def loss(p: Any, x: Tensor) -> Tensor:
        for name in ("first", "second"):
            (hidden,) = fds.tp.column(x, [p[name]["up"]])
            x = fds.tp.row(hidden.tanh(), p[name]["down"])
        return x.square().mean()

    draws = torch.Generator().manual_seed(0)
    block = {"up": (2 * WIDE, WIDE), "down": (WIDE, 2 * WIDE)}
    params = {
        name: {leaf: torch.randn(shape, generator=draws) / 4 for leaf, shape in block.items()} for name in ("first", "second")
    }
    plan = {f"{name}.{leaf}": way for name in params for leaf, way in (("up", "colwise"), ("down", "rowwise"))}
    strategy = fds.compose(T.zero(stage, mesh["dp"]), T.clip(1.0), T.tensor_parallel(plan, mesh["tp"]))
    step = strategy(fds.train_step(loss, fds.adamw(0.05)))
    step = fds.jit(step) if jits else step
    state, losses = step.init(params), []
    for i in range(3):
        x = torch.randn(4, WIDE, generator=torch.Generator().manual_seed(2 * i + mesh.coordinates["dp"]))
        state, metrics = step(state, x)
        losses.append(repr(metrics["loss"].item()))
    groups = []
    if jits:
        graph = step.graph(state, x)
        groups = rank_collectives(list(graph.module.graph.nodes), graph.sites, comm.world().rank).groups
    return losses, [leaf for leaf in fds.tree.leaves(state) if isinstance(leaf, Tensor)], step.reasons if jits else [], groups


def both(stages: tuple[int, ...]) -> list[tuple[Told, Told]]:
    return [(crossed(stage, True), crossed(stage, False)) for stage in stages]


@pytest.mark.law(58)
def test_groups_that_cross() -> None:
    """Tensor parallelism beside data parallelism: each rank's graph has collectives on two groups that share no other rank."""
    for rank, runs in enumerate(comm.spawn(both, (3,), world_size=4, timeout=timedelta(minutes=2))):
        for (losses, leaves, reasons, groups), (their_losses, theirs, _, _) in runs:
            assert reasons == []
            assert losses == their_losses
            assert all(map(torch.equal, leaves, theirs))
            members = {ranks for _, ranks, _ in groups}
            assert {(rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)} <= members


@needs_compiler
@pytest.mark.law(58)
@pytest.mark.parametrize("stage", [0, 3])
def test_inductor_in_each_stage(stage: int) -> None:
    """Values within rounding, and the same payloads."""

    def program() -> tuple[Any, Any]:
        make = partial(blocks, count=2)
        return run(True, [T.zero(stage)], make, backend="inductor"), run(False, [T.zero(stage)], make)

    for found, expected in comm.simulate(program, world_size=2):
        assert found[2] == []
        assert found[3] == expected[3]
        for leaf, other in zip(found[1], expected[1], strict=True):
            if isinstance(leaf, Tensor):
                torch.testing.assert_close(leaf, other, rtol=2e-6, atol=2e-6)
