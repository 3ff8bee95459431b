"""ZeRO with compressed collectives: which values the loss sees, which the optimizer has, and what is sent."""

from functools import cache
from math import ceil
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_ds as fds
from functional_ds import comm, transforms
from functional_ds.testing import assert_same
from tests.transforms.models import CASES, own_rows, run

SHARDED = (1, 2, 3)


def narrow(stage: int, codec: comm.codecs.Codec) -> dict[str, Any]:
    """All of a stage's collectives, compressed."""
    names = ("all_gather", "reduce_scatter") if stage else ("all_reduce",)
    return {name: comm.codecs.compressed(getattr(comm, name), codec) for name in names}


# -- nothing is lost --------------------------------------------------------------------------------------------------


@pytest.mark.law(38)
@given(
    name=st.sampled_from(sorted(CASES)),
    stage=st.sampled_from((0, *SHARDED)),
    n=st.sampled_from((2, 3, 4)),
    k=st.sampled_from((1, 2)),
    codec=st.sampled_from((comm.codecs.Cast(torch.float64), comm.codecs.TopK(1.0))),
    seed=st.integers(0, 99),
)
def test_a_lossless_codec_changes_nothing(name: str, stage: int, n: int, k: int, codec: comm.codecs.Codec, seed: int) -> None:
    """zero(k) with compressed(·, id) = zero(k), bitwise: any model, stage, n, micro-batches, interleaving."""

    def program(**collectives: Any) -> Any:
        return run(CASES[name], (transforms.zero(stage, **collectives), transforms.accumulate(k)), rows=2 * n * k, steps=2)

    for found, expected in zip(
        comm.simulate(lambda: program(**narrow(stage, codec)), world_size=n, seed=seed),
        comm.simulate(program, world_size=n, seed=seed),
        strict=True,
    ):
        assert_same(found, expected)


def on_the_grid(stage: int, bits: int, compressed: bool) -> tuple[list[float], Tensor]:
    """A linear model whose blocks of 4 are exact: the first param of each is 127 and its gradient 0, the second gradient is
    127 and cancels between ranks, the others are small integers."""
    top, size = 2 ** (bits - 1) - 1, 16
    rank = comm.world().rank
    generator = torch.Generator().manual_seed(5)
    w = torch.randint(-2, 3, (size,), generator=generator).float()
    w[::4] = top

    def batch(step: int) -> Tensor:
        x = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(10 * step + rank)).float()
        x[::4], x[1::4] = 0.0, top if rank else -top
        return x

    collectives = narrow(stage, comm.codecs.Blocks(bits, size=4)) if compressed else {}
    step = transforms.zero(stage, **collectives)(fds.train_step(lambda p, x: (p["w"] * x).sum(), fds.sgd(2.0)))
    state, losses = step.init({"w": w}), []
    for i in range(2):
        state, metrics = step(state, batch(i))
        losses.append(metrics["loss"].item())
    return losses, step.params(state)["w"]


@pytest.mark.law(38)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("stage", SHARDED)
def test_integers_lose_nothing_on_their_grid(stage: int, bits: int) -> None:
    """int8 and int4 are exact where absmax is 127 or 7: the same bits as in fp32, and the params have moved."""
    found, expected = (comm.simulate(lambda c=c: on_the_grid(stage, bits, c), world_size=2) for c in (True, False))
    assert_same(found, expected)
    assert len({loss for losses, _ in found for loss in losses}) > 1


# -- what is lost -----------------------------------------------------------------------------------------------------


@cache
def alone(name: str) -> tuple[list[float], list[float], Any]:
    return run(CASES[name], (), steps=12)


@pytest.mark.sample(5)
@pytest.mark.parametrize("policy", ["fp32", "bf16"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("stage", [0, *SHARDED])
def test_losses_stay_near(stage: int, bits: int, policy: str) -> None:
    """Twelve steps of a small model: int8 stays within 3 % of the first loss, int4 within 15 %; all ranks agree."""
    expected = alone("blocks")[0]
    chain = [transforms.mixed_precision("bf16")] if policy == "bf16" else []
    strategy = (*chain, transforms.zero(stage, **narrow(stage, comm.codecs.Blocks(bits, size=16))))
    results = comm.simulate(lambda: run(CASES["blocks"], strategy, steps=12), world_size=2)
    for losses, evaluated, params in results:
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < (0.03 if bits == 8 else 0.15) * expected[0]
        assert losses[-1] < losses[0] / 2
        assert_same((losses, evaluated, params), results[0])
    assert results[0][0] != expected


@pytest.mark.law(38)
@given(
    name=st.sampled_from(("blocks", "tied", "lora", "branching", "odd leaves")),
    bits=st.sampled_from((4, 8)),
    n=st.integers(2, 4),
)
def test_stages_that_shard_see_the_same(name: str, bits: int, n: int) -> None:
    """Stages 1, 2 and 3 with one compressed gather give the same losses and params, bitwise: the loss sees what the codec
    makes of the shards, the optimizer has them exactly, and step.params gives those."""
    gather = comm.codecs.compressed(comm.all_gather, comm.codecs.Blocks(bits, size=8))
    strategies = [transforms.zero(stage, all_gather=gather) for stage in SHARDED]
    first, *others = (comm.simulate(lambda s=s: run(CASES[name], (s,), rows=2 * n), world_size=n) for s in strategies)
    for other in others:
        assert_same(other, first)


def into_new_tensors(params: list[Tensor], grads: fds.Weighted, state: Any, rate: Any) -> tuple[list[Tensor], Any]:
    """An optimizer that writes nothing in place."""
    return [p - 2.0**-10 * grad / grads.weight for p, grad in zip(params, grads.sum, strict=True)], state


@pytest.mark.parametrize("optimizer", [fds.sgd(2.0**-10), fds.Optimizer(lambda params: (), into_new_tensors, "pure")], ids=str)
@pytest.mark.parametrize("stage", SHARDED)
def test_small_updates_are_not_lost(stage: int, optimizer: fds.Optimizer) -> None:
    """The optimizer's params are exact: updates far below a quantisation step add up, though the loss sees none of one."""

    def program() -> tuple[float, float]:
        gather = comm.codecs.compressed(comm.all_gather, comm.codecs.Blocks(8))
        step = transforms.zero(stage, all_gather=gather)(fds.train_step(lambda p, x: (p["w"] * x).sum(), optimizer))
        state, x = step.init({"w": torch.tensor([127.0, 1.0, 127.0, 1.0])}), torch.tensor([0.0, 1.0, 0.0, 0.0])
        before = step.evaluate(state, x)
        for _ in range(8):
            state, _ = step(state, x)
        return (before - step.evaluate(state, x)).item(), 1.0 - step.params(state)["w"][1].item()

    assert comm.simulate(program, world_size=2) == [(0.0, 2.0**-7)] * 2


@pytest.mark.parametrize("stage", [0, *SHARDED])
def test_overflow_in_one_gradient_is_seen_by_all(stage: int) -> None:
    """An inf on one rank does not vanish in a codec."""

    def program() -> bool:
        seen: list[bool] = []

        def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
            seen.append(bool(step.finite(state, grads.sum)))
            return inner(step, state, grads)

        collectives = {k: v for k, v in narrow(stage, comm.codecs.Blocks(8)).items() if k != "all_gather"}
        chain = transforms.zero(stage, **collectives), fds.wrap("look", update=update)
        step = fds.compose(*chain)(fds.train_step(lambda p, x: (p["w"] * x).sum(), fds.sgd(0.1)))
        bad = float("inf") if comm.world().rank == 1 else 1.0
        step(step.init({"w": torch.ones(4)}), torch.tensor([1.0, 1.0, bad, 1.0]))
        return seen[0]

    assert comm.simulate(program, world_size=2) == [False, False]


# -- what is sent -----------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.law(21)
@pytest.mark.parametrize("stage", [0, *SHARDED])
@given(n=st.integers(2, 4), bits=st.sampled_from((8, 4)))
def test_bytes_each_rank_sends(stage: int, n: int, bits: int) -> None:
    """Each shard of m params is m bytes (4 bits: m/2) and 4⌈m/block⌉ of scales, sent n-1 times as often as in law 21.

    Stages 1 and 2 keep the rank's exact shards, no others do.
    """
    codec = comm.codecs.Blocks(bits, size=16)

    def program() -> tuple[dict[str, int], list[int], list[int]]:
        params, loss = CASES["blocks"].make()
        step = transforms.zero(stage, reshard_last_units=True, **narrow(stage, codec))(fds.train_step(loss, fds.adamw(1e-2)))
        batch = own_rows(CASES["blocks"].batch(2 * n), comm.world())
        state, _ = step(step.init(params), batch)
        with comm.ledger() as book:
            state, _ = step(state, batch)
        groups = ("world", "world/reduce", "world/reduce/compressed")
        rows = [row for row in book.rows if row.group in groups and row.collective in ("all_gather", "all_to_all")]
        partition = state.slots["zero"]
        shards, exact = [s.shard for s in partition.layout.segments], [e.numel() for e in partition.exact]
        return {row.collective: row.bytes for row in rows}, shards, exact

    for sent, shards, exact in comm.simulate(program, world_size=n):
        once = (n - 1) * sum(ceil(m * bits / 8) + 4 * ceil(m / 16) for m in shards)
        assert sent == {"all_gather": 2 * once if stage == 3 else once, "all_to_all": once}
        assert exact == (shards if stage in (1, 2) else [])


# -- the rest ---------------------------------------------------------------------------------------------------------


def everything_on_processes() -> dict[tuple[str, int], Any]:
    return {
        (name, stage): run(CASES[name], (transforms.zero(stage, **narrow(stage, comm.codecs.Blocks(8, size=32))),))
        for name, stage in (("tied", 0), ("branching", 1), ("odd leaves", 2), ("tied", 3), ("branching", 3))
    }


@pytest.mark.law(18)
def test_processes_give_the_bits_of_the_simulator() -> None:
    for here, there in zip(
        comm.simulate(everything_on_processes, world_size=2), comm.spawn(everything_on_processes, world_size=2), strict=True
    ):
        assert_same(there, here)


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("stage", SHARDED)
def test_donation_changes_nothing(stage: int, donate: bool) -> None:
    """Law 31, with the exact shards in the slot; a state that was kept gives the same step again."""

    def program() -> list[float]:
        params, loss = CASES["mlp"].make()
        chain = transforms.mixed_precision(), transforms.zero(stage, **narrow(stage, comm.codecs.Blocks(8, size=16)))
        step = fds.compose(*chain)(fds.train_step(loss, fds.adamw(1e-2)))
        batch = own_rows(CASES["mlp"].batch(4), comm.world())
        state, losses = step.init(params), []
        for _ in range(3):
            kept = state
            state, metrics = step(state, batch, donate=donate)
            if not donate:
                again, _ = step(kept, batch, donate=False)
                assert_same(fds.tree.leaves(again), fds.tree.leaves(state))
            losses.append(metrics["loss"].item())
        return losses

    assert comm.simulate(program, world_size=2) == comm.simulate(_donated, stage, world_size=2)


def _donated(stage: int) -> list[float]:
    strategy = transforms.mixed_precision(), transforms.zero(stage, **narrow(stage, comm.codecs.Blocks(8, size=16)))
    params, loss = CASES["mlp"].make()
    step = fds.compose(*strategy)(fds.train_step(loss, fds.adamw(1e-2)))
    batch = own_rows(CASES["mlp"].batch(4), comm.world())
    state, losses = step.init(params), []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"].item())
    return losses


def test_a_collective_that_a_stage_does_not_use_is_refused() -> None:
    for stage, name in ((0, "all_gather"), (0, "reduce_scatter"), (2, "all_reduce")):
        with pytest.raises(ValueError, match=f"{name}=compressed"):
            transforms.zero(stage, **{name: comm.codecs.compressed(getattr(comm, name), comm.codecs.Cast())})


def test_the_step_says_what_it_compresses() -> None:
    step = transforms.zero(3, all_gather=comm.codecs.compressed(comm.all_gather, comm.codecs.Blocks(8)))(
        fds.train_step(lambda p, b: p["w"].sum(), fds.sgd(0.1))
    )
    assert str(step).endswith("zero(3, world, all_gather=compressed(all_gather, Blocks(bits=8, size=256)))")
