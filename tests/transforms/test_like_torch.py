"""What a step does beside its model is plain PyTorch's: clipping, micro-batches, random draws, overflows of sums over ranks."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm
from functional_ds import pipelining as pp
from functional_ds import transforms as T
from functional_ds.base.batch import micro_rows, split
from functional_ds.base.tree import rows_of

# -- clip ----------------------------------------------------------------------------------------------------------------


def clipped_by_torch(params: list[Tensor], grads: list[Tensor], limit: float) -> tuple[list[Tensor], Tensor]:
    own = [p.clone().requires_grad_() for p in params]
    for p, g in zip(own, grads, strict=True):
        p.grad = g.clone()
    norm = nn.utils.clip_grad_norm_(own, limit)
    torch.optim.SGD(own, lr=1.0).step()
    return [p.detach() for p in own], norm


@pytest.mark.sample(11)
@pytest.mark.law(27)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("limit", [1e-6, 1e-3, 0.5, 1e3])
@pytest.mark.parametrize("stage", [None, 0, 2, 3])
def test_clip_is_torchs(dtype: torch.dtype, limit: float, stage: int | None) -> None:
    """The same norm and the same params, small norms and limits included; in fp64 to the bit on one device."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 3), (7,), (2, 2)]
    params = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    exact = stage is None and dtype == torch.float64
    rtol = 0.0 if exact else 1e-12 if dtype == torch.float64 else 1e-6

    def program(grads: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        transforms = [] if stage is None else [T.zero(stage)]
        base = fds.train_step(lambda p, batch: sum((x * g).sum() for x, g in zip(p, batch, strict=True)), fds.sgd(1.0))
        step = fds.compose(*transforms, T.clip(limit))(base)
        state, metrics = step(step.init(params), grads)
        return step.params(state), metrics["grad_norm"]

    for size in (1e-7, 1e-3, 10.0):
        grads = [torch.randn(shape, dtype=dtype, generator=generator) * size for shape in shapes]
        expected, norm = clipped_by_torch(params, grads, limit)
        for found, total in comm.simulate(program, grads, world_size=1 if stage is None else 2):
            torch.testing.assert_close(total, norm, rtol=rtol, atol=0.0)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=rtol, atol=0.0)


# -- micro-batches ---------------------------------------------------------------------------------------------------------


def test_what_has_no_rows_goes_with_every_micro_batch() -> None:
    batch = {
        "x": torch.arange(6),
        "two": torch.arange(12),
        "one": torch.ones(1, 4),
        "scalar": torch.tensor(2.0),
        "k": 3,
        "s": "a",
    }
    parts = split(batch, 3)
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert [len(part["two"]) for part in parts] == [4, 4, 4]
    for part in parts:
        assert part["one"] is batch["one"]
        assert part["scalar"] is batch["scalar"]
        assert (part["k"], part["s"]) == (3, "a")
    assert rows_of(batch) == 6
    assert micro_rows(batch, 4) == [2, 2, 1, 1]
    with pytest.raises(ValueError, match=r"has no rows to split into 2 micro-batches"):
        split({"scalar": torch.tensor(2.0), "k": 3}, 2)
    with pytest.raises(ValueError, match=r"the leaf at 'x' has 1 rows, which do not divide into 2"):
        split({"x": torch.ones(1, 3)}, 2)
    with pytest.raises(ValueError, match=r"the leaf at 'y' has 0 rows, too few for 2"):
        split({"x": torch.ones(4), "y": torch.ones(0, 2)}, 2)


@pytest.mark.law(23)
@pytest.mark.parametrize("stage", [None, 2, 3])
def test_accumulate_with_leaves_without_rows(stage: int | None) -> None:
    """A mask for all rows, a temperature and a number: micro-batches get them whole, so the step is the whole batch's."""
    torch.manual_seed(0)
    module = nn.Linear(6, 3)
    apply, params = fds.functional(copy.deepcopy(module))
    batch = (torch.randn(8, 6), torch.tensor([[1.0, 0.0, 1.0]]), torch.tensor(0.5), 3)

    def loss(call: Any, given: Any) -> Tensor:
        x, mask, temperature, power = given
        return ((call(x) * mask / temperature) ** power).mean()

    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loss(module, batch).backward()
    optimizer.step()

    def program() -> dict[str, Tensor]:
        transforms = [] if stage is None else [T.zero(stage)]
        step = fds.compose(*transforms, T.accumulate(2))(
            fds.train_step(lambda p, given: loss(lambda x: apply(p, x), given), fds.sgd(0.1))
        )
        state = step.init(params)
        index, count = step.batch_shard(state)
        state, _ = step(state, (batch[0].chunk(count)[index], *batch[1:]))
        return dict(fds.tree.named(step.params(state)))

    for found in comm.simulate(program, world_size=1 if stage is None else 2):
        for path, leaf in module.named_parameters():
            torch.testing.assert_close(found[path], leaf.detach())


def test_a_pipeline_with_leaves_without_rows() -> None:
    params = [{"w": torch.tensor(2.0)}, {"w": torch.tensor(3.0)}]
    batch = {"x": torch.arange(1.0, 9.0), "scale": torch.tensor([0.5]), "t": torch.tensor(2.0)}

    def program(world: bool) -> list[float]:
        model = pp.stages(
            [lambda p, x: x * p["w"], lambda p, x: x * p["w"]],
            params,
            inputs=lambda batch: batch["x"] * batch["scale"],
            loss=lambda y, batch: (y / batch["t"]).square().mean(),
        )
        step = fds.train_step(model, fds.sgd(0.001))
        step = T.pipeline(pp.one_f_one_b(2, 4), model)(step) if world else step
        state, _ = step(step.init(params), batch)
        return [leaf.item() for leaf in fds.tree.leaves(step.params(state))]

    (expected,) = comm.simulate(program, False, world_size=1)
    for found in comm.simulate(program, True, world_size=2):
        assert found == pytest.approx(expected)


# -- draws -----------------------------------------------------------------------------------------------------------------


@pytest.mark.law(29)
@pytest.mark.parametrize("sizes", [(5, 4), (1, 2, 6), (9, 0), (3, 3, 3), (4, 5)])
@pytest.mark.parametrize("stage", [0, 3])
def test_draws_do_not_depend_on_how_many_rows_ranks_have(sizes: tuple[int, ...], stage: int) -> None:
    """5 + 4 rows draw what 9 rows draw."""
    x = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))

    def loss(p: Any, rows: Tensor, key: fds.Key | None) -> fds.Weighted:
        assert key is not None
        return fds.Weighted((key.dropout(rows, 0.5, "in") @ p["w"]).square().sum(), len(rows))

    def program(sizes: tuple[int, ...]) -> Tensor:
        step = T.zero(stage)(fds.train_step(loss, fds.sgd(0.1), seed=3))
        state = step.init({"w": torch.ones(4, 2)})
        for _ in range(2):
            state, _ = step(state, x.split(sizes)[comm.world().rank])
        return step.params(state)["w"]

    (expected,) = comm.simulate(program, (9,), world_size=1)
    for found in comm.simulate(program, sizes, world_size=len(sizes)):
        torch.testing.assert_close(found, expected)


def test_draws_with_micro_batches_and_leaves_of_one_row() -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))

    def loss(p: Any, given: Any, key: fds.Key | None) -> fds.Weighted:
        assert key is not None
        rows, scale = given
        return fds.Weighted((key.dropout(rows * scale, 0.5, "in") @ p["w"]).square().sum(), len(rows))

    def program(n: int, k: int) -> Tensor:
        step = fds.compose(T.zero(1), T.accumulate(k))(fds.train_step(loss, fds.sgd(0.01), seed=3))
        state = step.init({"w": torch.ones(4, 2)})
        state, _ = step(state, (x.chunk(n)[comm.world().rank], torch.ones(1, 4)))
        return step.params(state)["w"]

    (expected,) = comm.simulate(program, 1, 1, world_size=1)
    for n, k in ((1, 8), (2, 4), (2, 2)):
        for found in comm.simulate(program, n, k, world_size=n):
            torch.testing.assert_close(found, expected)


def test_who_draws_nothing_sends_nothing_for_it() -> None:
    def calls(draws: bool) -> int:
        def loss(p: Any, rows: Tensor) -> Tensor:
            return (rows @ p["w"]).square().mean()

        def drawn(p: Any, rows: Tensor, key: fds.Key | None) -> Tensor:
            return loss(p, rows)

        step = T.zero(1)(fds.train_step(drawn if draws else loss, fds.sgd(0.1)))
        state = step.init({"w": torch.ones(4, 2)})
        with comm.ledger() as book:
            step(state, torch.ones(2, 4))
        return sum(row.calls for row in book.rows)

    assert comm.simulate(calls, True, world_size=2)[0] == comm.simulate(calls, False, world_size=2)[0] + 1


# -- overflows -------------------------------------------------------------------------------------------------------------


def overflows(gain: float, stage: int | None, weighted: bool, initial: float = 2.0**14) -> tuple[list[Any], list[Tensor]]:
    """Skipped steps and scales of ten steps, and the params after them."""
    torch.manual_seed(0)
    apply, params = fds.functional(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    rows = torch.randn(16, 8)

    def loss(p: Any, x: Tensor) -> Any:
        found = (apply(p, x) * gain).square()
        return fds.Weighted(found.sum(), len(x)) if weighted else found.mean()

    precision = T.mixed_precision("fp16", T.DynamicScale(initial, window=3, hysteresis=1))
    step = fds.compose(precision, *([] if stage is None else [T.zero(stage)]))(fds.train_step(loss, fds.sgd(1e-6)))
    state, found = step.init(params), []
    index, count = step.batch_shard(state)
    for _ in range(10):
        state, metrics = step(state, rows.chunk(count)[index])
        found.append((metrics["skipped"].item(), metrics["loss_scale"].item()))
    return found, fds.tree.leaves(step.params(state))


@pytest.mark.sample(3)
@pytest.mark.law(25)
@pytest.mark.parametrize("gain", [3.0, 10.0, 40.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("n", [2, 4])
def test_fp16_overflows_at_the_steps_of_one_device(gain: float, weighted: bool, n: int) -> None:
    """A rank computes its share of the mean, so its gradients, and their sums over ranks, are as large as one device's."""
    gain = gain / 8 if weighted else gain
    for initial in (2.0**14, 2.0**16):
        expected, params = overflows(gain, None, weighted, initial)
        for stage in (0, 2, 3):
            for found, moved in comm.simulate(overflows, gain, stage, weighted, initial, world_size=n):
                assert found == expected
                for one, other in zip(moved, params, strict=True):
                    torch.testing.assert_close(one, other)
