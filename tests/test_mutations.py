"""A law that no bug breaks is no law: each bug below is planted alone, and a law must break.

A bug is data: a text in a module's source and what stands there instead. Planting compiles the changed source and swaps
the code of the functions that differ, so classes, records and names imported elsewhere stay the objects that they are.
The laws are those of the other tests, on a few fixed cases; each must hold before its bug is planted, and after.
"""

import gc
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from types import CodeType, FunctionType, ModuleType
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import functional_ds as fds
from functional_ds import comm, transforms, tree
from functional_ds.key import Key
from functional_ds.layout import Layout, shard, unshard
from functional_ds.transforms.convoy import plan_fetches
from functional_ds.transforms.gathering import Gatherer
from tests.transforms.models import CASES, Blocks, Tied, own_rows, run

pytestmark = pytest.mark.timeout(60)

Law = Callable[..., None]

# -- planting ---------------------------------------------------------------------------------------------------------


@attrs.frozen
class Bug:
    """One bug.

    Attributes:
        name: what is wrong.
        module: where, within functional_ds.
        old: a text that the module's source has exactly once.
        new: what stands there instead.
        law: what must break; ``args`` picks a case.
        shows: how it breaks: that the law does not hold, or an error that says so.
    """

    name: str
    module: str
    old: str
    new: str
    law: Law
    args: tuple[Any, ...] = ()
    shows: type[Exception] = AssertionError


def _functions(code: CodeType) -> list[CodeType]:
    """The code of a module's functions and methods, in order; functions inside of functions belong to those."""
    found = []
    for const in code.co_consts:
        if isinstance(const, CodeType):
            found += [const] if const.co_flags & inspect.CO_OPTIMIZED else _functions(const)  # else a class body
    return found


def _changes(bug: Bug, module: ModuleType) -> dict[CodeType, CodeType]:
    source = inspect.getsource(module)
    if source.count(bug.old) != 1:
        raise LookupError(f"{bug.name}: {module.__name__} has {source.count(bug.old)} times {bug.old!r}; once is needed")
    texts = source, source.replace(bug.old, bug.new)
    before, after = (_functions(compile(text, str(module.__file__), "exec", dont_inherit=True)) for text in texts)
    return {a: b for a, b in zip(before, after, strict=True) if a != b}


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """The library with a bug.

    Raises:
        LookupError: the module's source does not have the text once, or none of its functions runs that text.
    """
    module = importlib.import_module(f"functional_ds.{bug.module}")
    changes = _changes(bug, module)
    swaps = {f: f.__code__ for f in gc.get_objects() if isinstance(f, FunctionType) and f.__code__ in changes}
    if not swaps:
        raise LookupError(f"{bug.name}: no function of {module.__name__} has the code to change")
    caches = [value for value in vars(module).values() if hasattr(value, "cache_clear")]
    try:
        for function, code in swaps.items():
            function.__code__ = changes[code]
        for found in caches:
            found.cache_clear()
        yield
    finally:
        for function, code in swaps.items():
            function.__code__ = code
        for found in caches:
            found.cache_clear()


# -- sharding and collectives -----------------------------------------------------------------------------------------

N = 3


def numbers(*shape: int, rank: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small integers, others on each rank."""
    generator = torch.Generator().manual_seed(10 + rank)
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


def rank() -> int:
    return comm.world().rank


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
    """Law 11: what happens to the input of a call under way does not show."""

    def program() -> float:
        x = torch.ones(1)
        pending = comm.all_reduce(x, async_op=True)
        x.zero_()
        return pending.wait().item()  # type: ignore[no-any-return]

    assert comm.simulate(program, world_size=2) == [2.0, 2.0]


def adjoints_are_transposes() -> None:
    """Law 16: <C x, y> = <x, Cᵀ y>, summed over the ranks."""
    calls: list[Callable[[Tensor], Tensor]] = [
        comm.all_reduce,
        comm.all_gather,
        comm.reduce_scatter,
        lambda x: comm.broadcast(x, 1),
        lambda x: comm.reduce(x, 2),
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
    """The volumes of the table, summed over the ranks; an all-reduce sends 2 (n - 1) / n of any size."""

    def program() -> dict[str, int]:
        x = torch.ones(2 * N + 1)
        with comm.ledger() as book:
            comm.all_reduce(x)
            comm.all_gather(x)
            comm.reduce_scatter(x[:-1])
            comm.broadcast(x)
            comm.reduce(x)
        return {row.collective: row.elements for row in book.rows}

    m = 2 * N + 1
    total = {"all_reduce": 2 * m, "all_gather": N * m, "reduce_scatter": m - 1, "broadcast": m, "reduce": m}
    rows = comm.simulate(program, world_size=N)
    assert {name: sum(row[name] for row in rows) for name in total} == {name: (N - 1) * v for name, v in total.items()}


def a_mesh_is_a_grid() -> None:
    """Ranks are numbered row by row."""
    groups = comm.simulate(lambda: [comm.mesh(a=2, b=3)[axis].ranks for axis in "ab"], world_size=6)
    assert groups == [[(r % 3, r % 3 + 3), tuple(r // 3 * 3 + i for i in range(3))] for r in range(6)]


def the_simulator_finds_mismatches() -> None:
    """Calls that differ in name, root or shape are refused, even where a result could be made up."""
    x = torch.ones(2)
    for calls in (
        (lambda: comm.all_reduce(x), lambda: comm.broadcast(x)),
        (lambda: comm.broadcast(x, 0), lambda: comm.broadcast(x, 1)),
        (lambda: comm.all_gather(x), lambda: comm.all_gather(torch.ones(3))),
    ):
        try:
            comm.simulate(lambda calls=calls: calls[rank()](), world_size=2)
        except comm.MismatchError:
            continue
        raise AssertionError("no MismatchError")


# -- steps ------------------------------------------------------------------------------------------------------------


@cache
def alone(name: str, rows: int, k: int) -> Any:
    """The single-device step on the whole batch."""
    return run(CASES[name], (transforms.accumulate(k),) if k > 1 else (), rows=rows)


def close(found: Any, expected: Any) -> None:
    """Equal trees, but for the rounding of a few hundred fp32 additions in other orders."""
    assert tree.structure(found) == tree.structure(expected)
    for a, b in zip(tree.leaves(found), tree.leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def zero_is_one_device(stage: int, name: str, n: int = 2, k: int = 1) -> None:
    """Law 19, with as many micro-batches on one device."""
    rows = 4 * n
    strategy = (transforms.zero(stage), transforms.accumulate(k))
    for found in comm.simulate(lambda: run(CASES[name], strategy, rows=rows), world_size=n, seed=n):
        close(found, alone(name, rows, k))


def other_batches_other_paths(stage: int) -> None:
    """Law 19 where every step takes other units on every rank, so that no plan holds."""

    def program(*strategy: fds.Transform) -> Any:
        params, loss = CASES["branching"].make()
        step = fds.compose(*strategy)(fds.train_step(loss, fds.adamw(1e-2, eps=1e-4)))
        state = step.init(params)
        batches = CASES["branching"].batch(48)
        for i in range(12):
            state, _ = step(state, own_rows(tree.map(lambda x, i=i: x[4 * i : 4 * i + 4], batches), comm.world()))
        return step.params(state)

    expected = program()
    for found in comm.simulate(lambda: program(transforms.zero(stage)), world_size=2):
        close(found, expected)


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


def traffic(name: str, stage: int, n: int, k: int = 1, *, keep: bool = False) -> tuple[int, int, list[int]]:
    """Calls and elements of rank 0 in the third step, scalars and control apart; and the units' padded sizes."""

    def program() -> Any:
        params, loss = CASES[name].make()
        step = fds.compose(transforms.zero(stage, keep=keep), transforms.accumulate(k))(fds.train_step(loss, fds.sgd(0.1)))
        state, batch = step.init(params), own_rows(CASES[name].batch(n * k * 4), comm.world())
        for _ in range(2):  # the order of units is known from here on
            state, _ = step(state, batch)
        with comm.ledger() as book:
            state, _ = step(state, batch)
        layout = state.slots["zero"].layout
        sizes = [sum(n * layout.segments[i].shard for i in unit.segments) for unit in layout.units]
        rows = [r for r in book.rows if (r.collective, r.group) == ("all_gather", "world") or r.group == "world/reduce"]
        return sum(r.calls for r in rows), sum(r.elements for r in rows), sizes

    found: list[tuple[int, int, list[int]]] = comm.simulate(program, world_size=n)
    return found[0]


def traffic_is_exact(stage: int, k: int) -> None:
    """Law 21: 2Ψ(n-1)/n, 3Ψ(n-1)/n in stage 3; stages 0 and 1 once a step, 2 and 3 each micro-batch."""
    for n in (2, 3):
        _, elements, sizes = traffic("blocks", stage, n, k)
        passes = {0: 2, 1: 2, 2: 1 + k, 3: 3 * k}[stage]
        assert elements == passes * sum(sizes) * (n - 1) // n


def keeping_saves_two_units() -> None:
    """Law 21 with ``keep``: the first and the last unit are there when the backward pass begins."""
    _, elements, sizes = traffic("blocks", 3, 2, keep=True)
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


def several_passes_gather_no_more_than_needed() -> None:
    """Law 21 for a model that goes three times through its blocks: the plan's fetches are the fewest."""
    calls, _, sizes = traffic("several passes", 3, 2)
    rest, *blocks = range(len(sizes))
    there = (rest, *blocks, *blocks, *blocks, rest)
    assert calls == fewest(there, 2) + fewest(there[:0:-1], 2) + len(sizes)


def most_whole_units(name: str, *, keep: bool) -> int:
    """How many gathered units are alive at once on one rank in a later step, that which is fetched ahead included."""
    most = [0]
    begin = Gatherer._start

    def program() -> None:
        alive: list[list[StorageWeakRef]] = []

        def start(self: Gatherer, unit: int) -> Any:
            pending = begin(self, unit)
            wait = pending.wait

            def watched() -> Any:
                flats = wait()
                alive.append([StorageWeakRef(flat.untyped_storage()) for flat in flats])
                most[0] = max(most[0], sum(not all(ref.expired() for ref in refs) for refs in alive))
                return flats

            return attrs.make_class("Watched", ["wait"])(watched)

        self_start[rank()] = start
        params, loss = CASES[name].make()
        step = transforms.zero(3, keep=keep)(fds.train_step(loss, fds.sgd(0.1)))
        state, batch = step.init(params), own_rows(CASES[name].batch(8), comm.world())
        for _ in range(3):
            state, _ = step(state, batch)

    self_start: dict[int, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gatherer, "_start", lambda self, unit: self_start[rank()](self, unit))
        comm.simulate(program, world_size=2)
    return most[0]


def two_whole_units_and_the_next(name: str) -> None:
    """Stage 3's memory: autograd keeps no unit alive."""
    for keep in (False, True):
        assert most_whole_units(name, keep=keep) <= 3


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
    close(alone.__wrapped__("mlp", 8, k), alone("mlp", 8, 1))


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
    try:
        step.params(state)
    except fds.DonatedStateError:
        return
    raise AssertionError("no DonatedStateError")


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


def schedules_multiply_the_rate() -> None:
    """Update i uses fn(i); the warm-up's first update moves, its last is whole."""
    table = torch.tensor([1.0, 0.5, 0.25])
    step = transforms.schedule(lambda i: table[i])(fds.train_step(lambda p, x: (p["w"] * x).sum(), fds.sgd(1.0)))
    state, found = step.init({"w": torch.zeros(())}), []
    for _ in range(3):
        state, metrics = step(state, torch.ones(()))
        found.append((step.params(state)["w"].item(), metrics["rate"].item()))
    assert found == [(-1.0, 1.0), (-1.5, 0.5), (-1.75, 0.25)]
    fn = transforms.warmup_cosine(4, 8, 0.5)
    close(torch.stack([fn(torch.tensor(i)) for i in (0, 1, 3, 4, 6, 8, 9)]), torch.tensor([0.25, 0.5, 1.0, 1.0, 0.75, 0.5, 0.5]))


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


# -- the bugs ---------------------------------------------------------------------------------------------------------

BUGS = [
    # sharding
    Bug("a shard is rounded down", "layout", "-(-end // n)", "end // n", sharding_is_a_bijection, shows=RuntimeError),
    Bug("a shard begins one element late", "layout", "flat.detach()[rank", "flat.detach().roll(-1)[rank", sharding_is_a_bijection),
    # collectives
    Bug("all_gather joins in reverse", "comm.table", "torch.cat(list(pieces)", "torch.cat(list(pieces)[::-1]", collectives_are_dense_programs),
    Bug("max adds", "comm.table", "_BINARY[op]\n", "_BINARY['sum' if op == 'max' else op]\n", collectives_are_dense_programs),
    Bug("a mean is over n + 1", "comm.api", "leaf / group.size", "leaf / (group.size + 1)", collectives_are_dense_programs),
    Bug("bf16 sums round each time", "comm.table", "wide = torch.float32 if", "wide = dtype if", half_precision_sums_round_once),
    Bug("all ranks get one tensor", "comm.table", "[value.clone() for", "[value for", results_have_memory_of_their_own),
    Bug("the transpose of all_gather does not add", "comm.table", '{**options, "op": "sum"}', '{**options, "op": "max"}', adjoints_are_transposes),
    Bug("all_gather costs a message to itself", "comm.table", "(n - 1) * numel,", "n * numel,", the_ledger_counts_what_is_sent),
    Bug("all_reduce costs what only even pieces do", "comm.table", "(numel - own) + (n - 1) * own", "2 * (n - 1) * own", the_ledger_counts_what_is_sent),
    Bug("a mesh counts its ranks by columns", "comm.mesh", "rank // stride % size", "rank % size", a_mesh_is_a_grid, shows=Exception),
    Bug("the simulator compares no signatures", "comm.simulator", "if known.signature != slot.signature:", "if False:", the_simulator_finds_mismatches),
    Bug("the simulator reads inputs late", "comm.simulator", "t.detach().clone() for", "t.detach() for", calls_read_their_input_at_once),
    # one device
    Bug("a tied weight becomes two", "functional", "first.setdefault(id(parameter),", "first.setdefault((id(parameter), path),", modules_are_functions),
    Bug("two trees share a skeleton", "functional", "if skeleton.identity == _identity(params):", "if True:", zero_is_one_device, (0, "two trees")),
    Bug("earlier micro-batches are dropped", "tape", "total.add_(grad)", "grad", one_device_accumulates, (2,)),
    Bug("the last micro-batch is skipped", "transforms.accumulate", "enumerate(micro_batches)", "enumerate(micro_batches[:-1])", one_device_accumulates, (2,)),
    Bug("the weight of earlier micro-batches is forgotten", "training", "weight = loss.weight if carry is None else carry.weight + loss.weight", "weight = loss.weight", tokens_weigh_the_same, (None,)),
    Bug("moments decay alike", "optim", "beta2=betas[1]", "beta2=betas[0]", adamw_is_torchs),
    Bug("a schedule is one update ahead", "transforms.schedule", "fn(state.step)", "fn(state.step + 1)", schedules_multiply_the_rate, shows=IndexError),
    Bug("the first update of a warm-up moves nothing", "transforms.schedule", "(done + 1) / max", "done / max", schedules_multiply_the_rate),
    Bug("updates are not counted", "training", "step=state.step + 1", "step=state.step", schedules_multiply_the_rate),
    Bug("a donated state stays usable", "state", "self.__dict__.clear()", "pass", donation_changes_nothing_but_memory),
    Bug("a kept state shares memory", "state", "x.detach().clone()", "x.detach()", donation_changes_nothing_but_memory),
    Bug("small gradients are scaled up", "transforms.clip", "torch.clamp(norm / limit, min=1.0)", "(norm / limit)", norms_are_of_the_whole_gradient, (None,)),
    Bug("the norm is the sum's, not the mean's", "transforms.clip", "grads.sum) / grads.weight", "grads.sum)", norms_are_of_the_whole_gradient, (None,)),
    # draws
    Bug("every rank draws as rank 0", "transforms.zero", "index * group.size + group.rank,", "index * group.size,", draws_depend_on_the_position),
    Bug("every micro-batch draws as the first", "transforms.accumulate", "rows=i * rows", "rows=0", draws_depend_on_the_position),
    Bug("every step draws as the first", "key", "self.step.to(device) * _GOLDEN", "0", draws_depend_on_the_position),
    Bug("every name draws the same", "key", " + salt", "", draws_depend_on_the_position),
    # sums over the ranks
    Bug("each rank divides by its own tokens", "step", "Weighted(grads.sum, weight)", "Weighted(grads.sum, grads.weight)", tokens_weigh_the_same, (2,)),
    Bug("metrics stay each rank's own", "transforms.zero", "comm.all_reduce(inner(step, state, scalars), self.ranks())", "inner(step, state, scalars)", tokens_weigh_the_same, (0,)),
    Bug("each rank clips by its shards' norm", "transforms.zero", "comm.all_reduce(inner(step, state, grads) ** 2, self.ranks())", "(inner(step, state, grads) ** 2)", norms_are_of_the_whole_gradient, (2,)),
    Bug("stage 0 counts its norm on each rank", "transforms.zero", '"finite": self.finite} if self.stage else', '"finite": self.finite} if True else', norms_are_of_the_whole_gradient, (0,)),
    Bug("one rank's finite gradients suffice", "transforms.zero", 'op="min"', 'op="max"', everybody_hears_of_an_overflow, (2,)),
    Bug("stage 1 scatters rows in reverse", "transforms.reducing", "for flat in flats]  #", "for flat in reversed(flats)]  #", zero_is_one_device, (1, "blocks")),
    Bug("the earlier sum is dropped in stage 1", "transforms.zero", "local={} if each else carry", "local={}", zero_is_one_device, (1, "blocks", 3, 2)),
    Bug("the earlier sum is dropped in stage 2", "transforms.zero", "sums=carry if each else {}", "sums={}", zero_is_one_device, (2, "blocks", 3, 2)),
    Bug("stage 1 reduces each micro-batch", "transforms.zero", "each = self.stage >= 2", "each = True", traffic_is_exact, (1, 2)),
    Bug("every micro-batch is the last", "transforms.accumulate", "last and i == k - 1", "last", zero_is_one_device, (0, "blocks", 2, 2)),
    Bug("a second use overwrites the first's gradient", "transforms.reducing", "torch._foreach_copy_ if fresh else torch._foreach_add_", "torch._foreach_copy_", zero_is_one_device, (3, "several passes")),
    Bug("a unit is reduced after its first backward", "transforms.reducing", "self.waiting[unit] -= 1", "self.waiting[unit] = 0", zero_is_one_device, (3, "several passes")),
    Bug("each rank reduces in its own order", "transforms.reducing", "turns = self.order.units", "turns = self.completed", zero_is_one_device, (2, "branching")),
    Bug("each rank learns its own order", "transforms.reducing", 'comm.broadcast(torch.tensor(self.completed, dtype=torch.int64), 0, self.group.channel("control"))', "torch.tensor(self.completed)", zero_is_one_device, (2, "branching")),
    Bug("untouched units are not reduced", "transforms.units", "in range(len(self.layout.units)):", "in range(0):", zero_is_one_device, (2, "branching")),
    # what is gathered
    Bug("stages 1 and 2 go on with the others' old shards", "transforms.zero", "        moved = [i for i, segment in enumerate(layout.segments) if segment.trainable]", "        moved = []", zero_is_one_device, (1, "mlp")),
    Bug("every rank keeps its own params at first", "transforms.zero", "params = _of_rank_0(params, group)", "pass", rank_0_gives_the_params, (0,)),
    Bug("nobody asks the others", "transforms.gathering", "comm.all_gather(torch.tensor([unit]), control).tolist()", "[unit]", zero_is_one_device, (3, "branching")),
    Bug("a rank leaves while others need units", "transforms.gathering", "while not self._ask(_DONE):\n            pass", "self._ask(_DONE)", zero_is_one_device, (3, "branching"), comm.CommError),
    Bug("a plan is kept that nobody followed", "transforms.gathering", "if keep and not self._asked else", "if keep else", other_batches_other_paths, (3,)),
    Bug("recomputed leaves need no gradient", "transforms.units", "view.detach().requires_grad_() for", "view.detach() for", zero_is_one_device, (3, "checkpoint"), RuntimeError),
    Bug("autograd keeps whole units", "transforms.units", "if owner is None:  # an output", "if True:  # an output", two_whole_units_and_the_next, ("several passes",)),
    Bug("dropped units stay", "transforms.gathering", "self.whole.pop(unit, None)", "pass", two_whole_units_and_the_next, ("several passes",)),
    Bug("the unit that came first makes room", "transforms.convoy", "max(there, key=lambda u: _next_use(uses, i, u))", "there[0]", several_passes_gather_no_more_than_needed),
    Bug("a unit goes that the plan still uses", "transforms.gathering", "and self._made >= self._plan.until.get(unit, 0)", "", several_passes_gather_no_more_than_needed),
    Bug("the next use is looked for from the start", "transforms.convoy", "uses.index(unit, now)", "uses.index(unit)", plans_are_the_shortest),
    Bug("keep leaves but one unit", "transforms.gathering", "self._plan.end if keep", "self._plan.end[:1] if keep", keeping_saves_two_units),
    # mixed precision
    Bug("the update moves the rounded params", "transforms.precision", "inner(step, with_masters(state), grads)", "inner(step, state, grads)", masters_move_by_less_than_bf16_shows, (2,)),
    Bug("masters are not rounded into the params", "transforms.precision", "return half.copy_(wide)", "return half", masters_move_by_less_than_bf16_shows, (2,)),
]  # fmt: skip


@cache
def holds(law: Law, args: tuple[Any, ...]) -> bool:
    """Checks a law in the library as it is, once; what its cases compare with is computed here, too."""
    law(*args)
    return True


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_breaks_a_law(bug: Bug) -> None:
    assert holds(bug.law, bug.args)
    with planted(bug), pytest.raises(bug.shows):
        bug.law(*bug.args)


