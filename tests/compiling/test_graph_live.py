"""What ``live()`` says is in memory at each node is what a run of the graph holds there."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, fx, nn

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.compiling import StepGraph
from functional_ds.compiling.graphs.graph_collectives import START, WAIT, carrying_out
from functional_ds.transforms.zero.gather import Gatherer

WIDTH = 4


class Tied(nn.Module):
    """Blocks between two uses of one matrix."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.ends = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.ends.weight
        for block in self.blocks:
            x = block(x).tanh()
        found: Tensor = self.ends(x)
        return found


class Measuring(fx.Interpreter):
    """Runs a graph and counts, at each node, what is alive of what its nodes have made."""

    def __init__(self, graph: StepGraph) -> None:
        super().__init__(graph.module)
        self.gathered = {gather.wait for gather in graph.gathers()}
        self.made: dict[int, weakref.ref[Any]] = {}
        self.units: list[weakref.ref[Any]] = []
        self.given: set[int] = set()
        self.found: dict[fx.Node, tuple[int, int]] = {}

    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        tensors = [x for x in (found if isinstance(found, (list, tuple)) else [found]) if isinstance(x, Tensor)]
        storages = [x.untyped_storage() for x in tensors if x.untyped_storage().nbytes()]
        if n.op == "placeholder":
            self.given |= {storage._cdata for storage in storages}
        elif n.op == "call_function":
            for storage in storages:
                if storage._cdata not in self.given:
                    self.made[storage._cdata] = weakref.ref(storage)
            if n in self.gathered:
                self.units += [weakref.ref(storage) for storage in storages]
        alive = {key: ref() for key, ref in self.made.items() if ref() is not None}
        self.found[n] = sum(s.nbytes() for s in alive.values() if s is not None), sum(ref() is not None for ref in self.units)
        return found if n.users or n.op == "output" else None  # as the graph's code, which keeps no value that is not used


def hpz(**options: Any) -> Any:
    mesh = comm.mesh(node=2, gpu=2)
    return T.zero(3, mesh["node", "gpu"], intra_node=mesh["gpu"], hpz=True, **options)


def hsdp(**options: Any) -> Any:
    mesh = comm.mesh(node=2, gpu=2)
    return T.zero(3, mesh["gpu"], replicate=mesh["node"], **options)


@attrs.frozen
class Case:
    """A strategy, on how many ranks, and the units that may be whole."""

    strategy: Callable[[], Sequence[Any]]
    ranks: int = 2
    most: int = 3


CASES = {
    "stage 3": Case(lambda: [T.zero(3)]),
    "one unit, two ahead": Case(lambda: [T.zero(3, max_live_units=1, prefetch=2)]),
    "accumulate": Case(lambda: [T.zero(3), T.accumulate(2)]),
    "resharded in bf16": Case(lambda: [T.mixed_precision("bf16"), T.zero(3, reshard_last_units=True), T.accumulate(2)]),
    "hpZ": Case(lambda: [hpz()], 4),
    "HSDP": Case(lambda: [hsdp(max_live_units=1), T.accumulate(2)], 4, 2),
    "recomputed": Case(lambda: [T.zero(3), T.remat("blocks")]),
    "by owners": Case(lambda: [T.zero(3, aggregate="owner", max_live_units=1)], 2, 2),
}


@pytest.mark.sample(3)
@pytest.mark.law(58)
@pytest.mark.parametrize("name", CASES)
def test_a_run_holds_what_is_counted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes and units at every node; at most ``max_live_units + prefetch`` units, as the eager step has."""
    case, eager = CASES[name], [0]
    fetch = Gatherer.fetch

    def watched(self: Gatherer, unit: int) -> list[Tensor]:
        found = fetch(self, unit)
        eager[0] = max(eager[0], len(self.whole) + len(self._in_flight))
        return found

    monkeypatch.setattr(Gatherer, "fetch", watched)

    def program() -> list[tuple[str, int, int, int, int]]:
        apply, params = fds.functional(Tied(5))
        step = fds.compose(*case.strategy())(fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.adamw(0.1)))
        jitted, x = fds.jit(step), torch.ones(4, WIDTH)
        state, _ = jitted(jitted.init(params), x)
        return counted(jitted.graph(state, x), state, x)

    for told in comm.simulate(program, world_size=case.ranks):
        assert [(name, counted) for name, _, _, counted, _ in told] == [(name, size) for name, size, _, _, _ in told]
        assert all(units <= counted for _, _, units, _, counted in told)
        assert max(units for *_, units in told) <= case.most
        assert max(units for _, _, units, _, _ in told) > 0
    assert 0 < eager[0] <= case.most


def results(wait: fx.Node) -> int:
    return sum(x.untyped_storage().nbytes() for x in wait.meta["val"])


def counted(graph: StepGraph, state: Any, batch: Any) -> list[tuple[str, int, int, int, int]]:
    """At each node the bytes and whole units in a run, and those that the graph says."""
    run, held = Measuring(graph), graph.live()
    with torch.no_grad(), carrying_out(graph.sites):
        run.run(*fds.tree.leaves((state, batch)))
    told, on_the_way = [], 0
    for node, (size, units) in run.found.items():
        if node.target is START:
            on_the_way += results(next(iter(node.users)))
        if node.target is WAIT:
            on_the_way -= results(node)
        told.append((node.name, size + on_the_way, units, held[node].bytes, held[node].units))
    return told
