"""What a step computes over its ranks follows from the axes that transforms declare."""

from typing import Any

import pytest
import torch
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.step.axes import axis
from functional_ds.step.over_ranks.mesh_axes import Axis, AxisRole, GradientParts


def data_parallel(group: comm.Group, **options: Any) -> fds.Transform:
    """Sums gradients in ``reduce``; all else follows from its axis."""

    def reduce(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> tuple[fds.State, fds.Weighted]:
        state, grads = inner(step, state, grads)
        return state, fds.tree.replace(grads, sum=comm.all_reduce(grads.sum, group))

    return fds.wrap("data_parallel", axes=[Axis(group, AxisRole.BATCH, summed_in="reduce", **options)], reduce=reduce)


def loss(params: dict[str, Tensor], x: Tensor) -> fds.Weighted:
    error = x @ params["w"]
    return fds.Weighted(error.square().sum(), error.numel())


def trained(strategy: Any, steps: int = 3) -> tuple[Tensor, Tensor, int]:
    """The params and the last loss after some steps, and the bytes of the last one."""
    step = fds.compose(*strategy())(fds.train_step(loss, fds.sgd(0.1)))
    state, here = step.init({"w": torch.arange(8.0).view(4, 2)}), comm.world()
    for number in range(steps):
        x = torch.randn(12, 4, generator=torch.Generator().manual_seed(number))
        with comm.ledger() as book:
            state, metrics = step(state, x.chunk(here.size)[here.rank])
    return step.params(state)["w"], metrics["loss"], book.bytes


def test_a_declared_axis_is_data_parallelism() -> None:
    """Loss, clipping and key's rows are those of one device, and of zero(0) with as many bytes."""
    alone = trained(lambda: [T.clip(0.1)])
    found = comm.simulate(trained, lambda: [data_parallel(comm.world()), T.clip(0.1)], world_size=4)
    zero = comm.simulate(trained, lambda: [T.zero(0), T.clip(0.1)], world_size=4)
    for (params, total, sent), (_, _, as_zero) in zip(found, zero, strict=True):
        torch.testing.assert_close((params, total), alone[:2])
        assert sent == as_zero


@pytest.mark.parametrize("axes", [["a", "b"], ["b", "a"]])
def test_shards_of_a_batch_count_the_first_axis_slowest(axes: list[str]) -> None:
    """As a mesh does; a sequence's axis among them counts not, wherever it is declared."""

    def program() -> list[tuple[int, int]]:
        mesh = comm.mesh(a=2, b=3)
        base = fds.train_step(loss, fds.sgd(0.1))
        data = [fds.wrap(name, axes=[Axis(mesh[name], AxisRole.BATCH)]) for name in axes]
        cut = fds.wrap("cut", axes=[Axis(mesh["b"], AxisRole.SEQUENCE)])
        steps = [fds.compose(*data)(base), fds.compose(*data, cut)(base), fds.compose(cut, *data)(base)]
        state = base.init({"w": torch.ones(3, 2)})
        return [step.batch_shard(state) for step in steps]

    for rank, (whole, after, before) in enumerate(comm.simulate(program, world_size=6)):
        a, b = divmod(rank, 3)
        assert whole == ((rank if axes == ["a", "b"] else b * 2 + a), 6)
        assert after == before == (a, 2)


def test_parts_count_once() -> None:
    """Norms and overflow of parts, of parts that two ranks share, of such as another rank counts, and of what all have."""

    def program() -> tuple[float, bool, bool]:
        group = comm.world()
        parts = GradientParts({0: 1, 1: 2, 2: 0 if group.rank else 1}, others=None, counts=(None, 1, 2))
        step = fds.wrap("divided", axes=[Axis(group, parts=lambda step, state: parts)])(fds.train_step(loss, fds.sgd(0.1)))
        state = step.init({"w": torch.ones(3, 2)})
        grads = [torch.full((1,), x) for x in (2.0 + group.rank, 4.0, 5.0, 6.0)]
        bad = [*grads[:3], torch.full((1,), float("inf") if group.rank else 0.0)]
        return step.norm(state, grads).item(), bool(step.finite(state, grads)), bool(step.finite(state, bad))

    exact = (2.0**2 + 3.0**2 + 4.0**2 + 5.0**2 + 6.0**2) ** 0.5
    assert comm.simulate(program, world_size=2) == [(pytest.approx(exact), True, False)] * 2


def test_functions_find_an_axis_by_its_name() -> None:
    seen: list[Any] = []

    def look(params: dict[str, Tensor], x: Tensor) -> Tensor:
        seen.append((axis("mine"), axis("other")))
        return (x @ params["w"]).sum()

    axes = [Axis(None, name="mine"), Axis(None, name="other", value="value")]
    step = fds.wrap("named", axes=axes)(fds.train_step(look, fds.sgd(0.1)))
    step(step.init({"w": torch.ones(3, 2)}), torch.ones(1, 3))
    assert seen == [(comm.world(), "value")]


def test_a_norm_of_gradients_that_the_optimizer_sums_is_refused() -> None:
    step = fds.wrap("mine", axes=[Axis(None, AxisRole.BATCH, summed_in="update")])(fds.train_step(loss, fds.sgd(0.1)))
    state = step.init({"w": torch.ones(3, 2)})
    assert step.leaf_map(state).reduce_group == comm.world()
    with pytest.raises(ValueError, match="mine: no rank has the whole gradient, so it has no norm"):
        step.norm(state, [torch.ones(3, 2)])
