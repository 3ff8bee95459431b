"""The calls that run on NCCL, run on Gloo's own collectives instead: on processes, without a GPU."""

from datetime import timedelta
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm, tree
from functional_ds import transforms as T
from functional_ds.comm.worlds.process import ProcessWorld
from functional_ds.testing import assert_same
from tests.comm import cases, nccl_over_gloo
from tests.comm.worlds.test_worlds_agree import nccl_has

REDUCTIONS = cases.REDUCTIONS | {"reduce_from"}


class Small(cases.Case):
    """A reduction of small integers, which are exact in any order."""

    def values(self, rank: int) -> Any:
        """Integers of -3..3 in the dtype of each leaf."""
        return tree.map(_small, super().values(rank))


def _small(leaf: Tensor) -> Tensor:
    if leaf.dtype == torch.bool:
        return leaf
    if leaf.is_complex():
        return torch.complex(_small(leaf.real), _small(leaf.imag))
    return leaf.nan_to_num(2.0).clamp(0 if leaf.dtype == torch.uint8 else -3, 3).round() + 0  # no -0, which is as large as 0


def _lowered(drawn: list[cases.Case]) -> Any:
    nccl_over_gloo.install()
    return cases.run(drawn)


def _drawn(world_size: int) -> list[cases.Case]:
    drawn = cases.draw(max(192, settings.default.max_examples), world_size, seed=10 + world_size)
    chosen = [case for case in drawn if nccl_has(case)]
    assert {case.name for case in chosen} == {row.name for row in comm.table.TABLE}
    exact = {True: lambda case: Small(**attrs.asdict(case, recurse=False)), False: lambda case: case}
    return [exact[case.name in REDUCTIONS and not case.gradient](case) for case in chosen]


def _close(real: Any, model: Any, case: cases.Case, world_size: int) -> None:
    """Sums of gradients round in the order of the backend: n terms, at most four sums in a row."""
    values = [leaf for rank in range(world_size) for leaf in tree.leaves(case.values(rank)) if leaf.numel()]
    largest = max((float(leaf.abs().max()) for leaf in values), default=0.0)
    for mine, other in zip(tree.leaves(real), tree.leaves(model), strict=True):
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
        bound = torch.finfo(mine.dtype).eps * world_size**4 * (largest + 1)
        torch.testing.assert_close(mine, other, rtol=0.0, atol=bound)


@pytest.mark.law(18)
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_row_is_lowered_to_what_the_simulator_gives(world_size: int) -> None:
    """spawn(program) = simulate(program) for every row: bit for bit, but for the sums of gradients."""
    drawn = _drawn(world_size)
    spawned = comm.spawn(_lowered, drawn, world_size=world_size)
    simulated = comm.simulate(cases.run, drawn, world_size=world_size)
    for rank in range(world_size):
        for case, real, model in zip(drawn, spawned[rank], simulated[rank], strict=True):
            try:
                if case.name in REDUCTIONS | cases.CUT | {"copy_to", "broadcast", "all_gather"} and case.gradient:
                    _close(real, model, case, world_size)
                else:
                    assert_same(real, model)
            except AssertionError as error:
                error.add_note(f"on rank {rank} in {case}")
                raise


# -- communicators ----------------------------------------------------------------------------------------------------


def _unequal_counts() -> list[float]:
    """Ranks 0 and 2 connect a group that 1 and 3 never have, and then all connect their pairs."""
    nccl_over_gloo.install()
    here = comm.world()
    ends, pair = comm.new_group([2, 0], "ends"), comm.new_group([0, 1] if here.rank < 2 else [2, 3], "pair")
    found = []
    if ends.rank >= 0:
        found.append(comm.all_gather(torch.tensor([float(here.rank)]), ends)[0].item())
    found.append(comm.all_reduce(torch.tensor(float(here.rank)), pair).item())
    # A partial permutation, and messages between some ranks, as the first calls of their groups.
    fours = comm.new_group(range(4), "fours")
    found.append(comm.permute(torch.tensor(here.rank + 1.0), [(3, 1)], fours).item())
    if here.rank in (1, 2):
        pipeline = comm.new_group(range(4), "pipeline")
        mine, theirs = torch.tensor([float(here.rank)]), torch.zeros(1)
        sent = comm.start(comm.send, mine, 3 - here.rank, pipeline)  # they face each other
        found.append(comm.start(comm.recv, theirs, 3 - here.rank, pipeline).wait().item())
        sent.wait()
    mesh = comm.mesh(a=2, b=2)
    if here.rank % 2 == 0:
        mesh["a"].world.process_group(mesh["a"].ranks, "more")  # type: ignore[attr-defined]
    group = mesh.device_mesh("cpu").get_group("b")
    total = torch.tensor(1.0)
    dist.all_reduce(total, group=group)
    return [*found, total.item()]


def test_members_find_each_other_whatever_else_they_have_connected() -> None:
    """By the group's name, not by the number of groups; a first call that some ranks have no part in waits for nobody."""
    spawned = comm.spawn(_unequal_counts, world_size=4)
    assert spawned == [[2.0, 1.0, 0.0, 2.0], [1.0, 4.0, 2.0, 2.0], [2.0, 5.0, 0.0, 1.0, 2.0], [5.0, 0.0, 2.0]]


def _messages() -> Any:
    nccl_over_gloo.install()
    rank, x = comm.world().rank, torch.tensor([comm.world().rank + 1.0])
    if rank == 0:  # tags in another order than they are received in
        sent = [comm.start(comm.send, x * (tag + 1), 1, tag=tag) for tag in range(2)]
        tagged = [zeros.wait().item() for zeros in sent]
    else:
        with comm.world().world.batch():
            pending = [comm.start(comm.recv, x, 0, tag=tag) for tag in (1, 0)]
        tagged = [value.wait().item() for value in pending]
    swap = comm.batch_p2p([comm.Recv(x, 1 - rank), comm.Send(x, 1 - rank), comm.Recv(x, 1 - rank), comm.Send(-x, 1 - rank)])
    rows = comm.all_to_all(
        torch.ones([0, 3][rank], 4), input_splits=[[0, 0], [2, 1]][rank], output_splits=[[0, 2], [0, 1]][rank]
    )  # rank 0 sends nothing
    return tagged, [value.item() for value in swap[::2]], list(rows.shape)


def test_messages_and_rows_of_nobody() -> None:
    """Each tag and direction is an order of its own; a rank without rows takes part in an all_to_all."""
    assert comm.spawn(_messages, world_size=2) == [([0.0, 0.0], [2.0, -2.0], [2, 4]), ([2.0, 1.0], [1.0, -1.0], [1, 4])]


# -- NCCL as the only backend -----------------------------------------------------------------------------------------


def _losses(zero: Any) -> list[float]:
    torch.manual_seed(0)
    apply, params = fds.functional(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)))
    loss = fds.train_step(lambda params, x: apply(params, x).square().mean(), fds.adamw(1e-2))
    step = fds.compose(T.clip(1.0), T.accumulate(2), zero)(loss)
    state, losses = step.init(params), []
    for seed in range(2):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))[comm.world().rank :: 2]
        state, metrics = step(state, x)
        losses.append(metrics["loss"].item())
    fds.memory.measured(state).of_all_ranks()
    return losses


def _train(lowered: bool) -> list[list[float]]:
    """Everything that compares something between ranks on the host."""
    if lowered:
        nccl_over_gloo.install(cpu=False)
    return [_losses(zero) for zero in (T.zero(0), T.zero(1), T.zero(2, aggregate="owner"), T.zero(3, max_live_units=1))]


def test_nccl_can_be_the_only_backend() -> None:
    """Tensors that the host compares are on the CPU. They travel through the device."""
    real, model = comm.spawn(_train, True, world_size=2), comm.simulate(_train, False, world_size=2)
    torch.testing.assert_close(torch.tensor(real), torch.tensor(model), rtol=1e-6, atol=0.0)


# -- time-outs --------------------------------------------------------------------------------------------------------


def _late() -> str:
    nccl_over_gloo.install()
    world = comm.world().world
    assert isinstance(world, ProcessWorld)
    world.timeout = timedelta(seconds=0.5)
    group = comm.new_group([0, 1], "pair")
    if comm.world().rank == 0:
        try:
            comm.all_reduce(torch.ones(1), group)
        except (comm.errors.CommError, RuntimeError) as error:
            return str(error)
    return ""


def test_a_subgroup_has_the_time_out_of_its_world() -> None:
    """Its first use ends after half a second, not after torch's half an hour."""
    text, _ = comm.spawn(_late, world_size=2)
    assert text
