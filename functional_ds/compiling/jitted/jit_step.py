"""``jit``: a step that runs as a graph."""

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.torch_private import version_of
from functional_ds.comm.algorithms.cost import Link
from functional_ds.comm.record.ledger import Row
from functional_ds.compiling.compile_log import BlockClass, Compiles
from functional_ds.compiling.graphs.graph_passes import regather, schedule
from functional_ds.compiling.graphs.graph_record import StepGraph
from functional_ds.compiling.graphs.graph_trace import UntraceableError, trace
from functional_ds.step.axes import EAGER_FIRST
from functional_ds.step.phase_signatures import Metrics
from functional_ds.step.state.buffers import BUFFERS, Buffers
from functional_ds.step.state.state import State, mark_donated, refuse_open
from functional_ds.step.step import Step

from .apply_passes import GraphPass, apply_passes
from .graph_agreement import disagreement, rank_collectives
from .graph_code import GraphCode
from .graph_kind import GraphKind, is_settled, kind_of, leaf_kind
from .predicted_step import PredictedStep, seconds_of_steps
from .region_compiler import RegionCode, RegionError, check_backend

if TYPE_CHECKING:
    from functional_ds.scaling.machine import Machine


class JitWarning(UserWarning):
    """A step runs eagerly; the message says why."""


@attrs.define(eq=False)
class _Traced:
    """The result for one specialisation, on all ranks: a graph, or the reason why there is none."""

    graph: StepGraph | None
    reason: str
    code: GraphCode | None = None


@attrs.define(eq=False)
class _GraphCache:
    """What a jitted step has traced; it affects speed, never results.

    Attributes:
        kinds: of this rank's states and batches: structure, shapes, modes.
        entries: by the numbers of all ranks' kinds.
        later: of kinds beyond the limit.
        control: the ranks' channel for these numbers.
    """

    kinds: list[GraphKind] = attrs.field(factory=list)
    entries: dict[tuple[int, ...], _Traced] = attrs.field(factory=dict)
    later: _Traced | None = None
    control: comm.Group | None = None


@attrs.frozen(eq=False, repr=False, kw_only=True)
class JitStep(Step, Compiles):
    """A step that runs as a graph after a state's first, eager step.

    Attributes:
        passes: over each graph; None for those that the step's transforms ask for.
        backend: compiles what is between collectives; "fx" compiles nothing.
        group: the ranks that run the step; None for the whole world.
        max_graphs: how many specialisations are traced.
    """

    passes: Sequence[GraphPass] | None = None
    backend: str = "fx"
    group: comm.Group | None = None
    max_graphs: int = 8
    _cache: _GraphCache = attrs.field(factory=_GraphCache, init=False)

    def __call__(self, state: State, batch: Any, *, donate: bool = True) -> tuple[State, Metrics]:
        """One update, as ``Step.__call__``: bitwise the same result, and the same errors."""
        self._guard("finish", state)
        acting = self.acting(state)
        if acting is not self:  # with graphs of its own
            return acting(state, batch, donate=donate)
        entry = self._entry(state, batch)
        if entry is None or entry.graph is None or entry.code is None:
            return Step.__call__(self, state, batch, donate=donate)
        refuse_open(state)
        if isinstance(held := state.slots.get(BUFFERS), Buffers):
            for module in held.known.keys:  # they were looked at for the entry
                held.check_changes(module)
        return _run(entry.graph, entry.code, state, batch, donate)

    def graph(self, state: State, batch: Any) -> StepGraph:
        """The graph of this step after its passes; nothing is computed or sent.

        Raises:
            UntraceableError: with the reason; also for a state that has made no step yet.
        """
        self._guard("params", state)
        acting = self.acting(state)
        return acting._traced(state, batch) if isinstance(acting, JitStep) else self._traced(state, batch)

    def predicted(
        self, state: State, batch: Any, machine: "Machine", *, links: Mapping[str, Link] | None = None, steps: int = 0
    ) -> PredictedStep:
        """The predicted time of a step on a machine, and optionally the measured time here.

        Law: it is ``graph(state, batch).cost(machine, links=links)``, and on several ranks the 8 bytes by which they agree on a
        graph.

        Args:
            state: that has made a step; it is unchanged.
            batch: of a step.
            machine: ``fds.scaling.Machine``; ``functional-ds tune --save-machine`` fits one to runs.
            links: of groups, by the name of their axis; others have the machine's.
            steps: how many to time, on a copy of the state, after a warmup step; equal on all ranks. 0 measures nothing and
                sends nothing.

        Raises:
            UntraceableError: the step runs eagerly, with the reason.
            ValueError: ``steps`` is below 0; or above it on simulated ranks, of which only one runs at a time.

        >>> import functional_ds as fds
        >>> step = jit(fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(0.5)))
        >>> state, x = step.init({"w": torch.ones(2)}), torch.tensor([1.0, 2.0])
        >>> state, metrics = step(state, x)
        >>> machine = fds.scaling.Machine("m", 1e9, 1e9, 1e9, link_bandwidth=1e9, node_latency=1e-6, device="cpu")
        >>> found = step.predicted(state, x, machine, steps=2)
        >>> round(found.seconds - found.compute - found.host, 9), found.measured > 0
        (0.0, True)
        """
        if steps < 0:
            raise ValueError(f"steps={steps} must be at least 0")
        cost, ranks = self.graph(state, batch).cost(machine, links=links), (self.group or comm.world()).size
        agreement = 0.0
        if ranks > 1:
            told = Row("all_gather", "jit", ranks, calls=1, bytes=8 * (ranks - 1))
            agreement = machine.collective_seconds(told)
        measured = seconds_of_steps(self, state, batch, steps=steps) if steps else None
        entry = self._entry(state, batch) if steps else None
        if entry is not None and entry.graph is None:  # its ranks differ, or there are too many kinds
            raise UntraceableError(entry.reason)
        return PredictedStep(cost, agreement, measured)

    @property
    def reasons(self) -> list[str]:
        """Why some states and batches run eagerly, or without the backend; empty if none does."""
        entries = [*self._cache.entries.values(), *filter(None, [self._cache.later])]
        further = [reason for acting in self._variants() for reason in acting.reasons]
        return [*(entry.reason for entry in entries if entry.reason), *further]

    def compiled_rows(self, step: Step) -> list[BlockClass] | None:
        """What the backend has compiled, for ``fds.compile_report``."""
        codes = [entry.code for variant in (self, *self._variants()) for entry in variant._cache.entries.values()]
        return [row for code in codes if isinstance(code, RegionCode) for row in code.rows] or None

    def forget(self) -> None:
        """Drops all graphs, after a change that no argument shows; all ranks must call it at the same place."""
        self._cache.kinds.clear()
        self._cache.entries.clear()
        self._cache.later = None
        self._acting.clear()

    def _variants(self) -> list["JitStep"]:
        """Those of steps in which other transforms are due."""
        return [acting for acting in self._acting.values() if isinstance(acting, JitStep)]

    def __repr__(self) -> str:
        return f"JitStep({self})"

    # -- which graph ---------------------------------------------------------------------------------------------------

    def _entry(self, state: State, batch: Any) -> _Traced | None:
        """The entry for this state and batch, agreed on by all ranks; None for a step that is eager first."""
        cache, group = self._cache, self._group()
        mine = 0 if state.batch is None else self._number(state, batch)
        numbers = (mine,)
        if group is not None:
            numbers = tuple(comm.all_gather(torch.tensor([mine], device=group.world.device), group).tolist())
        if 0 in numbers:
            return None
        if numbers not in cache.entries:
            if max(numbers) > self.max_graphs or len(cache.entries) >= self.max_graphs:
                return self._one_too_many()
            entry = self._new_entry(state, batch, group, cache.kinds[mine - 1])
            if EAGER_FIRST in entry.reason:
                return None
            cache.entries[numbers] = entry
        return cache.entries[numbers]

    def _number(self, state: State, batch: Any) -> int:
        """The number of a specialisation on this rank, from 1 on; ``max_graphs + 1`` beyond the limit.

        0 for a new one while no eager step has inspected the modules' writes in their modes.
        """
        kind, kinds = kind_of(state, batch), self._cache.kinds
        like = [number for number, known in enumerate(kinds, 1) if known.leaves == kind]
        number = next((number for number in like if kinds[number - 1].is_now()), None)
        if number is not None:
            return number
        if len(kinds) == self.max_graphs:
            return self.max_graphs + 1
        if like:
            kinds.append(GraphKind(kind, {module: module.modes for number in like for module in kinds[number - 1].modes}))
        elif is_settled(state):
            kinds.append(GraphKind(kind))
            return len(kinds)
        return 0

    def _one_too_many(self) -> _Traced:
        if self._cache.later is None:
            reason = (
                f"{self.max_graphs} kinds of states and batches were traced already, and this one has other shapes, structures "
                "or numbers again: pad batches to a few shapes, pass what changes as tensors, or raise max_graphs"
            )
            self._cache.later = _Traced(None, reason)
            _warn(f"the step runs eagerly: {reason}")
        return self._cache.later

    def _group(self) -> comm.Group | None:
        """The channel on which ranks agree; None for one rank."""
        if self._cache.control is None:
            self._cache.control = (self.group or comm.world()).channel("jit")
        return self._cache.control if self._cache.control.size > 1 else None

    def _new_entry(self, state: State, batch: Any, group: comm.Group | None, kind: GraphKind) -> _Traced:
        graph, code, reason, failure, failed = None, None, "", "", None
        try:
            graph = self._traced(state, batch)
            kind.modes = graph.notes.modes
            kind.buffers = [(store, key, leaf_kind(store[key])) for store, key in graph.buffers]
            code = _plain_code(graph) if self.backend == "fx" else RegionCode(graph, self.backend)
        except UntraceableError as error:
            reason = str(error)
        except RegionError as error:
            failure = f"no region is compiled: {error}"
        except Exception as error:  # a pass's, of which the other ranks learn before it is raised
            reason, failed = f"{type(error).__name__}: {error}", error
        if group is not None:
            rank = comm.world().rank
            nodes, sites = ([], []) if graph is None else (list(graph.module.graph.nodes), graph.sites)
            told = comm.all_gather_object((reason, failed is not None, failure, rank_collectives(nodes, sites, rank)), group)
            reason = _first_reason([one for one, *_ in told]) or disagreement([collectives for *_, collectives in told])
            failure = _first_reason([one for _, _, one, _ in told])
            if failed is None and any(fails for _, fails, *_ in told):
                raise RuntimeError(f"fds.jit: {reason}")
        if failed is not None:
            raise failed
        if EAGER_FIRST in reason:
            return _Traced(None, reason)
        if reason or graph is None:
            _warn(f"the step runs eagerly: {reason}")
            return _Traced(None, reason)
        if failure:  # ranks that round differently would diverge
            _warn(failure)
            code = _plain_code(graph)
        return _Traced(graph, failure, code)

    def _traced(self, state: State, batch: Any) -> StepGraph:
        if state.batch is None:
            raise UntraceableError("the state has made no step yet, and the first one is eager: ranks agree on orders there")
        if comm.world().world.watch is not None:
            raise UntraceableError("the simulation follows values (variance=True), which graphs do not show it")
        graph = trace(self, state, batch)
        if self.passes is not None:
            return apply_passes(graph, self.passes)
        eager = graph.notes.gathering
        if eager is None:
            return graph
        return schedule(ahead=eager.ahead)(regather(live=eager.live, reshard=eager.reshard)(graph))


def _plain_code(graph: StepGraph) -> GraphCode:
    return GraphCode(graph.module.graph, graph.module, graph.sites)


def _run(graph: StepGraph, code: GraphCode, state: State, batch: Any, donate: bool) -> tuple[State, Metrics]:
    """Runs the graph on the state's memory, or on a copy of it."""
    before = tree.replace(state) if donate else state.clone()
    leaves = tree.leaves((before, batch))
    versions = [version_of(x) for x in leaves if isinstance(x, Tensor)]
    with comm.world().world.step():
        try:
            new, metrics = graph.given(code(graph.taken(leaves)))
        except Exception:
            if donate and versions != [version_of(x) for x in leaves if isinstance(x, Tensor)]:
                state.donate()
                mark_donated(before)
            raise
    if donate:
        new = tree.replace(new, step=new.step.detach()) if new.step is before.step else new
        state.donate()
        mark_donated(before)
    return new, metrics


def _warn(reason: str) -> None:
    warnings.warn(f"fds.jit: {reason}", JitWarning, stacklevel=5)


def _first_reason(reasons: Sequence[str]) -> str:
    """The first reason, and its rank if others have another or none."""
    for rank, reason in enumerate(reasons):
        if reason:
            return reason if len({*reasons}) == 1 else f"on rank {rank}, {reason}"
    return ""


def jit(
    step: Step,
    *,
    passes: Sequence[GraphPass] | None = None,
    backend: str = "fx",
    group: comm.Group | None = None,
    max_graphs: int = 8,
) -> JitStep:
    """Traces a step into a graph of ATen operators and collectives, once for each structure and shape of state and batch.

    ``jit(step)`` equals ``step`` bitwise (with inductor, within rounding), in states, metrics and payloads; if stage 3
    recomputes, a unit may be gathered less often. What cannot be traced runs eagerly, with a ``JitWarning`` that gives the
    reason. Each state's first step is eager, because ranks agree on their orders in it. The graph contains view, loss,
    backward, reductions, norm and update; it writes into a donated state's memory.

    As in JAX, Python runs only while tracing: numbers that the loss reads from elsewhere than the state and the batch are
    constants until ``forget()``. Tensors from elsewhere are an error. Modes of modules, and changes on ``apply.module``, are
    checked in every step.

    Cost: 8 bytes between ranks in every step, on a separate channel, by which they agree on the graph; tracing costs a small
    multiple of an eager step's host time.

    Args:
        step: any.
        passes: functions from graph to graph, in order; None for ``regather`` and ``schedule`` if params are sharded.
        backend: compiles the regions between collectives, writes and draws: "fx" nothing, so the graph runs the eager step's
            kernels; "aot_eager" torch's AOT autograd, for tests; "inductor" fuses kernels, and is equal within rounding. Equal
            regions are compiled once; ``fds.compile_report`` lists compilations and their times.
        group: the ranks that run the step; None for the whole world.
        max_graphs: how many specialisations are traced; more run eagerly.

    Raises:
        ValueError: ``max_graphs`` is below 1; an unknown backend, or no compiler for its output. In a step, on all ranks: what
            ``passes`` raise, and a pass that returns an invalid graph.

    >>> import functional_ds as fds
    >>> step = jit(fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(0.5)))
    >>> state, x = step.init({"w": torch.ones(2)}), torch.tensor([1.0, 2.0])
    >>> for _ in range(2):
    ...     state, metrics = step(state, x)
    >>> step.params(state)["w"].tolist(), metrics["loss"].item()
    ([0.0, -1.0], 0.5)
    """
    if max_graphs < 1:
        raise ValueError(f"max_graphs={max_graphs} must be at least 1")
    if not isinstance(step, Step):
        raise TypeError(f"step: {type(step).__name__} is not a Step; compose the step first, then jit it: fds.jit(step)")
    check_backend(backend)
    given = {field.name: getattr(step, field.name) for field in attrs.fields(Step) if field.init}
    return JitStep(**given, passes=passes, backend=backend, group=group, max_graphs=max_graphs)
