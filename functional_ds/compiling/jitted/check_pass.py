"""``check_pass``: tests that a graph after a custom pass is equivalent to the step."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, fx

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.comm.record.ledger import Row
from functional_ds.comm.record.notebook import html_text
from functional_ds.compiling.graphs.graph_collectives import START, carrying_out, site_of
from functional_ds.compiling.graphs.graph_cost import InMemory
from functional_ds.compiling.graphs.graph_record import StepGraph
from functional_ds.step.state.buffer_scope import bit_equal
from functional_ds.step.step import Step

from .apply_passes import GraphPass, apply_passes, pass_name
from .graph_agreement import disagreement, rank_collectives
from .jit_step import JitStep, jit

_ASKED = "pass same_ledger=False if it should"


@attrs.frozen
class PassReport:
    """What a pass has changed on a rank, apart from values.

    Attributes:
        name: the pass's.
        nodes: how many the graph has, before and after.
        memory: the peak bytes at one node, without the state, before and after.
        units: the most gathered units at one node, before and after.
        sent: bytes that this rank sends, before and after.
    """

    name: str
    nodes: tuple[int, int]
    memory: tuple[int, int]
    units: tuple[int, int]
    sent: tuple[int, int]

    def __str__(self) -> str:
        rows = {"nodes": self.nodes, "bytes in memory": self.memory, "gathered units": self.units, "bytes sent": self.sent}
        lines = [f"{name:<16} {before:>14,} -> {after:>14,}" for name, (before, after) in rows.items()]
        return "\n".join([self.name, *lines])

    def _repr_html_(self) -> str:
        return html_text(self)


def check_pass(
    change: GraphPass,
    program: Callable[..., tuple[Step, Any, Any]],
    *args: Any,
    world_size: int = 2,
    seed: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
    same_ledger: bool = True,
) -> PassReport:
    """Raises an error unless a pass preserves values on all ranks, payloads, and the order of collectives.

    Every simulated rank makes its step, its state and its batch, traces the step with its passes, and runs the graph before and
    after ``change`` on copies of the state.

    Args:
        change: the pass.
        program: ``program(*args)`` returns ``(step, state, batch)`` on each rank; the step may be jitted.
        args: passed to it on each rank.
        world_size: how many ranks.
        seed: of the interleaving.
        rtol: relative tolerance of values; None for bitwise equality, if ``atol`` is None too.
        atol: absolute tolerance of values.
        same_ledger: whether the ranks must send the same as before the pass.

    Returns:
        The changes in nodes, memory and bytes sent, on rank 0.

    Raises:
        TypeError: the pass does not return a ``StepGraph``.
        ValueError: the pass returns a graph that cannot run.
        AssertionError: with the difference: the result, the first node whose value differs, and the rank; the collective; the
            ledger's row.

    >>> import functional_ds as fds
    >>> from functional_ds import compiling, transforms as T
    >>> def program():
    ...     step = T.zero(3)(fds.train_step(lambda p, x: (x @ p["a"] @ p["b"]).square().sum(), fds.sgd(0.1)))
    ...     return step, step.init({"a": torch.ones(2, 2), "b": torch.ones(2, 2)}), torch.ones(3, 2)
    >>> report = check_pass(compiling.schedule(ahead=2), program)
    >>> report.sent[0] == report.sent[1] > 0
    True
    """

    def on_a_rank() -> PassReport:
        step, state, batch = program(*args)
        jitted = step if isinstance(step, JitStep) else jit(step)
        if state.batch is None:
            state, _ = Step.__call__(jitted, state, batch)
        return _Checked(jitted.graph(state, batch), change, (state, batch), (rtol, atol), same_ledger).report()

    return comm.simulate(on_a_rank, world_size=world_size, seed=seed)[0]


@attrs.define(eq=False)
class _Checked:
    """One rank's part."""

    before: StepGraph
    change: GraphPass
    given: tuple[Any, Any]
    tolerance: tuple[float | None, float | None]
    same_ledger: bool
    rank: int = attrs.field(factory=lambda: comm.world().rank)

    def report(self) -> PassReport:
        text = str(self.before.module.graph), len(self.before.sites)
        after = apply_passes(self.before, [self.change])
        if (str(self.before.module.graph), len(self.before.sites)) != text and after is not self.before:
            raise AssertionError(f"{self.name} has changed the graph that it was given: change compiling.copied(graph)")
        self._collectives(after)
        results, rows = [], []
        for graph in (self.before, after):
            with comm.ledger() as book:
                results.append(self._results(graph, graph.module))
            rows.append(book.rows)
        difference = self._first_difference(*results)
        told: list[str] = comm.all_gather_object(difference)
        if any(told):  # on all ranks, as the nodes send
            nodes = comm.all_gather_object(self._first_node(after))
            rank = next(rank for rank, message in enumerate(told) if message)
            raise AssertionError(f"{self.name} changes a value on rank {rank}: {told[rank]}{nodes[rank]}")
        if self.same_ledger and (lacking := _other_rows(*rows)):
            raise AssertionError(
                f"{self.name} changes what rank {self.rank} sends: {lacking}; pass same_ledger=False if it should"
            )
        return self._changes(after, rows)

    @property
    def name(self) -> str:
        return f"the pass {pass_name(self.change)}"

    def _collectives(self, after: StepGraph) -> None:
        """Before anything runs, so that no rank waits forever."""
        old, new = (_started(graph) for graph in (self.before, after))
        if self.same_ledger and old != new:
            lacking, more = old - new, new - old
            shown = [*(f"drops {name}" for name in lacking), *(f"adds {name}" for name in more)]
            raise AssertionError(f"{self.name} {', '.join(shown)} on rank {self.rank}; {_ASKED}")
        mine = rank_collectives(list(after.module.graph.nodes), after.sites, self.rank)
        reason = disagreement(comm.all_gather_object(mine))
        if reason:
            raise AssertionError(f"after {self.name}, {reason}")

    def _results(self, graph: StepGraph, run: Callable[..., Any]) -> Any:
        state, batch = self.given
        with torch.no_grad(), torch.random.fork_rng(), carrying_out(graph.sites), comm.world().world.step():
            return run(*tree.leaves((state.clone(), batch)))

    def _first_difference(self, before: Sequence[Any], after: Sequence[Any]) -> str:
        paths = [path for path, _ in tree.named(tree.unflatten(self.before.gives, self.before.outputs))]
        for path, x, y in zip(paths, before, after, strict=True):
            words = self._different(x, y)
            if words:
                return f"the result {path!r} {words}"
        return ""

    def _different(self, x: Any, y: Any) -> str:
        """How values differ; empty if they are equal."""
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            return "" if type(x) is type(y) and x == y else f"is {y!r}, not {x!r}"
        if bit_equal(x, y):
            return ""
        if self.tolerance == (None, None) or (x.shape, x.dtype) != (y.shape, y.dtype):
            if (x.shape, x.dtype) != (y.shape, y.dtype):
                return f"is {y.dtype}{list(y.shape)}, not {x.dtype}{list(x.shape)}"
            return f"differs by up to {(y.double() - x.double()).abs().max().item():.3g}"
        rtol, atol = (0.0 if bound is None else bound for bound in self.tolerance)
        if torch.allclose(y, x, rtol=rtol, atol=atol, equal_nan=True):
            return ""
        return f"differs by up to {(y.double() - x.double()).abs().max().item():.3g}, more than rtol={rtol:g} and atol={atol:g}"

    def _first_node(self, after: StepGraph) -> str:
        """The first node of both graphs with different values, as text."""
        noted = [_Noting(graph.module) for graph in (self.before, after)]
        for graph, noting in zip((self.before, after), noted, strict=True):
            self._results(graph, noting.run)
        old, new = (noting.values for noting in noted)
        for node in after.module.graph.nodes:
            before, now = old.get(node.name), new.get(node.name)
            if before is None or now is None or len(before) != len(now):
                continue
            if any(
                x.shape == y.shape and x.dtype == y.dtype and self._different(x, y) for x, y in zip(before, now, strict=True)
            ):
                return f"; the first node with another value is {node.format_node()}"
        return ""

    def _changes(self, after: StepGraph, rows: Sequence[Sequence[Row]]) -> PassReport:
        graphs = (self.before, after)
        held = [list[InMemory](graph.live().values()) for graph in graphs]
        nodes, memory, units, sent = (
            (a, b)
            for a, b in (
                [len(graph.module.graph.nodes) for graph in graphs],
                [max(now.bytes for now in moments) for moments in held],
                [max(now.units for now in moments) for moments in held],
                [sum(row.bytes for row in sent_rows) for sent_rows in rows],
            )
        )
        return PassReport(pass_name(self.change), nodes, memory, units, sent)


class _Noting(fx.Interpreter):
    """Keeps a copy of each node's tensors."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[str, list[Tensor]] = {}

    def run_node(self, n: fx.Node) -> Any:
        output = super().run_node(n)
        several = output if isinstance(output, (list, tuple)) else [output]
        if n.op == "call_function" and n.target is not START:
            self.values[n.name] = [x.clone() for x in several if isinstance(x, Tensor)]
        return output


def _started(graph: StepGraph) -> Counter[str]:
    """The collectives, by what they carry."""
    counts: Counter[str] = Counter()
    for node in graph.module.graph.nodes:
        if node.target is START:
            site = graph.sites[site_of(node)]
            shapes = [f"{x.meta['val'].dtype}{list(x.meta['val'].shape)}" for x in node.args[0]]
            label = f" of {site.label!r}" if site.label else ""
            counts[f"{site.name}{label} ({', '.join(shapes)}) on {site.group.name!r}"] += 1
    return counts


def _other_rows(before: Sequence[Row], after: Sequence[Row]) -> str:
    """The first row of the ledger that differs, as text."""
    old, new = ({(row.collective, row.group): row for row in rows} for rows in (before, after))
    for key in [*old, *new]:
        a, b = old.get(key), new.get(key)
        if a != b:
            shown = [f"{row.calls} calls, {row.bytes:,} bytes" if row else "nothing" for row in (b, a)]
            return f"{key[0]} on {key[1]!r}: {shown[0]}, before {shown[1]}"
    return ""
