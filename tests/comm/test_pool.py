"""Pooled buffers are used again when nothing refers to their memory, not before; and ZeRO reads nothing from one."""

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.comm.backends.pool import Pool
from tests.planting import Bug, planted

CPU, WIDTH, LAYERS = torch.device("cpu"), 160, 4
EARLY = Bug("buffers are free while tensors lie in them", "comm.backends.pool:Pool.take", "storage.expired()", "True")


def _numbers_stay(sizes: list[tuple[int, bool]]) -> bool:
    """Tensors of a pool, some of them kept, some as views: whether each keeps its number."""
    pool, kept = Pool(), list[Tensor]()
    for number, (size, keeps) in enumerate(sizes):
        taken = pool.take(size * 2**15, torch.float32, CPU)
        assert taken is not None
        taken.fill_(number)
        if keeps:
            kept.append(taken[number:].view(-1, 1) if number % 2 else taken)
    numbers = [number for number, (_, keeps) in enumerate(sizes) if keeps]
    return all(bool((one == number).all()) for one, number in zip(kept, numbers, strict=True))


@pytest.mark.law
@given(st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=8))
def test_what_is_kept_stays(sizes: list[tuple[int, bool]]) -> None:
    assert _numbers_stay(sizes)


def test_a_buffer_that_is_free_too_early_is_found() -> None:
    with planted(EARLY):
        assert not _numbers_stay([(1, True), (1, True)])


def test_who_keeps_a_buffer() -> None:
    """Views, arrays and what autograd has saved; and it is free with the last of them."""
    pool, shape = Pool(), (2**16, torch.float32, CPU)
    first = pool.take(*shape)
    assert first is not None
    place, array = first.data_ptr(), first.numpy()
    squares = (torch.ones_like(first).requires_grad_() * first).sum()
    del first
    other = pool.take(*shape)
    assert other is not None
    assert other.data_ptr() != place
    del array, other
    squares.backward()
    del squares
    pair = [pool.take(*shape), pool.take(*shape)]
    assert place in [each.data_ptr() for each in pair if each is not None]
    assert pool.bytes == 2 * 2**18


def test_copies_of_a_pool_are_empty() -> None:
    pool = Pool()
    assert pool.take(2**16, torch.float32, CPU) is not None
    assert copy.deepcopy(pool).bytes == pickle.loads(pickle.dumps(pool)).bytes == 0
    assert pool.take(3, torch.float32, CPU) is pool.take(2**16, torch.float32, torch.device("meta")) is None


def _loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    for weight in params.values():
        x = torch.tanh(x @ weight)
    return x.square().mean()


def _trained(stage: int, poisons: bool) -> tuple[list[Tensor], list[int]]:
    """The params after four steps, and the pool's bytes after each; poisoned buffers are NaN when they are taken."""
    take: Any = Pool.take
    if poisons:

        def poisoned(pool: Pool, *shape: Any) -> Any:
            found = take(pool, *shape)
            return found if found is None else found.fill_(torch.nan)

        Pool.take = poisoned  # type: ignore[method-assign]
    try:
        draw = torch.Generator().manual_seed(0)
        params = {f"{i}.w": torch.randn(WIDTH, WIDTH, generator=draw) / WIDTH**0.5 for i in range(LAYERS)}
        step = fds.compose(T.zero(stage), T.accumulate(2))(fds.train_step(_loss, fds.adamw(0.01)))
        state, sizes = step.init(params), list[int]()
        for _ in range(4):
            x = torch.randn(4, WIDTH, generator=draw) + comm.world().rank
            state, metrics = step(state, x)
            assert not metrics["loss"].isnan()
            sizes.append(state.slots["zero"].cache.pool.bytes)
        return fds.tree.leaves(step.params(state)), sizes
    finally:
        Pool.take = take  # type: ignore[method-assign]


def _both(stage: int) -> tuple[list[Tensor], list[int]]:
    params, sizes = _trained(stage, False)
    again, _ = _trained(stage, True)
    assert all(map(torch.equal, params, again))
    return params, sizes


def _stages() -> list[tuple[list[Tensor], list[int]]]:
    return [_both(stage) for stage in (1, 2, 3)]


def test_zero_reads_nothing_that_it_has_not_written() -> None:
    """On processes, where buffers are pooled: as simulated, where none is; and the pool does not grow after two steps."""
    found = comm.spawn(_stages, world_size=2)[0]
    for stage, (params, sizes) in zip((1, 2, 3), found, strict=True):
        expected, none = comm.simulate(_trained, stage, False, world_size=2)[0]
        assert all(map(torch.equal, params, expected))
        assert none == [0] * 4
        assert 0 < sizes[1] == sizes[3] <= 8 * 4 * WIDTH**2
