"""A law that no bug breaks is no law: each bug below is planted alone, and a law must break.

The laws are checked on a few fixed cases; each must hold in the library as it is and break with its bug planted.
"""

import math
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import functional_ds as fds
import functional_ds.checkpointing.writer  # loaded late otherwise, and bugs are planted in what is there
from functional_ds import checkpointing, comm, transforms, tree
from functional_ds.base.prng import Key
from functional_ds.comm.backends.nccl import _raw
from functional_ds.comm.worlds.communicator_key import CommunicatorKey
from functional_ds.fitting import RollBack
from functional_ds.pipelining import one_f_one_b
from functional_ds.sharding.layout import Layout, shard, unshard
from functional_ds.sharding.leaf_map import LeafMap
from functional_ds.sharding.matrix_owners import MatrixOwners
from functional_ds.transforms.precision.stochastic_rounding import round_stochastically
from functional_ds.transforms.zero.collectives import Collectives
from functional_ds.transforms.zero.config import ZeroConfig
from functional_ds.transforms.zero.gather import Gatherer
from functional_ds.transforms.zero.process_groups import ProcessGroups
from functional_ds.transforms.zero.units.prefetch import FetchTrace, plan_fetches
from tests.comm.debug import test_written
from tests.comm.record import test_failed_steps
from tests.comm.simulation import test_nccl_rules
from tests.modules import test_functional
from tests.modules.test_buffers import as_ddp, network, plain, rows, test_one_rank_may_be_the_first_to_write
from tests.modules.test_functional import Around
from tests.planting import Bug, planted
from tests.remat import test_argument_snapshot
from tests.remat.test_remat import awkward, outcome
from tests.step import test_unused
from tests.transforms.models import CASES, Blocks, Case, Tied, own_rows, run
from tests.transforms.rules import assert_close, fresh, linear, trained
from tests.transforms.staged import on_mesh
from tests.transforms.zero import test_levels, test_nested_autograd, test_orders

pytestmark = pytest.mark.timeout(60)

# -- sharding and collectives -----------------------------------------------------------------------------------------

N = 3


def rank() -> int:
    """The rank that runs this."""
    return comm.world().rank


def raises(error: type[Exception], program: Callable[[], Any]) -> bool:
    """Whether the program ends with this error."""
    try:
        program()
    except error:
        return True
    return False


def numbers(*shape: int, rank: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small integers, others on each rank."""
    generator = torch.Generator().manual_seed(10 + rank)
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


def same(found: Any, expected: Any) -> None:
    """Equal trees, bit for bit."""
    assert tree.structure(found) == tree.structure(expected)
    for (path, a), (_, b) in zip(tree.named(found), tree.named(expected), strict=True):
        assert torch.equal(a, b), f"{path}: {a} is not {b}"


def sharding_is_a_bijection() -> None:
    """Law 1, where padding is needed."""
    params = {"a.0": numbers(5), "a.1": numbers(3, 3), "b": numbers(7, dtype=torch.bfloat16), "c": numbers(), "d": numbers(0)}
    for n in (1, 2, 3, 4):
        layout = Layout.of(params, n)
        same(unshard([shard(params, layout, r) for r in range(n)], layout), params)


def collectives_are_dense_programs() -> None:
    """Laws 2 to 10: every row of the table is what torch's own operations make of all ranks' values."""
    ops: dict[str, Callable[[Tensor], Tensor]] = {
        "sum": lambda xs: xs.sum(0),
        "avg": lambda xs: xs.sum(0) / N,
        "max": lambda xs: xs.amax(0),
        "min": lambda xs: xs.amin(0),
        "product": lambda xs: xs.prod(0),
    }
    values = torch.stack([numbers(6, N, rank=r) for r in range(N)])  # [rank, row, column]

    def program() -> Any:
        x = values[rank()]
        return {
            "gather": [comm.all_gather(x, dim=d) for d in (0, 1)],
            "stack": comm.all_gather(x, tiled=False),
            "broadcast": [comm.broadcast(x, src) for src in range(N)],
            "reduce": {op: [comm.all_reduce(x, op=op), comm.reduce(x, 1, op=op)] for op in ops},
            "scatter": {op: [comm.reduce_scatter(x, dim=d, op=op) for d in (0, 1)] for op in ops},
        }

    for r, found in enumerate(comm.simulate(program, world_size=N)):
        total = {op: dense(values) for op, dense in ops.items()}
        expected = {
            "gather": [torch.cat(tuple(values), d) for d in (0, 1)],
            "stack": values,
            "broadcast": list(values),
            "reduce": {op: [x, x if r == 1 else torch.zeros_like(x)] for op, x in total.items()},
            "scatter": {op: [x.tensor_split(N, d)[r] for d in (0, 1)] for op, x in total.items()},
        }
        same(found, expected)


def exchanges_are_dense_programs() -> None:
    """Laws 5 to 9: so is every row that moves values without combining them."""
    values = torch.stack([numbers(6, N, rank=r) for r in range(N)])  # [rank, row, column]
    splits = [[2, 1, 3], [0, 5, 1], [1, 1, 4]]  # rows from each rank to each

    def program() -> Any:
        x = values[rank()]
        return {
            "all_to_all": [comm.all_to_all(x, split_dim=s, concat_dim=c) for s in (0, 1) for c in (0, 1)],
            "rows": comm.all_to_all(x, input_splits=splits[rank()]),
            "permute": comm.permute(x, [(0, 2), (2, 1)]),
            "gather": [comm.gather(x, 1, dim=d) for d in (0, 1)],
            "scatter": [comm.scatter(x, 1, dim=d) for d in (0, 1)],
            "variance": [comm.copy_to(x), comm.reduce_from(x), comm.scatter_to(x, dim=1), comm.gather_from(x, dim=1)],
            "uneven": comm.all_gather(x[rank() :], uneven=True),
        }

    def cut(x: Tensor, dim: int, place: int) -> Tensor:
        return x.tensor_split(N, dim)[place]

    for r, found in enumerate(comm.simulate(program, world_size=N)):
        whole = [torch.cat(tuple(values), d) for d in (0, 1)]
        expected = {
            "all_to_all": [torch.cat([cut(x, s, r) for x in values], c) for s in (0, 1) for c in (0, 1)],
            "rows": torch.cat([x.split(sizes)[r] for x, sizes in zip(values, splits, strict=True)]),
            "permute": {2: values[0], 1: values[2]}.get(r, torch.zeros(6, N)),
            "gather": [x if r == 1 else torch.zeros_like(x) for x in whole],
            "scatter": [cut(values[1], d, r) for d in (0, 1)],
            "variance": [values[r], values.sum(0), cut(values[r], 1, r), whole[1]],
            "uneven": torch.cat([x[i:] for i, x in enumerate(values)]),
        }
        same(found, expected)


def messages_carry_gradients_back() -> None:
    """Law 16 for messages: what the receiver makes of a value is differentiated on the sender."""

    def program() -> tuple[float, float]:
        x = torch.tensor(2.0 + rank(), requires_grad=True)
        loss = comm.send(x, 1) if rank() == 0 else comm.recv(x, 0) ** 2
        loss.backward()
        assert x.grad is not None
        return loss.item(), x.grad.item()

    assert comm.simulate(program, world_size=2) == [(0.0, 4.0), (4.0, 0.0)]


def what_a_value_is_decides() -> None:
    """Law 16 for Megatron's four."""

    def program() -> list[list[float]]:
        found = []
        for call in (comm.copy_to, comm.reduce_from, comm.scatter_to, comm.gather_from):
            x = torch.ones(N, requires_grad=True)
            out = call(x)
            out.backward(torch.arange(float(out.numel())) + 10 * rank())
            assert x.grad is not None
            found.append(x.grad.tolist())
        return found

    for r, (copied, reduced, scattered, gathered) in enumerate(comm.simulate(program, world_size=N)):
        assert copied == [30.0, 33.0, 36.0]
        assert reduced == [10.0 * r, 10.0 * r + 1, 10.0 * r + 2]
        assert scattered == [0.0, 10.0, 20.0]
        assert gathered == [10.0 * r + 3 * r + i for i in range(3)]


def nothing_is_left_over() -> None:
    """What was started and never matched is an error; sends that face each other are, too."""

    def alone() -> None:
        if rank() == 0:
            comm.start(comm.send, torch.ones(1), 1)

    def facing() -> None:
        comm.send(torch.ones(1), 1 - rank())
        comm.recv(torch.ones(1), 1 - rank())

    assert raises(comm.errors.UnmatchedError, partial(comm.simulate, alone, world_size=2))
    assert raises(comm.errors.DeadlockError, partial(comm.simulate, facing, world_size=2))


def ranks_keep_their_settings() -> None:
    """Warning filters and the default dtype that a rank sets are not the caller's, nor another rank's."""
    before = [*warnings.filters]

    def program() -> tuple[Any, torch.dtype]:
        if rank():
            warnings.simplefilter("ignore")
            torch.set_default_dtype(torch.float64)
        comm.barrier()
        return warnings.filters[0], torch.get_default_dtype()

    try:
        first, _ = comm.simulate(program, world_size=2)
        assert first == (before[0], torch.float32)
        assert ([*warnings.filters], torch.get_default_dtype()) == (before, torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)
        warnings.filters[:] = before  # type: ignore[index]


def results_outlive_inference_mode() -> None:
    """They may be written to after the mode, also alone."""
    with torch.inference_mode():
        at_once, later = comm.all_reduce(torch.ones(2)), comm.start(comm.all_gather, torch.ones(2)).wait()
    assert not at_once.is_inference()
    assert not later.is_inference()


def a_destroyed_world_is_refused() -> None:
    """Also where torch's own function has destroyed it."""
    here = comm.init_distributed("gloo", world_size=1, rank=0)
    try:
        dist.destroy_process_group()
        assert raises(comm.errors.CommError, partial(comm.all_reduce, torch.ones(1), here))
    finally:
        comm.destroy_process_group()


def shapes_count_as_values_do() -> None:
    """A ring on shapes only sends what one with values sends, and what the formula says."""

    def program(device: str) -> tuple[int, int]:
        with comm.ledger() as book:
            comm.algorithms.ring(torch.empty(12, device=device))
        return book.calls, book.elements

    with_values = comm.simulate(program, "cpu", world_size=4)
    assert with_values == comm.simulate(program, "meta", world_size=4, shapes_only=True) == [(6, 18)] * 4


def half_precision_sums_round_once() -> None:
    """256 + 1 + 1 = 258 in bf16, where 256 + 1 is 256."""
    values = torch.tensor([256.0, 1.0, 1.0], dtype=torch.bfloat16)
    assert comm.simulate(lambda: comm.all_reduce(values[rank()]).item(), world_size=3) == [258.0] * 3


def results_have_memory_of_their_own() -> None:
    """Law 11."""

    def program() -> Any:
        x = torch.ones(2 * N)
        return x, comm.all_reduce(x), comm.all_gather(x), comm.reduce_scatter(x), comm.broadcast(x), comm.reduce(x)

    results = tree.leaves(comm.simulate(program, world_size=N))
    assert len({x.untyped_storage().data_ptr() for x in results}) == len(results)


def calls_read_their_input_at_once() -> None:
    """Law 11: what happens to the input of a call under way does not show on other ranks, and is named on this one."""

    def program() -> float:
        x = torch.ones(1)
        pending = comm.start(comm.all_reduce, x)
        if rank() == 0:
            x.zero_()
            assert raises(comm.errors.WrittenError, pending.wait)
            return 0.0
        return pending.wait().item()  # type: ignore[no-any-return]

    for seed in range(5):
        assert comm.simulate(program, world_size=2, seed=seed) == [0.0, 2.0]


def adjoints_are_transposes() -> None:
    """Law 16: <C x, y> = <x, Cᵀ y>, summed over the ranks."""
    calls: list[Callable[[Tensor], Tensor]] = [
        comm.all_reduce,
        comm.all_gather,
        comm.reduce_scatter,
        lambda x: comm.broadcast(x, 1),
        lambda x: comm.reduce(x, 2),
        lambda x: comm.gather(x, 2),
        lambda x: comm.scatter(x, 1),
        lambda x: comm.all_to_all(x.view(N, 2), split_dim=0, concat_dim=1),
        lambda x: comm.all_to_all(x, input_splits=[[1, 2, 3], [6, 0, 0], [2, 2, 2]][rank()]),
        lambda x: comm.permute(x, [(0, 2), (2, 1)]),
    ]
    for call in calls:

        def program(call: Callable[[Tensor], Tensor] = call) -> tuple[float, float]:
            x = numbers(2 * N, rank=rank()).requires_grad_()
            out = call(x)
            y = numbers(*out.shape, rank=7 + rank())
            (back,) = torch.autograd.grad(out, x, y)
            return (out * y).sum().item(), (x * back).sum().item()

        left, right = zip(*comm.simulate(program, world_size=N), strict=True)
        assert sum(left) == sum(right)


def the_ledger_counts_what_is_sent() -> None:
    """The volumes of the table: seven elements are pieces of 3, 3 and 1 in an all-reduce, which sends twice (n - 1) / n."""

    def program() -> dict[str, int]:
        x = torch.ones(7)
        with comm.ledger() as book:
            comm.all_reduce(x)
            comm.all_gather(x)
            comm.reduce_scatter(x[:6])
            comm.broadcast(x)
            comm.reduce(x)
            comm.all_to_all(x[:6])
            comm.permute(x, [(0, 1), (2, 2)])
            comm.scatter(x[:6])
        return {row.collective: row.elements for row in book.rows}

    books = comm.simulate(program, world_size=3)
    assert {name: [book[name] for book in books] for name in books[0]} == {
        "all_reduce": [4 + 6, 4 + 6, 6 + 2],
        "all_gather": [14, 14, 14],
        "reduce_scatter": [4, 4, 4],
        "broadcast": [14, 0, 0],
        "reduce": [0, 7, 7],
        "all_to_all": [4, 4, 4],
        "permute": [7, 0, 0],
        "scatter": [4, 0, 0],
    }


def a_mesh_is_a_grid() -> None:
    """Ranks are numbered row by row."""
    groups = comm.simulate(lambda: [comm.mesh(a=2, b=3)[axis].ranks for axis in "ab"], world_size=6)
    assert groups == [[(r % 3, r % 3 + 3), tuple(r // 3 * 3 + i for i in range(3))] for r in range(6)]


def communicators_are_told_apart() -> None:
    """Each direction and tag of messages between two ranks has its own, by one name on both; they connect in one order."""

    def keys() -> list[CommunicatorKey]:
        group = comm.new_group([2, 0, 1], "some")
        between = [CommunicatorKey.between(group, src, dst, tag) for src, dst in ((0, 1), (1, 0), (0, 2)) for tag in (0, 1)]
        return [*between, CommunicatorKey.of(comm.table.Call(comm.table.TABLE[0], {"op": "sum"}), group)]

    first, *others = comm.simulate(keys, world_size=3)
    assert all(other == first for other in others)
    assert len({key.digest() for key in first}) == len(first)
    assert first[0].connected_together() == first[2].connected_together() == sorted([first[0], first[2]])


def nothing_has_bytes() -> None:
    """What a rank sends has the dtype of what the others expect, without elements, too."""
    assert [_raw(torch.ones(rows, 4)).dtype for rows in (0, 3)] == [torch.uint8] * 2
    assert _raw(torch.ones(0, 4)).shape == (0, 16)


def nccls_rules_name_contradictions() -> None:
    """Programs whose ranks launch calls in different orders, and no others."""
    for program, ranks, parts in test_nccl_rules.FAULTS:
        named = ""
        try:
            comm.simulate(program, world_size=ranks, rules="nccl")
        except comm.errors.DeadlockError as error:
            named = str(error)
        assert all(part in named for part in parts)
    comm.simulate(test_nccl_rules.rings_in_a_batch, world_size=4, rules="nccl")
    comm.simulate(lambda: comm.algorithms.double_tree(torch.ones(3)), world_size=5, rules="nccl")
    comm.simulate(partial(on_mesh, zero=None, dp=1), one_f_one_b(2, 4), 12, world_size=2, rules="nccl")


def the_simulator_finds_mismatches() -> None:
    """Calls that differ in name, root or shape are refused, even where a result could be made up."""
    x = torch.ones(2)
    for calls in (
        (lambda: comm.all_reduce(x), lambda: comm.broadcast(x)),
        (lambda: comm.broadcast(x, 0), lambda: comm.broadcast(x, 1)),
        (lambda: comm.all_gather(x), lambda: comm.all_gather(torch.ones(3))),
    ):
        program = partial(comm.simulate, lambda pair: pair[rank()](), calls, world_size=2)
        assert raises(comm.errors.MismatchError, program)


# -- steps ------------------------------------------------------------------------------------------------------------


@cache
def alone(name: str, rows: int) -> Any:
    """The single-device step on the whole batch."""
    return run(CASES[name], (), rows=rows)


def close(found: Any, expected: Any) -> None:
    """Equal trees, but for the rounding of a few hundred fp32 additions in other orders."""
    assert tree.structure(found) == tree.structure(expected)
    for a, b in zip(tree.leaves(found), tree.leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def zero_is_one_device(stage: int, name: str, n: int = 2, k: int = 1) -> None:
    """Law 19, with k micro-batches."""
    rows = 4 * n
    strategy = (transforms.zero(stage), transforms.accumulate(k))
    for found in comm.simulate(lambda: run(CASES[name], strategy, rows=rows), world_size=n, seed=n):
        close(found, alone(name, rows))


def other_batches_other_paths() -> None:
    """Law 19 where every step takes other units on every rank, so that no plan holds."""

    def program(*strategy: fds.Transform) -> Any:
        params, loss = CASES["branching"].make()
        step = fds.compose(*strategy)(fds.train_step(loss, fds.adamw(1e-2, eps=1e-4)))
        state = step.init(params)
        batches = zip(*(x.chunk(12) for x in CASES["branching"].batch(48)), strict=True)
        for batch in batches:
            state, _ = step(state, own_rows(batch, comm.world()))
        return step.params(state)

    expected = program()
    for found in comm.simulate(lambda: program(transforms.zero(3)), world_size=2):
        close(found, expected)


def any_rank_touches_any_units() -> None:
    """Passes that keep what they leave, and go beyond their plan: each rank in its own way, in one round of asking."""
    params = {str(unit): torch.full((6,), float(unit)) for unit in range(5)}
    layout = Layout.of(params, 3)
    passes = [[(0, 1)] * 3, [(0, 1)] * 3, [(0, 1, 2, 0), (0, 1, 2, 3), (0, 1, 2, 4)], [(1, 0), (0,), ()]]

    def program() -> list[Any]:
        collectives = Collectives(ProcessGroups.of(comm.world()), ZeroConfig(3))
        source = Gatherer(layout, shard(params, layout, rank()), collectives)
        traces, found = (FetchTrace(), FetchTrace()), []
        for i, touches in enumerate(passes):
            source.begin(traces[i % 2])
            found.append([source.fetch(unit)[0].tolist() for unit in touches[rank()]])
            source.finish(reshard=i % 2 == 1)
        return found

    assert comm.simulate(program, world_size=3) == [[[[float(u)] * 6 for u in t[r]] for t in passes] for r in range(3)]


def modules_are_functions() -> None:
    """``apply`` gives the module's values and gradients; a tied parameter is one."""
    torch.manual_seed(0)
    for module, x in ((Tied(), torch.arange(10).view(2, 5)), (Blocks(recompute=True), torch.randn(4, 6))):
        apply, params = fds.functional(module)
        found = torch.autograd.grad(apply(params, x).square().sum(), list(params.values()))
        expected = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
        same(dict(zip(params, found, strict=True)), dict(zip(dict(module.named_parameters()), expected, strict=True)))


def rank_0_gives_the_params(stage: int) -> None:
    """Whatever the ranks start from."""

    def program() -> list[float]:
        step = transforms.zero(stage)(fds.train_step(lambda p, x: (p["w"] * x).sum(), fds.sgd(0.0)))
        state, _ = step(step.init({"w": torch.full((3,), 1.0 + rank())}), torch.ones(()))
        return [*step.params(state)["w"].tolist(), step.evaluate(state, torch.ones(())).item()]

    assert comm.simulate(program, world_size=2) == [[1.0, 1.0, 1.0, 3.0]] * 2


# -- traffic and memory -----------------------------------------------------------------------------------------------


def traffic(case: Case, stage: int, n: int, k: int = 1, *, reshard: bool = True) -> tuple[int, int, list[int]]:
    """Calls and elements of rank 0 in the third step, scalars and control apart; and the units' padded sizes."""

    def program() -> tuple[int, int, list[int]]:
        params, loss = case.make()
        strategy = transforms.zero(stage, reshard_last_units=reshard), transforms.accumulate(k)
        step = fds.compose(*strategy)(fds.train_step(loss, fds.sgd(0.1)))
        state, batch = step.init(params), own_rows(case.batch(n * k * 4), comm.world())
        for _ in range(2):  # the order of units is known from here on
            state, _ = step(state, batch)
        with comm.ledger() as book:
            state, _ = step(state, batch)
        layout = state.slots["zero"].layout
        sizes = [sum(n * layout.segments[i].shard for i in unit.segments) for unit in layout.units]
        rows = [r for r in book.rows if (r.collective, r.group) == ("all_gather", "world") or r.group == "world/reduce"]
        return sum(r.calls for r in rows), sum(r.elements for r in rows), sizes

    return comm.simulate(program, world_size=n)[0]  # type: ignore[no-any-return]


def traffic_is_exact(stage: int, k: int) -> None:
    """Law 21: 2Ψ(n-1)/n, 3Ψ(n-1)/n in stage 3; stages 0 and 1 once a step, 2 and 3 each micro-batch."""
    for n in (2, 3):
        _, elements, sizes = traffic(CASES["blocks"], stage, n, k)
        passes = {0: 2, 1: 2, 2: 1 + k, 3: 3 * k}[stage]
        assert elements == passes * sum(sizes) * (n - 1) // n


def keeping_saves_two_units() -> None:
    """Law 21 without ``reshard_last_units``: the first and the last unit are there when the backward pass begins."""
    _, elements, sizes = traffic(CASES["blocks"], 3, 2, reshard=False)
    assert elements == (3 * sum(sizes) - sizes[0] - sizes[-1]) // 2


def fewest(uses: Sequence[int], capacity: int) -> int:
    """How many fetches serve these uses, by trying everything."""
    costs = {frozenset[int](): 0}
    for unit in uses:
        after: dict[frozenset[int], int] = {}
        for there, cost in costs.items():
            rests = [there] if unit in there or len(there) < capacity else [there - {other} for other in there]
            for rest in rests:
                whole, total = rest | {unit}, cost + (unit not in there)
                after[whole] = min(after.get(whole, total), total)
        costs = after
    return min(costs.values(), default=0)


def plans_are_the_shortest() -> None:
    """No sequence of evictions needs fewer fetches, and each unit is there at its use."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        uses = tuple(torch.randint(0, 4, (9,), generator=generator).tolist())
        assert len(plan_fetches(uses, 2).fetches) == fewest(uses, 2)


class LastPlain(Blocks):
    """All passes but the last are recomputed."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for number in range(self.passes):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if number + 1 < self.passes else block(x)
        return self.out(x)


def passes(recompute: bool | None) -> Case:
    """A model that goes three times through its blocks; None recomputes all passes but the last."""

    def make() -> Any:
        torch.manual_seed(3)
        kind = LastPlain if recompute is None else Blocks
        apply, params = fds.functional(kind(recompute=bool(recompute), passes=3))
        return params, lambda p, batch: ((apply(p, batch[0]) - batch[1]) ** 2).mean()

    return Case(make, CASES["blocks"].batch)


def several_passes_gather_no_more_than_needed(recompute: bool | None) -> None:
    """Law 21: the plans' fetches are the fewest; the backward pass has no use for the first layer's params."""
    calls, _, sizes = traffic(passes(recompute), 3, 2)
    rest, *blocks = range(len(sizes))
    uses = (rest, *blocks, *blocks, *blocks, rest)
    assert calls == fewest(uses, 2) + fewest(uses[:0:-1], 2) + len(sizes)


def two_whole_units_and_the_next(recompute: bool, reshard: bool) -> None:
    """Stage 3's memory: of the units that were fetched two are alive, whoever holds them."""
    most, alive, fetch = [0], set[StorageWeakRef](), Gatherer.fetch

    def watched(self: Gatherer, unit: int) -> list[Tensor]:
        flats = fetch(self, unit)
        if rank() == 0:
            alive.update(StorageWeakRef(flat.untyped_storage()) for unit in self.whole.values() for flat in unit)
            alive.difference_update([ref for ref in alive if ref.expired()])
            most[0] = max(most[0], len(alive))
        return flats

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gatherer, "fetch", watched)
        comm.simulate(lambda: run(passes(recompute), (transforms.zero(3, reshard_last_units=reshard),)), world_size=2)
    assert most == [2]


# -- weights, clipping, draws -----------------------------------------------------------------------------------------


def tokens_weigh_the_same(stage: int | None) -> None:
    """Law 22: ∇L(B) = Σ wᵢ ∇L(Bᵢ), wᵢ = tokensᵢ / Σ tokens, over ranks and micro-batches."""
    counts, values = torch.tensor([1.0, 4.0, 0.0, 3.0]), torch.tensor([1.0, 2.0, 3.0, 4.0])

    def loss(p: Any, batch: tuple[Tensor, Tensor]) -> fds.Weighted:
        return fds.Weighted(((p["w"] + 1) * batch[0] * batch[1]).sum(), batch[1].sum())

    def program() -> tuple[float, float]:
        strategy = [] if stage is None else [transforms.zero(stage)]
        step = fds.compose(*strategy, transforms.accumulate(2))(fds.train_step(loss, fds.sgd(1.0)))
        state, metrics = step(step.init({"w": torch.zeros(1)}), own_rows((values, counts), comm.world()))
        return -step.params(state)["w"].item(), metrics["loss"].item()

    mean = ((values * counts).sum() / counts.sum()).item()
    assert comm.simulate(program, world_size=1 if stage is None else 2) == [(mean, mean)] * (1 if stage is None else 2)


def one_device_accumulates(k: int) -> None:
    """Law 23: k micro-batches are the whole batch."""
    close(run(CASES["mlp"], (transforms.accumulate(k),)), alone("mlp", 8))


def norms_are_of_the_whole_gradient(stage: int | None) -> None:
    """Law 27: the metric is ‖g‖ and the update uses g · min(1, limit / ‖g‖)."""
    w, b, x = numbers(5), numbers(3), numbers(12, 5)
    g = torch.cat([x.mean(0), torch.full((3,), 2.0)])

    def program(limit: float) -> tuple[float, Tensor]:
        strategy = [] if stage is None else [transforms.zero(stage)]
        step = fds.compose(*strategy, transforms.clip(limit), transforms.accumulate(2))(
            fds.train_step(lambda p, rows: (rows @ p["w"]).mean() + 2 * p["b"].sum(), fds.sgd(1.0))
        )
        state, metrics = step(step.init({"w": w, "b": b}), own_rows(x, comm.world()))
        after = step.params(state)
        return metrics["grad_norm"].item(), torch.cat([w - after["w"], b - after["b"]])

    for limit in (0.5, 100.0):
        for norm, moved in comm.simulate(program, limit, world_size=1 if stage is None else 3):
            close((torch.tensor(norm), moved), (g.norm(), g * min(1.0, limit / g.norm().item())))


def everybody_hears_of_an_overflow(stage: int) -> None:
    """Gradients of which one rank's are infinite are finite on no rank (stages 1 to 3, where the ranks have their own)."""

    def program(bad: int) -> bool:
        step = transforms.zero(stage)(fds.train_step(lambda p, x: (p["w"] * x).sum(), fds.sgd(1.0)))
        state = step.init({"w": torch.ones(4)})
        return bool(step.finite(state, [torch.full((2,), float("inf") if rank() == bad else 1.0)]))

    assert comm.simulate(program, 1, world_size=2) == [False, False]
    assert comm.simulate(program, 2, world_size=2) == [True, True]


def draws_depend_on_the_position() -> None:
    """Law 29: dropout is the whole batch's, over ranks and micro-batches; other steps and names draw otherwise."""
    x = torch.linspace(-1, 1, 24).view(8, 3)
    masks: list[Tensor] = []

    def loss(params: Any, batch: Tensor, key: Key | None) -> Tensor:
        assert key is not None
        masks.append(key.dropout(torch.ones_like(batch), 0.5, "a"))
        return (params["w"] * batch * masks[-1]).mean()

    def program(*strategy: fds.Transform) -> Any:
        step = fds.compose(*strategy)(fds.train_step(loss, fds.sgd(0.5), seed=11))
        state = step.init({"w": torch.ones(3)})
        for _ in range(3):
            state, _ = step(state, own_rows(x, comm.world()))
        return step.params(state)

    expected = program()
    assert not any(torch.equal(a, b) for a, b in pairwise(masks))
    for n, k in ((2, 1), (1, 2), (2, 2)):
        for found in comm.simulate(program, transforms.zero(0), transforms.accumulate(k), world_size=n):
            close(found, expected)
    assert not torch.equal(Key.of(0).uniform(x, "a"), Key.of(0).uniform(x, "b"))


# -- states -----------------------------------------------------------------------------------------------------------


def donation_changes_nothing_but_memory() -> None:
    """Law 31: both ways give the same; a kept state stays as it is, a donated one is of no use."""
    step = fds.train_step(lambda p, x: ((x @ p["w"]) ** 2).mean(), fds.adamw(0.1))
    x = torch.ones(4, 3)
    state, _ = step(step.init({"w": torch.arange(6.0).view(3, 2)}), x)
    before = tree.map(torch.clone, state)
    kept, _ = step(state, x, donate=False)
    same(state, before)
    donated, _ = step(state, x)
    same(donated, kept)
    assert raises(fds.DonatedStateError, lambda: step.params(state))


def masters_move_by_less_than_bf16_shows(stage: int) -> None:
    """Eight updates of 2⁻¹⁰, none of which bf16 could show, add up; the loss sees the rounded sum."""

    def program() -> tuple[float, float, torch.dtype]:
        seen: list[torch.dtype] = []

        def loss(p: Any, x: Tensor) -> Tensor:
            seen.append((p["w"] * x).dtype)
            return (p["w"] * x).sum()

        step = fds.compose(transforms.mixed_precision(), transforms.zero(stage))(fds.train_step(loss, fds.sgd(2.0**-10)))
        state, x = step.init({"w": torch.ones(1)}), torch.ones(1)
        for _ in range(8):
            state, _ = step(state, x)
        return step.params(state)["w"].item(), step.evaluate(state, x).item(), seen[-1]

    assert comm.simulate(program, world_size=2) == [(1 - 2.0**-7, 1 - 2.0**-7, torch.bfloat16)] * 2


# -- optimizers -------------------------------------------------------------------------------------------------------


@cache
def by_one_device(rule: str) -> Any:
    return trained(rule)


def an_optimizer_is_that_of_one_device(rule: str, stage: int) -> None:
    """Law 19."""
    for found in comm.simulate(lambda: trained(rule, transforms.zero(stage)), world_size=3):
        assert_close(found, by_one_device(rule), 1e-6)


def leaves_go_their_own_ways() -> None:
    """Two optimizers for two kinds of leaves, against each for all leaves; two decays in two kinds."""

    def moved(rule: Any) -> Any:
        step = fds.train_step(linear, rule)
        state, _ = step(step.init(fresh()), torch.arange(4))
        return dict(tree.named(step.params(state)))

    fast, slow = fds.sgd(0.5, weight_decay=0.5), fds.sgd(0.5)
    for both in (fds.param_groups({"w$": fast}, slow), fds.sgd(0.5, weight_decay=0.5, decay="w$")):
        for path, leaf in moved(both).items():
            assert torch.equal(leaf, moved(fast if path.endswith("w") else slow)[path])


def owners_give_pieces_back() -> None:
    """Four leaves in equal pieces on three ranks, so that the ranks own them in turn."""

    def program() -> None:
        layout = Layout.of({f"b.{i}": torch.arange(6.0) + 10 * i for i in range(4)}, N)
        parts = LeafMap.of_layout(layout, comm.world())
        pieces = [torch.arange(2.0) + 10 * leaf + 2 * rank() for leaf in range(4)]
        owners = MatrixOwners.choose(parts)
        whole = owners.gather(pieces, torch.float32)
        assert {i: leaf.tolist() for i, leaf in whole.items()} == {i: [10 * i + k for k in range(6)] for i in whole}
        assert sorted(whole) == [[0, 3], [1], [2]][rank()]
        assert all(map(torch.equal, owners.scatter(whole, torch.float32), pieces))

    comm.simulate(program, world_size=N)


def lion_steps_by_signs() -> None:
    """Two steps by hand."""
    step = fds.train_step(lambda p, x: (p["w"] * x).sum(), fds.lion(1.0, betas=(0.5, 0.75), weight_decay=0.5))
    state = step.init({"w": torch.full((2,), 4.0)})
    state, _ = step(state, torch.tensor([8.0, -8.0]))
    assert step.params(state)["w"].tolist() == [1.0, 3.0]
    state, _ = step(state, torch.tensor([-3.0, 4.0]))
    assert step.params(state)["w"].tolist() == [1.5, 0.5]


def skipped_updates_move_nothing(rule: str) -> None:
    """Law 25 for the optimizer and for the mean of the params."""

    def program() -> None:
        def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
            before = tree.map(torch.clone, (state.params, state.optimizer, state.slots["ema"]))
            state, metrics = inner(step, tree.replace(state, skip=state.step == 1), grads)
            after = (state.params, state.optimizer, state.slots["ema"])
            if state.step == 1 and before[0][0].equal(after[0][0]):
                assert all(torch.equal(x, y) for x, y in zip(tree.leaves(before), tree.leaves(after), strict=True))
                seen.append(True)
            return tree.replace(state, skip=None), metrics

        seen: list[bool] = []
        trained(rule, transforms.ema(0.5), fds.wrap("skip", update=update), transforms.zero(1), steps=2)
        assert seen

    comm.simulate(program, world_size=2)


def unused_leaves_stay(stage: int) -> None:
    rule, theirs = test_unused.RULES["adamw"]
    expected = test_unused.plain(theirs)
    for found in comm.simulate(test_unused.params_of, rule, transforms.zero(stage), world_size=2):
        test_unused.check(found, expected)


def the_mean_is_by_hand(stage: int) -> None:
    """mean ← decay · mean + (1 - decay) · params."""

    def program() -> tuple[float, float]:
        base = fds.train_step(lambda p, x: (p["w"] * x).sum(), fds.sgd(1.0))
        step = fds.compose(transforms.ema(0.75), transforms.mixed_precision(), transforms.zero(stage))(base)
        state = step.init({"w": torch.zeros(1)})
        for _ in range(2):
            state, _ = step(state, torch.ones(1))
        return step.params(state)["w"].item(), transforms.averaged(step, state)["w"].item()

    assert comm.simulate(program, world_size=2) == [(-2.0, -0.6875)] * 2


def factors_of_updates() -> None:
    """The first updates of each schedule."""

    def first(fn: Any, updates: int) -> list[float]:
        return [round(fn(i).item(), 3) for i in range(updates)]

    assert first(transforms.warmup(2), 3) == [0.5, 1.0, 1.0]
    assert first(transforms.warmup(4, shape="log"), 5) == [0.0, 0.5, 0.792, 1.0, 1.0]
    assert first(transforms.warmup_decay(2, 4, floor=0.5), 6) == [0.75, 1.0, 1.0, 0.75, 0.5, 0.5]
    assert first(transforms.one_cycle(2, 1, floor=0.5, decay=1.0), 4) == [0.75, 1.0, 0.5, 0.25]
    assert first(transforms.range_test(2, staircase=True), 3) == [1.0, 2.0, 2.0]


def plain_momentum() -> fds.Optimizer:
    """An optimizer that writes into its arguments and does not know of skipping."""

    def update(params: list[Tensor], grads: fds.Weighted, state: list[Tensor], rate: Any) -> Any:
        for p, grad, momentum in zip(params, grads.sum, state, strict=True):
            p.sub_(momentum.mul_(0.5).add_(grad.to(p.dtype) / grads.weight))
        return params, state

    return fds.Optimizer(lambda params: [torch.zeros_like(p) for p in params], update)


def an_overflow_skips_the_step(stage: int, optimizer: Callable[[], Any] | None) -> None:
    """Law 25: one rank's infinity, or NaN, in one element leaves all ranks' states as they were; a good step moves them."""

    def program(value: float) -> None:
        scale = transforms.DynamicScale(4.0, hysteresis=1)
        step = fds.compose(transforms.mixed_precision("bf16", scale), transforms.zero(stage))(
            fds.train_step(lambda p, x: (p["w"] * x).sum(), optimizer() if optimizer else fds.adamw(0.1))
        )
        state, x = step.init({"w": torch.ones(4)}), torch.ones(4)
        state, _ = step(state, x)
        before = tree.map(torch.clone, (state.params, state.optimizer, state.step, state.slots["mixed_precision"].masters))
        if rank() == 1:
            x[1] = value
        state, metrics = step(state, x)
        same((state.params, state.optimizer, state.step, state.slots["mixed_precision"].masters), before)
        assert (metrics["skipped"], metrics["loss_scale"]) == (1, 4)
        state, metrics = step(state, torch.ones(4))
        assert (metrics["skipped"], metrics["loss_scale"], state.step) == (0, 2, 2)
        assert not torch.equal(state.params[0], before[0][0])

    comm.simulate(program, float("inf"), world_size=2)
    comm.simulate(program, float("nan"), world_size=2)


def scaling_by_a_power_of_two_changes_nothing() -> None:
    """Law 24: params and metrics with a scale have the bits of those without; gradients on their way are scaled."""

    def program(scale: Any) -> tuple[Any, Any, float]:
        sums: list[float] = []

        def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
            sums.append(grads.sum[0].sum().item())
            return inner(step, state, grads)

        strategy = transforms.mixed_precision("f32", scale), transforms.clip(0.5), fds.wrap("note", update=update)
        step = fds.compose(*strategy)(fds.train_step(lambda p, x: (p["w"] * x).sum(), fds.sgd(1.0)))
        state, metrics = step(step.init({"w": torch.ones(3)}), torch.tensor([0.7, -2.0, 3.1]))
        return (step.params(state), metrics["loss"], metrics["grad_norm"]), metrics.keys(), sums[0]

    (plain, _, small), (scaled, keys, large) = program(transforms.NoScale()), program(2.0**10)
    same(scaled, plain)
    assert large == 2**10 * small
    assert {"loss_scale", "skipped"} < keys


def dynamic_scales_follow_the_rules() -> None:
    """Growth after a window without overflow; shrinking after as many overflows as patience has; the ends hold."""

    def values(scale: transforms.DynamicScale, finite: str) -> list[float]:
        found = []
        for good in finite:
            scale = scale.adjust(torch.tensor(good == "+"))
            found.append(scale.value.item())
        return found

    patient = transforms.DynamicScale(8.0, window=3, hysteresis=2, maximum=16.0, minimum=4.0)
    assert values(patient, "++-+++-") == [8, 8, 8, 8, 8, 16, 16]
    assert values(patient, "-+--++++++") == [8, 8, 4, 4, 4, 4, 8, 8, 8, 16]
    assert values(patient, "++++++") == [8, 8, 16, 16, 16, 16]
    consecutive = transforms.DynamicScale(8.0, window=5, hysteresis=2, consecutive=True)
    assert values(consecutive, "-+-+--+--") == [8, 8, 8, 8, 8, 4, 4, 4, 2]


def exceptions_keep_their_dtype() -> None:
    """Leaves that a policy excepts have another dtype in the loss, on shards too; the first rule that fits counts."""

    def program(stage: int) -> Any:
        seen: list[Any] = []

        def loss(p: Any, x: Tensor) -> Tensor:
            seen.append({name: (leaf * 1).dtype for name, leaf in p.items()})
            return (p["norm.w"] * x).sum() + (p["w"] * x).sum() + (p["norm.b"] * x).sum()

        policy = transforms.mixed_precision("bf16,norm.b=f64,norm*=f32")
        step = fds.compose(policy, transforms.zero(stage))(fds.train_step(loss, fds.sgd(0.1)))
        step(step.init({"norm.w": torch.ones(4), "w": torch.ones(4), "norm.b": torch.ones(4)}), torch.ones(4))
        return seen[0]

    expected = {"norm.w": torch.float32, "w": torch.bfloat16, "norm.b": torch.float64}
    for stage in (1, 3):
        assert comm.simulate(program, stage, world_size=2) == [expected] * 2


def draws_of_rounding_depend_on_the_place() -> None:
    """Law 29: stochastic rounding in shards is the whole's; leaves and steps draw differently."""
    states: list[Any] = []

    def program(*strategy: fds.Transform) -> Any:
        policy = transforms.mixed_precision("params=bf16,compute=bf16", stochastic=True)
        step = fds.compose(policy, *strategy)(
            fds.train_step(lambda p, x: (p["a"] + p["b"]).sum() * 2.0**-9 + 0 * x.sum(), fds.sgd(1.0), seed=3)
        )
        state = step.init({"a": torch.ones(40), "b": torch.ones(40)})
        for _ in range(2):
            state, _ = step(state, torch.ones(2))
            states.append(step.params(state))
        return states[-1]

    expected = program()
    first, second = states[:2]
    assert not torch.equal(first["a"], first["b"])
    assert ((first["a"] == 1) & (second["a"] != 1)).any()  # with the same draws what stayed once would stay
    for found in comm.simulate(program, transforms.zero(2), world_size=3):
        same(found, expected)


def rounding_keeps_the_mean() -> None:
    """Of equally likely draws, a quarter round up what is a quarter on its way up; NaN stays."""
    draws = torch.arange(64) / 64
    found = round_stochastically(torch.full((64,), 1 + 2.0**-9), draws)
    assert (found == 1).sum() == 48
    assert (found == 1 + 2.0**-7).sum() == 16
    last_nan = torch.full((64,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    assert round_stochastically(last_nan, draws).isnan().all()


def schedules_multiply_the_rate() -> None:
    """Update i uses fn(i); the warm-up's first update moves, its last is whole."""
    table = torch.tensor([1.0, 0.5, 0.25, 0.125])
    step = transforms.schedule(lambda i: table[i])(fds.train_step(lambda p, x: (p["w"] * x).sum(), fds.sgd(1.0)))
    state, found = step.init({"w": torch.zeros(())}), []
    for _ in range(3):
        state, metrics = step(state, torch.ones(()))
        found.append((step.params(state)["w"].item(), metrics["rate"].item()))
    assert found == [(-1.0, 1.0), (-1.5, 0.5), (-1.75, 0.25)]
    fn = transforms.warmup_cosine(4, 8, floor=0.5)
    factors = torch.stack([fn(torch.tensor(i)) for i in (0, 1, 3, 4, 6, 8, 9)])
    close(factors, torch.tensor([0.25, 0.5, 1.0, 1.0, 0.75, 0.5, 0.5]))


def adamw_is_torchs() -> None:
    """The same updates as ``torch.optim.AdamW``."""
    x, options = numbers(4, 3), {"betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2}
    w = torch.linspace(-1, 1, 3).requires_grad_()
    theirs = torch.optim.AdamW([w], 0.1, **options)  # type: ignore[arg-type]
    step = fds.train_step(lambda p, x: ((x @ p["w"]) ** 2).mean(), fds.adamw(0.1, **options))  # type: ignore[arg-type]
    state = step.init({"w": w.detach()})
    for _ in range(3):
        theirs.zero_grad()
        ((x @ w) ** 2).mean().backward()
        theirs.step()
        state, _ = step(state, x)
    close(step.params(state)["w"], w.detach())


def compressed_values_stay_near() -> None:
    """Law 38: int8 errs by absmax/254 a block at most, top-k contracts by 1 - k/m, in integers where sums are."""
    x = torch.randn(1, 40, generator=torch.Generator().manual_seed(1))
    x[0, ::16] = -5.0
    codec = comm.codecs.Blocks(8, size=16)
    found = codec.decode(codec.encode(x), 40, torch.float32)
    for block, other in zip(x[0].split(16), found[0].split(16), strict=True):
        assert (block - other).abs().max() <= block.abs().max() * (1 / 254 + 2**-21)
    y = numbers(1, 40) - 4
    left = y - comm.codecs.TopK(0.25).decode(comm.codecs.TopK(0.25).encode(y), 40, torch.float32)
    assert 4 * (left**2).sum() <= 3 * (y**2).sum()
    y[0, 3] = float("inf")
    assert not codec.decode(codec.encode(y), 40, torch.float32)[0, :16].isfinite().any()


def feedback_owes_what_it_left_out() -> None:
    """Law 38: Σ C(pₜ) = Σ gₜ + e₀ - e_T, exactly, on the way out and on the way back."""
    feedback = comm.codecs.ErrorFeedback(comm.codecs.TopK(0.3))

    def program() -> tuple[Tensor, Tensor, Tensor]:
        residual, told = feedback.init(torch.zeros(9)), torch.zeros(9)
        for t in range(4):
            total, residual = feedback.all_reduce(numbers(9, rank=10 * t + rank()), residual)
            told = told + total
        return told, residual.own, residual.piece

    told, own, piece = (torch.stack(found) for found in zip(*comm.simulate(program, world_size=N), strict=True))
    expected = sum(numbers(9, rank=10 * t + r) for t in range(4) for r in range(N)) - own.sum(0) - piece.flatten()
    assert all(torch.equal(other, expected) for other in told)


def a_compressed_gather_is_for_the_loss(stage: int) -> None:
    """The loss sees quantised params and the optimizer exact ones: small updates add up, and no loss moves by less than a
    quantisation step."""

    def apart(params: list[Tensor], grads: fds.Weighted, state: Any, rate: Any) -> tuple[list[Tensor], Any]:
        return [p - 2.0**-10 * grad / grads.weight for p, grad in zip(params, grads.sum, strict=True)], state

    def program() -> tuple[float, float]:
        zero = transforms.zero(stage, all_gather=comm.codecs.compressed(comm.all_gather, comm.codecs.Blocks(8)))
        step = zero(fds.train_step(lambda p, x: (p["w"] * x).sum(), fds.Optimizer(lambda params: (), apart, "apart")))
        state, x = step.init({"w": torch.tensor([127.0, 1.25, 127.0, 1.25])}), torch.tensor([0.0, 1.0, 0.0, 0.0])
        for _ in range(4):
            state, _ = step(state, x)
        return step.evaluate(state, x).item(), step.params(state)["w"][1].item()

    assert comm.simulate(program, world_size=2) == [(1.0, 1.25 - 2.0**-8)] * 2


# -- the bugs ---------------------------------------------------------------------------------------------------------

# -- checkpoints -------------------------------------------------------------------------------------------------------


def checkpoints_come_back() -> None:
    """Law 37, from three ranks to two, where a rank writes parts of what all have; a wrong bit is found."""

    def program(stage: int, use: Callable[[fds.Step, fds.State], Any]) -> Any:
        step = transforms.zero(stage)(fds.train_step(linear, fds.muon(0.1, fds.adamw(0.1))))
        state, _ = step(step.init(fresh()), torch.arange(12).tensor_split(comm.world().size)[rank()])
        return use(step, state)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (saved, *_) = comm.simulate(
            lambda: program(2, lambda step, state: (fds.save(state, folder), step.params(state))[1]), world_size=3
        )
        again = lambda: program(3, lambda step, state: step.params(fds.load(folder, like=state, tag="1")))  # noqa: E731
        for found in comm.simulate(again, world_size=2):
            same(found, saved)
        data = (folder / "1" / "00001.bin").read_bytes()
        (folder / "1" / "00001.bin").write_bytes(data[:7] + bytes([data[7] ^ 4]) + data[8:])
        assert raises(checkpointing.DamagedError, lambda: comm.simulate(again, world_size=2))


def runs_go_on() -> None:
    """Law 37: a run in two parts is the run, in the data and with losses that are not finite skipped."""

    def run(folder: Path | None, steps: int, skipped: int) -> Any:
        step = fds.train_step(linear, fds.adamw(0.1))
        batch = lambda index: torch.arange(12) * (math.nan if index == skipped else index + 1)  # noqa: E731
        rule = RollBack(after=1) if folder else None
        data = batch if folder else lambda index: batch(index + 2 if index > 3 else index)
        checkpoints = None if folder is None else fds.Checkpoints(folder, every=2)
        logging = fds.Logging(every=1)
        state = fds.fit(
            step, step.init(fresh()), data, steps=steps, checkpoints=checkpoints, logging=logging, on_non_finite=rule
        )
        return step.params(state)

    with tempfile.TemporaryDirectory() as name:
        run(Path(name), 3, 5)
        same(run(Path(name), 7, 5), run(None, 7, 5))


# -- activations ------------------------------------------------------------------------------------------------------


def a_remat_is_the_function(policy: str) -> None:
    """Law 28, on two ranks: value and gradients of a function under a policy are the function's, bit for bit."""

    def program() -> Any:
        function = fds.remat(awkward, policy=policy, group=comm.world() if "partition" in policy else None)
        return outcome(function, dtype=torch.float32, autocast=False)

    for found in comm.simulate(program, world_size=2):
        same(found, outcome(awkward, dtype=torch.float32, autocast=False))


# -- offload ---------------------------------------------------------------------------------------------------------------


def offload_changes_nothing() -> None:
    """Law 28: a step with states on the disk is the step without, a kept state can be stepped from again, damage is noticed."""
    with tempfile.TemporaryDirectory() as folder:
        disk = transforms.offload("disk", path=folder, buffer_bytes=1, direct=False)
        params, batch = {"w": torch.linspace(-1, 1, 300)}, torch.tensor(0.5)

        def final(*strategy: fds.Transform) -> Any:
            step = fds.compose(transforms.mixed_precision("bf16"), transforms.clip(1.0), *strategy)(
                fds.train_step(lambda p, x: (p["w"] * x).sin().sum(), fds.sgd(0.1, momentum=0.9))
            )
            kept, _ = step(step.init(params), batch)
            results = [step.params(step(step(kept, batch, donate=False)[0], batch)[0]) for _ in range(2)]
            return step, kept, results

        _, _, expected = final()
        step, state, found = final(disk)
        same(found, expected)
        assert all(torch.equal(a["w"], b["w"]) for a, b in zip(found, expected, strict=True))
        for file in Path(folder).glob("*/*masters"):
            file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))
        assert raises(transforms.OffloadError, lambda: step(state, batch))


def buffers_are_state(k: int) -> None:
    """Law 59: running statistics are plain PyTorch's, the state before is as it was, and a resumed state has them."""
    _, want_params, want_buffers = plain([list(rows(index).chunk(k)) for index in range(3)])
    apply, params = fds.functional(network())
    step = transforms.accumulate(k)(fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.1)))
    state = step.init(params)
    for index in range(3):
        before = {name: buffer.clone() for name, buffer in step.module_buffers(state).items()}
        after, _ = step(state, rows(index), donate=False)
        same(step.module_buffers(state), before)
        state = after
    torch.testing.assert_close(step.params(state), want_params)
    torch.testing.assert_close(step.module_buffers(state), want_buffers)
    same(apply.buffers, dict(network().named_buffers()))
    with tempfile.TemporaryDirectory() as folder:
        fds.save(state, folder)
        same(step.module_buffers(fds.load(folder, like=step.init(params))), step.module_buffers(state))


def ranks_keep_the_first_ranks_buffers() -> None:
    """Law 19 with BatchNorm: DistributedDataParallel's params and buffers."""
    want_params, want_buffers = as_ddp(2, 2)

    def program() -> Any:
        apply, params = fds.functional(network())
        step = transforms.zero(1)(fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.1)))
        state = step.init(params)
        for index in range(2):
            state, _ = step(state, rows(index).chunk(2)[rank()])
        return step.params(state), step.module_buffers(state)

    for params, buffers in comm.simulate(program, world_size=2):
        torch.testing.assert_close(params, {name: p.detach() for name, p in want_params.items()})
        torch.testing.assert_close(buffers, want_buffers)


def modules_that_reach_themselves_are_functions(how: str) -> None:
    """Past their attributes: by closures, hooks and lists."""
    build = partial(Around, how)
    torch.testing.assert_close(test_functional.ours(build, None), test_functional.plain(build))


def buffers_have_several_names() -> None:
    """One buffer, also in an attribute or a closure."""
    for how in ("attribute", "cell"):
        build = partial(test_functional.Counted, how)
        torch.testing.assert_close(test_functional.ours(build, None), test_functional.plain(build))


def what_training_would_part_is_refused(how: str) -> None:
    """Weights that are written, and memory that is shared."""
    if how in ("tied by data", "interleaved"):
        assert raises(ValueError, partial(fds.functional, test_functional.Shares(how))) == (how == "tied by data")
    elif how == "attribute":
        assert raises(RuntimeError, partial(test_functional.ours, partial(test_functional.Shares, how), None))
    else:
        stage, write = how.split(": ")
        clipped = partial(test_functional.Clipped, write)
        with pytest.raises(RuntimeError, match="the module Clipped wrote"):
            test_functional.ours(clipped, 2 if stage == "sharded" else None)


def caches_are_as_they_were() -> None:
    """Law 28 for objects among the arguments."""
    test_argument_snapshot.test_a_cache_is_as_it_was("positional", "recompute")


def ranks_agree_when_one_begins_to_write() -> None:
    """In the step in which a rank writes a buffer that none has written before."""
    test_one_rank_may_be_the_first_to_write(0, "mean")


def scatter_and_publish_are_inverse(half: bool) -> None:
    """In ZeRO 1 and with mixed precision: what is stored comes back, and ``trained`` lines up with the gradients."""

    def program() -> None:
        precision = (transforms.mixed_precision("bf16"),) if half else ()
        step = fds.compose(*precision, transforms.zero(1))(fds.train_step(lambda p, x: (x @ p["w"]).sum(), fds.sgd(0.1)))
        state = step.init({"w": numbers(3, 5), "frozen": numbers(4, dtype=torch.int64)})
        back = step.publish(step.scatter(state)).params
        same(back, state.params)
        assert [leaf.dtype for leaf in tree.leaves(back)] == [leaf.dtype for leaf in tree.leaves(state.params)]
        assert [leaf.dtype for leaf in step.trained(state)] == [torch.float32]

    comm.simulate(program, world_size=2)


BUGS: dict[tuple[Any, ...], list[Bug]] = {  # under the law that each breaks, and the law's case
    # activations
    (a_remat_is_the_function, "recompute,product=save"): [
        Bug("a product is taken for another", "remat.op_cache:_CallIndex.__call__", "self._calls[func]", "1"),
    ],
    (a_remat_is_the_function, "recompute,inputs=partition"): [
        Bug(
            "all ranks keep the first piece",
            "remat.partitioned:partition",
            "flat[group.rank * size:(group.rank + 1) * size]",
            "flat[:size]",
        ),
    ],
    (a_remat_is_the_function, "offload"): [
        Bug(
            "what comes back lies otherwise",
            "remat.saved_tensors:compact",
            "distinct.as_strided((distinct.numel(),), (1,), distinct.storage_offset())",
            "distinct.as_strided((distinct.numel(),), (1,), distinct.storage_offset()).flip(0)",
        ),
    ],
    # sharding and collectives
    (sharding_is_a_bijection,): [
        Bug("shards are rounded down", "sharding.layout:Layout.of", "-(-size // count)", "size // count", RuntimeError),
        Bug(
            "shards begin one element late",
            "sharding.layout:Layout.stretch",
            "piece(leaf, low - slot.offset, high - slot.offset)",
            "piece(leaf.roll(-1), low - slot.offset, high - slot.offset)",
        ),
    ],
    (collectives_are_dense_programs,): [
        Bug(
            "all_gather joins in reverse",
            "comm.table.tiling:join",
            "torch.cat(list(pieces), options['dim'])",
            "torch.cat(list(pieces)[::-1], options['dim'])",
        ),
        Bug("max adds", "comm.backends.reduction:fold", "binary = OPS[op]", "binary = OPS['sum' if op == 'max' else op]"),
        Bug("a mean is over n + 1", "comm.api:reducing.divided", "group.size", "group.size + 1"),
    ],
    (exchanges_are_dense_programs,): [
        Bug(
            "all_to_all joins where it cut",
            "comm.table.exchanges:_all_to_all",
            "options['concat_dim']",
            "options['split_dim']",
        ),
        Bug(
            "rows go to the next rank",
            "comm.table.exchanges:_all_to_all_rows",
            "pieces[rank]",
            "pieces[rank - 1]",
        ),
        Bug(
            "permute goes backwards",
            "comm.table.exchanges:_permute",
            "options['perm'].source",
            "options['perm'].target",
        ),
        Bug("all get the whole", "comm.table.rooted_rows:_gather", "rank == options['dst']", "True"),
        Bug(
            "sizes are everybody's own",
            "comm.calls.uneven:sizes_along",
            "theirs[place][0]",
            "leaves[place].shape[dim]",
            comm.errors.MismatchError,
        ),
    ],
    (messages_carry_gradients_back,): [
        Bug(
            "gradients go on, not back",
            "comm.table.exchanges:TRANSFER",
            "{**options, 'src': options['dst'], 'dst': options['src']}",
            "options",
        ),
    ],
    (what_a_value_is_decides,): [
        Bug("copies do not add up", "comm.table.exchanges:COPY_TO", "Call(REDUCE_FROM, {'op': 'sum'})", "Call(COPY_TO, {})"),
        Bug(
            "sums add up again",
            "comm.table.exchanges:REDUCE_FROM",
            "Call(COPY_TO, {})",
            "Call(REDUCE_FROM, options)",
        ),
    ],
    (nothing_is_left_over,): [
        Bug("leftovers are forgotten", "comm.simulation.simulate:simulate", "simulator.slots", "{}"),
    ],
    (ranks_keep_their_settings,): [
        Bug("ranks share warning filters", "comm.worlds.rng_state:RngState.copies", "[*self.filters]", "self.filters"),
        Bug("the default dtype stays", "comm.worlds.rng_state:RngState.restore", "torch.set_default_dtype(self.dtype)", "pass"),
    ],
    (results_outlive_inference_mode,): [
        Bug(
            "results belong to inference mode",
            "comm.calls.dispatch:_in_inference_mode",
            "not torch.is_grad_enabled() and torch.is_inference_mode_enabled()",
            "False",
        ),
    ],
    (a_destroyed_world_is_refused,): [
        Bug(
            "a destroyed world goes on",
            "comm.worlds.process:ProcessWorld.is_over",
            "bool(self.over) or dist.group.WORLD is not self._everyone",
            "bool(self.over)",
        ),
    ],
    (test_failed_steps.test_a_rank_that_fails_alone_is_refused_and_the_others_hear_why,): [
        Bug(
            "a rank that has failed alone goes on",
            "comm.record.failed_steps:FailedSteps.before",
            "self._failed is not None",
            "False",
            pytest.fail.Exception,
        ),
    ],
    (test_failed_steps.test_ranks_that_fail_in_different_calls_are_refused,): [
        Bug(
            "ranks need not have failed alike",
            "comm.record.failed_steps:FailedSteps._difference",
            "not mine.like(theirs, self.rank, rank)",
            "False",
            pytest.fail.Exception,
        ),
    ],
    (shapes_count_as_values_do,): [
        Bug(
            "a loop counts once",
            "comm.worlds.shapes:ShapesWorld.repeat",
            "ledger.multiply(before, times)",
            "ledger.multiply(before, 1)",
        ),
    ],
    (half_precision_sums_round_once,): [
        Bug("bf16 sums round each time", "comm.backends.reduction:fold", "parts[0].float()", "parts[0].clone()"),
    ],
    (results_have_memory_of_their_own,): [
        Bug("all ranks get one tensor", "comm.table.rows:_copies", "value.clone()", "value"),
    ],
    (calls_read_their_input_at_once,): [
        Bug(
            "the simulator reads inputs late",
            "comm.simulation.schedule:copied",
            "tensor.detach().clone(memory_format=torch.contiguous_format)",
            "tensor.detach()",
        ),
    ],
    (adjoints_are_transposes,): [
        Bug(
            "all_gather's transpose does not add",
            "comm.table.rows:ALL_GATHER",
            "{**options, 'op': 'sum'}",
            "{**options, 'op': 'max'}",
        ),
        Bug(
            "all_to_all's transpose keeps its dims",
            "comm.table.exchanges:ALL_TO_ALL",
            "o['concat_dim']",
            "o['split_dim']",
            ValueError,
        ),
        Bug(
            "rows return as they came",
            "comm.table.exchanges:_rows_adjoint",
            "options['output_splits']",
            "options['input_splits']",
            Exception,
        ),
        Bug("permute's transpose goes on", "comm.table.exchanges:PERMUTE", "options['perm'].inverse", "options['perm']"),
    ],
    (the_ledger_counts_what_is_sent,): [
        Bug(
            "all_gather sends to itself, too",
            "comm.table.nodes:all_gather_volume",
            "(here.n - 1) * leaf.numel()",
            "here.n * leaf.numel()",
        ),
        Bug(
            "all pieces are alike",
            "comm.table.nodes:all_reduce_volume",
            "sent + (inside - chunk) + (nodes - 1) * chunk",
            "sent + 2 * (nodes - 1) * chunk",
        ),
        Bug(
            "all ranks send in a permutation",
            "comm.table.exchanges:PERMUTE",
            "here['perm'].target.get(here.rank, here.rank) != here.rank",
            "here['perm'].target",
        ),
    ],
    (a_mesh_is_a_grid,): [
        Bug("a mesh counts by columns", "comm.mesh:Mesh._strides", "sizes[i + 1:]", "sizes[:i]"),
    ],
    (communicators_are_told_apart,): [
        Bug(
            "tags share a communicator",
            "comm.worlds.communicator_key:CommunicatorKey.between",
            "CommunicatorKey(tuple(sorted(ranks)), group.ranks, group.name, True, tag, ranks)",
            "CommunicatorKey(tuple(sorted(ranks)), group.ranks, group.name, True, 0, ranks)",
        ),
        Bug(
            "directions share one",
            "comm.worlds.communicator_key:CommunicatorKey.between",
            "(group.ranks[src], group.ranks[dst])",
            "group.ranks[:2]",
        ),
        Bug(
            "each connects its own first",
            "comm.worlds.communicator_key:CommunicatorKey.connected_together",
            "sorted([self, attrs.evolve(self, ranks=self.ranks[::-1])])",
            "list([self, attrs.evolve(self, ranks=self.ranks[::-1])])",
        ),
    ],
    (nothing_has_bytes,): [
        Bug(
            "an empty side stays",
            "comm.backends.nccl:_raw",
            "tensor.view(torch.uint8)",
            "tensor.view(torch.uint8) if tensor.numel() else tensor",
        ),
    ],
    (nccls_rules_name_contradictions,): [
        Bug("nobody follows who waits", "comm.simulation.nccl_rules:NcclRules._check", "other not in free", "False"),
        Bug(
            "a batch is one call after another",
            "comm.simulation.nccl_rules:RankRules.launch",
            "self.unposted is not None",
            "False",
            comm.errors.DeadlockError,
        ),
        Bug("hosts never connect", "comm.simulation.nccl_rules:NcclRules._connection", "communicator in connected", "True"),
        Bug(
            "trees connect as they go",
            "comm.simulation.simulator:SimulatedWorld.connect",
            "self.rules.connect(edges, group, call_site())",
            "pass",
            comm.errors.DeadlockError,
        ),
        Bug(
            "receives are early",
            "comm.simulation.simulator:SimulatedWorld.in_launch_order",
            "self.rules is not None",
            "False",
            comm.errors.DeadlockError,
        ),
    ],
    (the_simulator_finds_mismatches,): [
        Bug("nobody compares calls", "comm.simulation.schedule:Simulator.arrive", "known.agreement != slot.agreement", "False"),
    ],
    # buffers
    (buffers_are_state, 2): [
        Bug(
            "a pass writes into the state",
            "step.state.buffer_scope:ModuleValues.of",
            "plain_copy(b)",
            "b",
            RuntimeError,  # it is noticed
        ),
        Bug(
            "micro-batches forget each other",
            "transforms.accumulate:accumulate.gradients",
            "state, carry, more = inner(step, tree.replace(state, key=key), micro, carry, last and i == k - 1)",
            "_, carry, more = inner(step, tree.replace(state, key=key), micro, carry, last and i == k - 1)",
        ),
        Bug(
            "what a pass wrote is lost",
            "step.pass_scope:with_buffers",
            "state if scope.buffers is None else state.put(**{BUFFERS: scope.collect()})",
            "state or state.put(**{BUFFERS: scope.collect()})",
        ),
    ],
    (ranks_keep_the_first_ranks_buffers,): [
        Bug("each rank keeps its own", "step.state.buffer_sync:synchronized", "group.size == 1 or policy == 'own'", "True"),
        Bug(
            "the second rank's count",
            "step.state.buffer_sync:_agree",
            "(rank if by_writer else 0, shape, dtype)",
            "(1, shape, dtype)",
        ),
        Bug(
            "what kept its bits is not sent",
            "step.state.buffer_scope:_with_siblings",
            "name in written or name.rpartition('.')[0] in owners",
            "name in () and name.rpartition('.')[0] in owners",
        ),
    ],
    (ranks_agree_when_one_begins_to_write,): [
        Bug(
            "others are not told",
            "step.state.buffer_sync:agreed_anew",
            "state.slots[BUFFERS].known.agreed.clear()",
            "state.slots[BUFFERS].known.agreed",
            comm.errors.DeadlockError,
        ),
    ],
    (modules_that_reach_themselves_are_functions, "detached"): [
        Bug("closures lead to the original", "modules.deep_copy:_Rebinding.within", "held[key] = new", "pass", RuntimeError),
    ],
    (modules_that_reach_themselves_are_functions, "closure over a weight"): [
        Bug(
            "closures keep placeholders",
            "modules.deep_copy:_PlaceSearch.visit",
            "self.visit(cell.cell_contents, functools.partial(setattr, cell, 'cell_contents'))",
            "pass",
            ValueError,
        ),
    ],
    (buffers_have_several_names,): [
        Bug("one name is forgotten", "modules.skeleton:Skeleton.put", "put(held.values[name])", "pass", RuntimeError),
    ],
    (what_training_would_part_is_refused, "whole: data.copy_"): [
        Bug(
            "no value is looked at",
            "modules.write_watch:watched",
            "not all(map(torch.equal, sums, bit_sums(params[name])))",
            "any(map(lambda *_: False, sums, bit_sums(params[name])))",
        ),
    ],
    (what_training_would_part_is_refused, "sharded: data.copy_"): [
        Bug(
            "no operation is looked at",
            "modules.write_watch:_Operations.__torch_dispatch__",
            "func.namespace == 'aten'",
            "False",
        ),
    ],
    (what_training_would_part_is_refused, "tied by data"): [
        Bug("no overlap is looked for", "base.byte_ranges:overlapping", "one.meets(other)", "False"),
    ],
    (what_training_would_part_is_refused, "interleaved"): [
        Bug(
            "ranges are taken for elements",
            "base.byte_ranges:ByteRange.meets",
            "dense or one.element_size() != two.element_size() or (other.start - self.start) % size",
            "True or one.element_size() != two.element_size() or (other.start - self.start) % size",
        ),
    ],
    (what_training_would_part_is_refused, "attribute"): [
        Bug("attributes keep old weights", "modules.functional:Apply.__init__", "memo.update(memory.stale)", "pass"),
    ],
    (caches_are_as_they_were,): [
        Bug(
            "a cache grows twice",
            "remat.region:_separated",
            "snapshot([None if _is_value(leaf) else leaf for leaf in leaves])",
            "[None if _is_value(leaf) else leaf for leaf in leaves]",
        ),
    ],
    (scatter_and_publish_are_inverse, True): [
        Bug(
            "masters are not rounded back",
            "transforms.precision.kept_states:rounded",
            "rounded.append(old)",
            "rounded.append(new)",
        ),
    ],
    (scatter_and_publish_are_inverse, False): [
        Bug(
            "frozen segments come back as shards",
            "transforms.zero.zero:Zero._published",
            "frozen[i][0] if i in kept else new",
            "new",
        ),
    ],
    # one device
    (modules_are_functions,): [
        Bug("a tied weight becomes two", "modules.module_places:parameter_places", "id(parameter)", "(id(parameter), path)"),
    ],
    (one_device_accumulates, 2): [
        Bug("earlier gradients are dropped", "step.views.plain_view:_added", "total.add_(grad)", "grad"),
        Bug(
            "the last micro-batch is left out",
            "transforms.accumulate:accumulate.gradients",
            "enumerate(parts)",
            "enumerate(parts[:-1])",
        ),
    ],
    (adamw_is_torchs,): [
        Bug("both moments decay alike", "optim.adam:adam_optimizer.kernel", "1", "0"),
    ],
    (schedules_multiply_the_rate,): [
        Bug(
            "a schedule is one update ahead",
            "transforms.schedule:schedule.rate",
            "fn(state.step, **further)",
            "fn(state.step + 1, **further)",
        ),
        Bug(
            "a warm-up's first update is void",
            "transforms.schedule:warmup_cosine.factor",
            "up(count, dtype)",
            "up(count - 1, dtype)",
        ),
        Bug("updates are not counted", "step.train_step:updating.update", "state.step + count", "state.step"),
    ],
    (donation_changes_nothing_but_memory,): [
        Bug(
            "a kept state shares memory",
            "step.state.state:State.clone",
            "(leaf if keeps_graph else leaf.detach()).clone()",
            "leaf.detach()",
        ),
    ],
    # weights, clipping, draws
    (tokens_weigh_the_same, None): [
        Bug("earlier tokens are forgotten", "step.pass_scope:differentiated", "carry.weight + loss.weight", "loss.weight"),
    ],
    (tokens_weigh_the_same, 0): [
        Bug(
            "metrics are each rank's own",
            "step.over_ranks.mesh_axes:sum_over_ranks",
            "comm.all_reduce(scalars, axis.ranks())",
            "scalars",
        ),
    ],
    (tokens_weigh_the_same, 2): [
        Bug(
            "each rank divides by its own tokens",
            "step.step:Step._updated",
            "Weighted(grads.sum, weight)",
            "Weighted(grads.sum, grads.weight)",
        ),
    ],
    (norms_are_of_the_whole_gradient, None): [
        Bug(
            "small gradients are scaled up",
            "transforms.clip:clip.update",
            "torch.clamp((norm + _EPS) / limit, min=1.0)",
            "norm / limit",
        ),
        Bug(
            "the norm is the sum's, not the mean's",
            "transforms.clip:clip.update",
            "step.norm(state, grads.sum) / grads.weight",
            "step.norm(state, grads.sum)",
        ),
    ],
    (norms_are_of_the_whole_gradient, 0): [
        Bug(
            "stage 0 counts replicas",
            "transforms.zero.zero:Zero.parts",
            "return None",
            "return GradientParts()",
        ),
    ],
    (norms_are_of_the_whole_gradient, 2): [
        Bug(
            "each rank clips by its own shards",
            "step.over_ranks.gradient_sums:_total",
            "comm.all_reduce(functools.reduce(operator.add, divided), axis.ranks())",
            "functools.reduce(operator.add, divided)",
        ),
    ],
    (everybody_hears_of_an_overflow, 2): [
        Bug(
            "one rank's finite gradients suffice",
            "step.over_ranks.gradient_sums:finite",
            "comm.all_reduce(everywhere, axis.ranks(), op='min')",
            "comm.all_reduce(everywhere, axis.ranks(), op='max')",
        ),
    ],
    (draws_depend_on_the_position,): [
        Bug(
            "every rank draws as rank 0",
            "step.over_ranks.mesh_axes:batch_shard",
            "index * group.size + group.rank",
            "index * group.size",
        ),
        Bug(
            "micro-batches draw alike",
            "transforms.accumulate:accumulate.gradients",
            "first.at(step=first.step, rows=i * rows)",
            "first.at(step=first.step, rows=0)",
        ),
        Bug("steps draw alike", "base.prng:Key._drawn", "step * _GOLDEN", "0 * _GOLDEN"),
        Bug(
            "names draw alike",
            "base.prng:Key._drawn",
            "_mix(seed + _GOLDEN) + step * _GOLDEN + salt",
            "_mix(seed + _GOLDEN) + step * _GOLDEN",
        ),
    ],
    # ZeRO: what is reduced
    (zero_is_one_device, 0, "two trees"): [
        Bug(
            "two trees share a skeleton",
            "modules.functional:Apply._of_pass",
            "skeleton.identity == identity and skeleton.calls == pass_.calls and (skeleton.version == len(self._changes))",
            "skeleton.calls == pass_.calls and skeleton.version == len(self._changes)",
        ),
    ],
    (zero_is_one_device, 0, "blocks", 2, 2): [
        Bug("every micro-batch is the last", "transforms.accumulate:accumulate.gradients", "last and i == k - 1", "last"),
    ],
    (zero_is_one_device, 1, "blocks", 3, 2): [
        Bug("the carry is dropped in stage 1", "transforms.zero.zero:Zero._reducer", "{} if reduces_each else carry", "{}"),
    ],
    (zero_is_one_device, 2, "blocks", 3, 2): [
        Bug("the carry is dropped in stage 2", "transforms.zero.zero:Zero._reducer", "carry if reduces_each else {}", "{}"),
        Bug(
            "ranks get each other's rows",
            "transforms.zero.collectives:Collectives._scatter",
            "flat.view(level.size, -1)",
            "flat.view(level.size, -1).flip(0)",
        ),
    ],
    (traffic_is_exact, 1, 2): [
        Bug("stage 1 reduces each micro-batch", "transforms.zero.zero:Zero._reducer", "self.stage >= 2", "True"),
    ],
    (zero_is_one_device, 1, "mlp", 2, 2): [
        Bug(
            "a second micro-batch overwrites",
            "transforms.zero.reduce:Reducer._accumulate",
            "foreach_copy_ if fresh else foreach_add_",
            "foreach_copy_",
        ),
    ],
    (zero_is_one_device, 2, "branching"): [
        Bug(
            "each rank has its own order",
            "transforms.zero.reduce:Reducer._next",
            "self.order.units",
            "tuple(self._completed_after)",
            comm.errors.MismatchError,
        ),
        Bug(
            "each rank learns its own order",
            "transforms.zero.reduce:Reducer._trace_order",
            "tuple(agreed.tolist())",
            "tuple(self._completed_after)",
            comm.errors.MismatchError,
        ),
        Bug(
            "untouched units are not reduced",
            "transforms.zero.lazy_params:LazyParams.finish",
            "self.layout.units[unit].trained_leaves and unit not in self._tokens",
            "False",
            comm.errors.DeadlockError,
        ),
    ],
    # ZeRO: what is gathered
    (rank_0_gives_the_params, 0): [
        Bug(
            "each rank keeps its own params",
            "transforms.zero.initial_shards:InitialShards.read",
            "partial(_of_first, groups=self.groups.among(segment.sharers))",
            "lambda leaf: leaf",
        ),
    ],
    (zero_is_one_device, 1, "mlp"): [
        Bug(
            "other ranks' params stay old",
            "transforms.zero.zero:Zero._published",
            "[i for i in whole if i not in kept]",
            "[]",
            RuntimeError,  # shards are no longer whole
        ),
    ],
    (zero_is_one_device, 3, "checkpoint"): [
        Bug(
            "recomputed leaves need no gradient",
            "transforms.zero.lazy_params:LazyParams._node",
            "_apply_node(self, unit, tuple(views), self._handle, self._in_backward)",
            "_apply_node(self, unit, tuple(views), self._handle.detach() if self._in_backward else self._handle, "
            "self._in_backward)",
            RuntimeError,
        ),
    ],
    (test_nested_autograd.test_losses_that_differentiate, test_nested_autograd.sam, 3, 2): [
        Bug(
            "a leaf is another tensor after an eviction",
            "transforms.zero.units.saved_places:UnitLeaves.filled",
            "unit not in self._trained",
            "unit not in self.whole",
            RuntimeError,
        ),
        Bug(
            "a leaf gets the first memory that its unit had",
            "transforms.zero.units.saved_places:UnitLeaves.filled",
            "leaves[place].data = views[place]",
            "pass",
            RuntimeError,
        ),
    ],
    (test_nested_autograd.test_losses_that_differentiate, test_nested_autograd.sharpness, 1, 2): [
        Bug(
            "a backward pass of the loss is the step's",
            "transforms.zero.lazy_params:_UnitNode.backward",
            "token is None",
            "False",
            Exception,
        ),
    ],
    (test_nested_autograd.test_functions_whose_backward_runs_autograd, test_nested_autograd.Recomputing, None, 1): [
        Bug(
            "what functions leave in .grad is lost",
            "step.views.plain_view:stored_view.pull.wait",
            "sum_of(leaf.grad, grad)",
            "grad",
        ),
    ],
    (test_nested_autograd.test_nested_gradients_of_one_rank,): [
        Bug(
            "gradients of nested passes stay where they are",
            "transforms.zero.lazy_params:LazyParams._collect_nested",
            "reducer.add_nested(unit, nested, self.device)",
            "pass",
        ),
        Bug(
            "a rank reduces its nested gradients alone",
            "transforms.zero.reduce:Reducer._trace_order",
            "groups.any_rank(mine)",
            "mine",
            Exception,
        ),
    ],
    (test_nested_autograd.test_torch_func_in_a_loss, test_nested_autograd.rows_alone, 3): [
        Bug(
            "a loss runs again without its units",
            "transforms.zero.lazy_params:LazyParams._begin",
            "self._cache.functional and self.source.frees",
            "False",
            RuntimeError,
        ),
    ],
    (test_nested_autograd.test_a_copy_of_a_leaf_is_that_of_a_parameter, 3): [
        Bug(
            "a copy of a leaf has its graph",
            "transforms.zero.units.lazy_tensor:_watched",
            "func == _COPY",
            "False",
            RuntimeError,
        ),
    ],
    (test_nested_autograd.test_a_loss_without_a_graph, 2): [
        Bug(
            "a loss without a graph trains nothing",
            "step.pass_scope:differentiated",
            "check_graph(loss, () if pass_.view is None else pass_.view.leaves)",
            "pass",
            pytest.fail.Exception,
        ),
    ],
    (zero_is_one_device, 3, "branching"): [
        Bug(
            "nobody asks the others",
            "transforms.zero.gather:Gatherer._ask",
            "set(bruck(mine, control).tolist())",
            "{unit}",
            comm.errors.MismatchError,
        ),
        Bug(
            "a rank leaves while others need units",
            "transforms.zero.gather:Gatherer.finish",
            "while (last := self._ask(_FINISHED_WITH_NOTE if note else _FINISHED)) is None:\n    pass",
            "last = self._ask(_FINISHED) or set()",
            comm.errors.DeadlockError,
        ),
    ],
    (test_levels.test_units_that_are_fetched_again, 1, True): [
        Bug(
            "a gather that skips a level starts at once",
            "transforms.zero.collectives:Collectives.gather",
            "relay(first, *rest, lane=lane, device=shards[0].device)",
            "relay(first, *rest, lane=lane, device=shards[0].device) if first._finish else rest[0](first.wait())",
        ),
    ],
    (test_levels.test_the_loss_may_communicate_inside_nodes, 2, False): [
        Bug(
            "gathers go on in the order of their arrival",
            "transforms.zero.collectives:Collectives.gather",
            "groups.levels[-1].channel('gather')",
            "groups.levels[-1].channel(str(id(shards)))",
        ),
    ],
    (test_levels.test_the_loss_may_communicate_inside_nodes, 1, False): [
        Bug(
            "gathers share the channel of the loss function",
            "transforms.zero.collectives:Collectives._next_level",
            "level.channel('gather')",
            "level",
            comm.errors.MismatchError,
        ),
    ],
    (test_levels.test_pipelines_over_nodes, 3, "intra_node"): [
        Bug(
            "each pipeline stage has a lane of its own",
            "transforms.zero.collectives:Collectives._chain",
            "_channel(self.groups.shards)",
            "self.groups.shards.channel(str(id(self)))",
            comm.errors.MismatchError,
        ),
    ],
    (test_orders.launches_agree, test_orders.GATED): [
        Bug("reductions start when they are complete", "transforms.zero.reduce:Reducer._next", "not self._placed", "True"),
        Bug(
            "the ranks' own places count",
            "transforms.zero.reduce:Reducer._trace_order",
            "comm.all_reduce(mine, groups.shards.channel('control'), op='max')",
            "comm.all_reduce(mine, groups.shards.channel('control'), op='min')",
        ),
    ],
    (test_orders.launches_agree, test_orders.REGATED): [
        Bug(
            "nobody hears that a rank was late",
            "transforms.zero.gather:Gatherer.finish",
            "_FINISHED_WITH_NOTE if note else _FINISHED",
            "_FINISHED if note else _FINISHED",
        ),
    ],
    (test_written.named, "all_reduce", "add"): [
        Bug("writes are not noticed", "comm.record.pending:watched_inputs.checked", "_state(tensor) != before", "False"),
    ],
    (test_written.named, "all_reduce", "data"): [
        Bug(
            "writes that torch does not count are not noticed",
            "comm.record.pending:_state",
            "zlib.crc32(plain.view(torch.uint8).numpy().data)",
            "1",
        ),
    ],
    (test_written.named, "broadcast", "late"): [
        Bug(
            "who receives may not write",
            "comm.record.pending:watched_inputs",
            "call.collective.reads(here)",
            "True or call.collective.reads(here)",
            comm.errors.WrittenError,
        ),
    ],
    (any_rank_touches_any_units,): [
        Bug(
            "a plan that nobody kept to is kept",
            "transforms.zero.gather:Gatherer.finish",
            "reshard or self._asked",
            "reshard",
            comm.errors.DeadlockError,
        ),
    ],
    (two_whole_units_and_the_next, False, False): [
        Bug(
            "autograd keeps whole units",
            "transforms.zero.units.saved_places:SavedPlaces.home",
            "self._homes.get(_place(tensor.untyped_storage()))",
            "None",
        ),
        Bug("dropped units stay", "transforms.zero.gather:Gatherer._drop", "self.whole.pop(unit, None)", "pass"),
    ],
    (plans_are_the_shortest,): [
        Bug(
            "the next use is sought from the start",
            "transforms.zero.units.prefetch:_next_use",
            "uses.index(unit, now)",
            "uses.index(unit)",
        ),
    ],
    (several_passes_gather_no_more_than_needed, False): [
        Bug(
            "the first to come makes room",
            "transforms.zero.units.prefetch:plan_fetches",
            "max(there, key=lambda u: _next_use(uses, i, u))",
            "there[0]",
        ),
    ],
    (several_passes_gather_no_more_than_needed, None): [
        Bug(
            "a unit goes before its last use",
            "transforms.zero.gather:Gatherer.release",
            "unit in self.whole and self._made >= self._plan.last_use.get(unit, 0)",
            "unit in self.whole",
        ),
    ],
    (keeping_saves_two_units,): [
        Bug("one unit is kept", "transforms.zero.gather:Gatherer.finish", "self._plan.end", "self._plan.end[:1]"),
    ],
    # optimizers
    (an_optimizer_is_that_of_one_device, "muon", 1): [
        Bug(
            "a shard's piece of a leaf is its first",
            "sharding.leaf_map:LeafMap.of_layout",
            "low - slot.offset",
            "0",
        ),
        Bug(
            "pieces are put together at the start",
            "sharding.matrix_owners:MatrixOwners.gather",
            "gathered[shard.leaf][shard.offset:shard.offset + shard.numel] = part",
            "gathered[shard.leaf][:shard.numel] = part",
        ),
        Bug(
            "an optimizer in shards takes leaves for whole",
            "transforms.zero.zero:Zero.init",
            "groups.shards if self.stage else None",
            "None",
            RuntimeError,
        ),
    ],
    (an_optimizer_is_that_of_one_device, "muon", 0): [
        Bug("matrices of a run lie at its start", "sharding.leaf_map:_extents", "shard.start - extents[-1].start", "0"),
    ],
    (owners_give_pieces_back,): [
        Bug(
            "pieces come back in the owners' order",
            "sharding.matrix_owners:MatrixOwners.scatter",
            "sorted(parts, key=lambda pair: pair[0])",
            "parts",
        ),
    ],
    (an_optimizer_is_that_of_one_device, "lamb", 3): [
        Bug(
            "norms are of shards",
            "sharding.leaf_map:LeafMap.total",
            "rows if self.group is None else comm.all_reduce(rows, self.group)",
            "rows",
        ),
    ],
    (leaves_go_their_own_ways,): [
        Bug(
            "runs go on over others' leaves",
            "sharding.leaf_map:_extents",
            "before is not None and before.leaf in number and (before.tensor == shard.tensor)",
            "before is not None and extents",
        ),
        Bug("others decay", "optim.param_groups:by_decay.choose", "0 if leaf in hits else 1", "1 if leaf in hits else 0"),
        Bug(
            "the last rule that names a leaf moves it",
            "optim.param_groups:param_groups.choose",
            "leaf in matched",
            "leaf not in matched",
        ),
    ],
    (lion_steps_by_signs,): [
        Bug(
            "Lion's mean is what it steps by",
            "optim.lion:lion.update",
            "mean.lerp",
            "mean.lerp_",
        ),
        Bug(
            "decay comes before the sign",
            "optim.lion:lion.update",
            "sign = mean.lerp(grad, 1 - betas[0]).sign_()\np.sub_(sign.add_(p, alpha=float(weight_decay)).mul_(lr * rate))",
            "sign = mean.lerp(grad, 1 - betas[0]).add_(p, alpha=float(weight_decay))\np.sub_(sign.sign_().mul_(lr * rate))",
        ),
    ],
    (skipped_updates_move_nothing, "adamw, matrices decay"): [
        Bug(
            "the mean goes on",
            "transforms.ema:_part",
            "part if skip is None else skip.logical_not().to(mean.dtype) * part",
            "part",
        ),
    ],
    (skipped_updates_move_nothing, "muon, blocks"): [
        Bug(
            "routes do not heed skips",
            "optim.param_groups:_Groups._updated",
            "tree.replace(grads, sum=group.views(dense))",
            "tree.replace(grads, sum=group.views(dense), skip=None)",
        ),
    ],
    (unused_leaves_stay, 2): [
        Bug("a rank's own leaves are taken for all ranks'", "step.state.state:summed_over_ranks", "not count", "True"),
        Bug(
            "updates that left a leaf alone count",
            "optim.bind:BoundOptimizer.update",
            "unused.idle.get(leaf.path, 0) if counts else 0",
            "0",
        ),
        Bug("unused leaves move", "optim.bind:BoundOptimizer.update", "leaf.path not in unused.paths", "True"),
    ],
    (the_mean_is_by_hand, 2): [
        Bug("the mean forgets what it should keep", "transforms.ema:ema.update", "1 - decay", "decay"),
        Bug(
            "the params are shown for the mean",
            "transforms.ema:averaged",
            "tree.replace(mean, shown=True)",
            "tree.replace(mean, shown=False)",
        ),
    ],
    (factors_of_updates,): [
        Bug(
            "the first update has the rate of none",
            "transforms.schedule:_named.of",
            "torch.as_tensor(count).to(dtype) + 1",
            "torch.as_tensor(count).to(dtype)",
        ),
        Bug("the decay starts an update early", "transforms.schedule:warmup_decay.factor", "total - u + 1", "total - u"),
        Bug(
            "the cycle goes down as it went up",
            "transforms.schedule:one_cycle.factor",
            "(up + fall - u) / fall",
            "(up + fall - u) / up",
        ),
    ],
    # mixed precision
    (masters_move_by_less_than_bf16_shows, 2): [
        Bug(
            "rounded params are updated",
            "transforms.precision.mixed_precision:_MixedPrecision._widened",
            "_wide(leaf) if master is None else master",
            "_wide(leaf)",
        ),
        Bug(
            "masters are not rounded into the params",
            "transforms.precision.kept_states:rounded",
            "if into:\n    ...",
            "if False:\n    ...",
        ),
    ],
    (an_overflow_skips_the_step, 2, None): [
        Bug(
            "ranks look at their own gradients",
            "transforms.precision.mixed_precision:_MixedPrecision._asked",
            "step.finite(state, grads.sum)",
            "grads.sum[0].isfinite().all()",
        ),
        Bug("kernels do not hear of it", "optim.kernels:found_inf", "grads.skip.float()", "None"),
        Bug(
            "skipped steps count",
            "step.train_step:updating.update",
            "1 if state.skip is None else state.skip.logical_not()",
            "1",
        ),
        Bug("NaN is finite", "step.over_ranks.gradient_sums:_finite", "overflow[0] == 0", "~torch.cat(grads).isinf().any()"),
        Bug(
            "a scale is never adjusted",
            "transforms.precision.mixed_precision:_MixedPrecision.update",
            "scale.adjust(finite)",
            "scale",
        ),
    ],
    (an_overflow_skips_the_step, 1, plain_momentum): [
        Bug("what is kept for a skip is written to", "optim.kernels:guarded", "leaf.clone()", "leaf"),
        Bug("good steps are skipped", "optim.kernels:_choose", "torch.where(skip, old, new)", "old"),
    ],
    (scaling_by_a_power_of_two_changes_nothing,): [
        Bug(
            "weights are not scaled",
            "transforms.precision.loss_scale:_Scaling.unscale",
            "scaled.weight * self.now",
            "scaled.weight",
        ),
        Bug("losses are not scaled", "transforms.precision.loss_scale:_Scaling.scale", "loss * self.now", "loss"),
        Bug(
            "a norm is of scaled gradients",
            "transforms.clip:clip.update",
            "step.norm(state, grads.sum) / grads.weight",
            "step.norm(state, grads.sum)",
        ),
    ],
    (dynamic_scales_follow_the_rules,): [
        Bug(
            "a window outlives an overflow",
            "transforms.precision.loss_scale:DynamicScale.adjust",
            "torch.where(finite, self.run + 1, -self.settle)",
            "self.run + 1",
        ),
        Bug(
            "a window goes on after growth",
            "transforms.precision.loss_scale:DynamicScale.adjust",
            "torch.where(grows, 0, run)",
            "run",
        ),
        Bug(
            "the first overflow shrinks",
            "transforms.precision.loss_scale:DynamicScale.adjust",
            "self.patience <= 1",
            "self.patience <= 2",
        ),
        Bug(
            "patience comes back at once",
            "transforms.precision.loss_scale:DynamicScale.adjust",
            "finite if self.consecutive else grows",
            "finite",
        ),
        Bug(
            "patience comes back late",
            "transforms.precision.loss_scale:DynamicScale.adjust",
            "finite if self.consecutive else grows",
            "grows",
        ),
        Bug(
            "there is no minimum",
            "transforms.precision.loss_scale:DynamicScale.adjust",
            "(self.value / self.factor).clamp(min=self.minimum)",
            "self.value / self.factor",
        ),
        Bug(
            "there is no maximum",
            "transforms.precision.loss_scale:DynamicScale.adjust",
            "(self.value * self.factor).clamp(max=self.maximum)",
            "self.value * self.factor",
        ),
    ],
    (exceptions_keep_their_dtype,): [
        Bug("exceptions share a segment", "sharding.layout:Layout.of", "stored_in(leaf)", "None"),
        Bug("marks get lost", "base.marks:like_marked", "_marked(marked, marks) if marks else marked", "marked", ValueError),
        Bug(
            "the last rule counts",
            "transforms.precision.policy:Policy.mark",
            "(dtype for where, dtype in self.exceptions if _fits(where, path))",
            "(dtype for where, dtype in self.exceptions[::-1] if _fits(where, path))",
        ),
    ],
    (draws_of_rounding_depend_on_the_place,): [
        Bug(
            "draws begin anew in each shard",
            "transforms.precision.stochastic_rounding:Draws.for_param",
            "self._fill(part, f'{name} of {leaf.path}', piece.offset)",
            "self._fill(part, f'{name} of {leaf.path}', 0)",
        ),
        Bug(
            "all steps draw alike",
            "transforms.precision.stochastic_rounding:Draws._fill",
            "self.key.step",
            "row * 0",
        ),
        Bug(
            "all leaves draw alike",
            "transforms.precision.stochastic_rounding:Draws.for_param",
            "self._fill(part, f'{name} of {leaf.path}', piece.offset)",
            "self._fill(part, f'{name}', piece.offset)",
        ),
    ],
    (rounding_keeps_the_mean,): [
        Bug(
            "rounding is mostly down",
            "transforms.precision.stochastic_rounding:round_stochastically",
            "uniform * 65536",
            "uniform * 32768",
        ),
        Bug(
            "NaN becomes a number",
            "transforms.precision.stochastic_rounding:round_stochastically",
            "torch.where(wide.isfinite(), bits.view(torch.float32), wide)",
            "bits.view(torch.float32)",
        ),
    ],
    # compression
    (compressed_values_stay_near,): [
        Bug("int8 rounds towards zero", "comm.codecs.codec:Blocks.encode", "(x * inverse).round_", "(x * inverse).trunc_"),
        Bug(
            "a block's scale is its largest value's",
            "comm.codecs.codec:Blocks.encode",
            "torch.maximum(blocks.amax(2), -blocks.amin(2))",
            "blocks.amax(2)",
        ),
        Bug(
            "an inf is held to what is finite",
            "comm.codecs.codec:Blocks.encode",
            "factor.isfinite()",
            "factor > 0",
        ),
        Bug("top-k keeps the largest with their sign", "comm.codecs.codec:TopK.encode", "rows.abs()", "rows"),
    ],
    (feedback_owes_what_it_left_out,): [
        Bug(
            "what is owed is never paid",
            "comm.codecs.error_feedback:ErrorFeedback.all_reduce",
            "pad_rows(leaf + e, group.size)",
            "pad_rows(leaf + 0 * e, group.size)",
        ),
        Bug(
            "a sum owes nothing",
            "comm.codecs.error_feedback:ErrorFeedback.all_reduce",
            "self._total(p, e) + e",
            "self._total(p, e) + 0 * e",
        ),
        Bug("what was told is owed", "comm.codecs.error_feedback:ErrorFeedback._send", "value - other", "other - value"),
    ],
    (a_compressed_gather_is_for_the_loss, 1): [
        Bug(
            "quantised params are updated", "transforms.zero.zero:Zero._scattered", "_either(partition.exact, shards)", "shards"
        ),
        Bug(
            "exact params stay old",
            "transforms.zero.zero:Zero._published",
            "exact = self._exact(layout, shards, whole, groups)",
            "exact = partition.exact",
        ),
        Bug(
            "the loss sees exact params",
            "transforms.zero.zero:Zero._published",
            "Collectives(groups, self)",
            "Collectives(groups, Zero(self.stage))",
        ),
    ],
    (a_compressed_gather_is_for_the_loss, 3): [
        Bug(
            "stage 3 gathers in fp32",
            "transforms.zero.zero:Zero.view",
            "Collectives(ProcessGroups.by(self), self, lru_cache(lambda dtype: step.comm_dtype(state, dtype)), pool)",
            "Collectives(ProcessGroups.by(self), ZeroConfig(3), lambda dtype: step.comm_dtype(state, dtype), pool)",
        ),
    ],
    (offload_changes_nothing,): [
        Bug(
            "a version is written over",
            "transforms.offloading.files:VersionedFile.take",
            "self._free.pop()",
            "0",
            shows=transforms.OffloadError,
        ),
        Bug("nobody looks at checksums", "transforms.offloading.files:Disk._read", "actual != checksum", "False"),
        Bug(
            "each piece has a norm of its own",
            "transforms.offloading.update:PieceUpdate.run",
            "self._ask(name).to(device)",
            "self.step.over_ranks[name](*_)",
        ),
    ],
    (checkpoints_come_back,): [
        Bug(
            "a piece is saved from the leaf's beginning",
            "state_dict.leaf_places:_cuts",
            "first - slot.offset",
            "0",
            shows=Exception,
        ),
        Bug(
            "a file is where its rank's elements are counted",
            "checkpointing.writer:stored_tensors",
            "task.numel * shard.itemsize",
            "task.numel",
            shows=Exception,
        ),
        Bug("checksums are not looked at", "checkpointing.storage:_check", "check != file.checks[start // BLOCK]", "False"),
    ],
    (runs_go_on,): [
        Bug(
            "the data begin anew",
            "fitting.run:TrainingRun.go",
            "None if self.progress.data is None else local_position(self.progress.data)",
            "None",
        ),
        Bug(
            "a checkpoint is a step late",
            "fitting.checkpoints:CheckpointManager.save",
            "Progress(done, gathered(data), rollbacks, gathered_generators())",
            "Progress(done + 1, gathered(data), rollbacks, gathered_generators())",
        ),
        Bug(
            "a loss that is not finite counts as one",
            "fitting.non_finite:Health.after",
            "loss.isfinite().logical_not",
            "loss.isfinite",
            shows=Exception,
        ),
    ],
}


@cache
def holds(law: Callable[..., None], *case: Any) -> bool:
    """Checks a law in the library as it is, once; what its cases compare with is computed here, too."""
    law(*case)
    return True


@pytest.mark.sample(48)
@pytest.mark.parametrize(("case", "bug"), [pytest.param(c, b, id=b.name) for c, bugs in BUGS.items() for b in bugs])
def test_a_bug_breaks_its_law(case: tuple[Any, ...], bug: Bug) -> None:
    law, *rest = case
    assert holds(*case)
    with planted(bug), pytest.raises(bug.shows):
        law(*rest)


@pytest.mark.parametrize("case", [(sharding_is_a_bijection,), (plans_are_the_shortest,), (the_ledger_counts_what_is_sent,)])
def test_planting_is_undone(case: tuple[Any, ...]) -> None:
    """The library is as it was, also after an error: methods, cached functions and lambdas."""
    (law,), (bug, *_) = case, BUGS[case]
    with planted(bug):
        assert raises(bug.shows, law)
    with pytest.raises(KeyError), planted(bug):
        raise KeyError
    law()


@pytest.mark.parametrize(
    ("function", "old"),
    [
        ("", "no_such_name"),
        ("", "None"),
        ("", "_ALIGNMENT = 16"),
        ("no_such_function", "return"),
        ("Layout.of", "no_such_name"),
    ],
)
def test_refuses_what_it_can_not_plant(function: str, old: str) -> None:
    """The code or the function is missing, the code is there more than once, or is no function's."""
    with pytest.raises(LookupError), planted(Bug("typo", f"sharding.layout:{function}", old, "pass")):
        pass
