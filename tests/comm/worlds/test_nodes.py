"""Collectives that go node by node: what they compute, what they send, and how ranks learn of nodes."""

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from functional_ds import comm
from functional_ds.comm.backends.primitives import Communicator
from functional_ds.testing import assert_same

GRIDS = [(4, 2), (6, 2), (6, 3), (8, 4)]  # ranks, and how many share a node


def drawn(rank: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float32)


def reduced(size: int, dtype: torch.dtype, op: str) -> tuple[Tensor, Tensor, Tensor]:
    here = comm.world()
    x = (drawn(here.rank, size * here.size) * 8).to(dtype)
    total = comm.all_reduce(x, op=op)
    piece = comm.reduce_scatter(x, op=op)
    return total, comm.all_gather(piece), comm.all_gather(x)


@pytest.mark.law(4)
@given(
    st.sampled_from(GRIDS),
    st.integers(0, 5),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
    st.sampled_from(["sum", "max", "avg"]),
    st.integers(0, 9),
)
def test_nodes_change_roundings_alone(grid: tuple[int, int], size: int, dtype: torch.dtype, op: str, seed: int) -> None:
    """All ranks get the same bits, AG of RS is AR bit for bit, and both are within rounding of what they are without nodes."""
    n, per_node = grid
    op = "sum" if op == "avg" and not dtype.is_floating_point else op
    found = comm.simulate(reduced, size, dtype, op, world_size=n, seed=seed, ranks_per_node=per_node)
    plain = comm.simulate(reduced, size, dtype, op, world_size=n, seed=seed)
    exact = op == "max" or not dtype.is_floating_point
    for (total, gathered, whole), (expected, _, plainly) in zip(found, plain, strict=True):
        assert_same(total, found[0][0])
        assert_same(gathered, total)
        assert_same(whole, plainly)
        if exact:
            assert_same(total, expected)
        else:  # each addend rounds once more
            most = plainly.view(n, -1).abs().double().sum(0)
            assert bool(((total.double() - expected.double()).abs() <= 4 * torch.finfo(dtype).eps * most).all())


def sends() -> tuple[dict[int, int], dict[int, int], list[tuple[int, int]]]:
    """The bytes that this rank sends to each other one, by the ledger and by its messages, and the totals of each call."""
    here, sent, totals = comm.world(), Counter[int](), []
    plain = Communicator.send

    def counting(self: Communicator, tensor: Tensor, peer: int) -> Any:
        sent[self.ranks[peer]] += tensor.nbytes
        return plain(self, tensor, peer)

    x = drawn(here.rank, 24 * here.size)
    piece = drawn(here.rank, here.rank + 1, 3).requires_grad_()
    comm.all_reduce(x)  # connects
    Communicator.send = counting  # type: ignore[method-assign]
    try:
        with comm.ledger() as book:
            comm.all_reduce(x)
            comm.reduce_scatter(x)
            comm.all_gather(x)
        exact = dict(sent)
        with comm.ledger() as uneven:
            comm.all_reduce(x[:5])
        totals.append((uneven.bytes, sum(sent.values()) - sum(exact.values())))
        before = sum(sent.values())
        with comm.ledger() as gathers:
            whole = comm.all_gather(piece, uneven=True)
            whole.sum().backward()
        totals.append((gathers.bytes, sum(sent.values()) - before))
    finally:
        Communicator.send = plain  # type: ignore[method-assign]
    told = Counter[int]()
    for row in book.rows:
        told.update(row.sent_to)
    assert piece.grad is not None
    assert torch.equal(piece.grad, torch.full_like(piece, here.size))
    return dict(told), exact, totals


@pytest.mark.parametrize("grid", GRIDS[:3])
def test_ledgers_count_each_message(grid: tuple[int, int]) -> None:
    """To each rank, where sizes divide; in all, where they do not. To ranks of other nodes but one each, nothing."""
    n, per_node = grid
    for rank, (told, sent, totals) in enumerate(comm.spawn(sends, world_size=n, ranks_per_node=per_node)):
        assert told == sent
        node, place = divmod(rank, per_node)
        assert all(peer // per_node == node or peer % per_node == place for peer in sent)
        assert [count for count, _ in totals] == [count for _, count in totals]


def test_links_carry_each_value_once() -> None:
    """Of N bytes on two nodes of two, an all-reduce sends 2 (g - 1) / g N from each node, gathers and scatters half of that."""

    def program(name: str) -> comm.Ledger:
        x = torch.ones(32 if name != "all_gather" else 8, dtype=torch.int8)
        with comm.ledger() as book:
            getattr(comm, name)(x)
        return book

    for name, most in {"all_reduce": 32, "reduce_scatter": 16, "all_gather": 16}.items():
        for per_node, times in ((2, 1), (1, 2)):
            found = comm.debug.traffic(comm.simulate(program, name, world_size=4, ranks_per_node=per_node))["world"]
            assert (found[:2, 2:].sum(), found[2:, :2].sum()) == (most * times, most * times)


def of_axes() -> list[int]:
    mesh = comm.mesh(dp=4, tp=2)
    groups = [comm.world(), mesh["dp"], mesh["tp"], mesh["tp", "dp"], comm.new_group([0, 1, 4, 5]), comm.new_group([0, 1, 4])]
    return [group.ranks_per_node for group in [*groups, comm.world().channel("gather")]]


def test_groups_that_fill_nodes_alike_know_it() -> None:
    """Where neighbours share nodes, as many on each of several; a channel as its group."""
    assert comm.simulate(of_axes, world_size=8, ranks_per_node=4)[0] == [4, 2, 1, 1, 2, 1, 4]
    assert comm.simulate(of_axes, world_size=8, ranks_per_node=8)[0] == [1] * 7


def joined_again(folder: Path, name: str, declared: int | None) -> int:
    place, size = comm.get_rank(), comm.get_world_size()
    comm.destroy_process_group()
    comm.init_distributed("gloo", size, place, f"file://{folder / name}", ranks_per_node=declared)
    return comm.world().ranks_per_node


def by_environment(folder: Path) -> list[int]:
    """As torchrun would start them on two hosts; with nodes declared; by names alone, of which there is one here."""
    os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(comm.get_rank() % 2))
    found = [joined_again(folder, "a", None), joined_again(folder, "b", 1)]
    del os.environ["LOCAL_WORLD_SIZE"]
    return [*found, joined_again(folder, "c", None)]


def test_torchrun_says_how_many_ranks_a_node_has(tmp_path: Path) -> None:
    """LOCAL_WORLD_SIZE counts; what is declared counts more; without either the hosts' names do."""
    assert comm.spawn(by_environment, tmp_path, world_size=4) == [[2, 1, 1]] * 4


def connected_late(folder: Path) -> int:
    """How many ranks are connected when this one has joined, of which each takes longer than the one before."""
    rank, connects = comm.get_rank(), dist.init_process_group

    def late(*args: Any, **options: Any) -> None:
        connects(*args, **options)
        time.sleep(0.3 * rank)
        (folder / f"connected {rank}").touch()

    with mock.patch.object(dist, "init_process_group", late):
        joined_again(folder, "late", 1)
    return len(list(folder.glob("connected *")))


def test_all_ranks_are_connected_when_one_has_joined(tmp_path: Path) -> None:
    """It may leave at once, which closes its connections."""
    assert comm.spawn(connected_late, tmp_path, world_size=3) == [3] * 3


@pytest.mark.parametrize("per_node", [0, 3, "2"])
def test_nodes_that_ranks_do_not_fill_are_refused(per_node: Any) -> None:
    for run in (comm.simulate, comm.spawn):
        with pytest.raises(ValueError, match=f"ranks_per_node={per_node!r}: 4 ranks do not fill nodes of as many"):
            run(of_axes, world_size=4, ranks_per_node=per_node)
