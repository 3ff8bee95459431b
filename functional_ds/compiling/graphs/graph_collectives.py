"""Collectives as nodes of a graph: an operator that starts one, and an operator that waits for its results.

``start(Tensor[] xs, int site) -> Tensor`` returns a token; ``wait(Tensor token, Tensor[] xs, int site) -> Tensor[]`` returns
the results. A site is one collective of the program, with a unique number, so that no two are merged. ``wait`` takes the inputs
again, which keeps their memory until then.
"""

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, fx

from functional_ds.base.tree import setting
from functional_ds.comm.calls.dispatch import outline, start_call
from functional_ds.comm.record.graph_notes import TraceNotes, UnitGathering
from functional_ds.comm.record.group import Group, World
from functional_ds.comm.table.collective import Call, CallContext, Handle
from functional_ds.comm.table.rooted_rows import nothing
from functional_ds.comm.worlds.current import CallRecorder

from .graph_nodes import RECOMPUTED, UNIT, tagged

CallSequence = tuple[str, tuple[int, ...], Hashable]  # a group's name, the ranks that take part, the key of messages


@attrs.frozen(eq=False)
class CallSite:
    """One collective of a program.

    Attributes:
        call: the collective and its options.
        group: the ranks.
        beside: whether it runs concurrently with others.
        early: whether the program continues before it waits.
        label: what it carries, such as the name of a unit; may be empty.
        turn: its number among those of its sequence in the program. Copies have the same one, and no pass changes it, so ranks
            can check that they start the same ones.
        batch: a number that the messages of one batch have in common; 0 for other calls.
    """

    call: Call
    group: Group
    beside: bool
    early: bool
    label: str = ""
    turn: int = 0
    batch: int = 0

    @property
    def name(self) -> str:
        """The collective's name."""
        return self.call.collective.name

    @property
    def sends(self) -> bool:
        """Whether it is a message from this rank, whose result is zeros that take no memory."""
        return self.call.collective.is_message and self.call.options["src"] == self.group.rank


def sequence_of(call: Call, group: Group) -> CallSequence:
    """What all members of a call make in one order."""
    members = call.collective.members(call.options, group.size)
    return group.name, tuple(group.ranks[place] for place in members), call.collective.order(call.options)


@attrs.define(eq=False)
class _RecordedHandle:
    """A collective whose start and wait are nodes."""

    token: Tensor
    xs: list[Tensor]
    site: int
    ended: float | None = None
    _results: list[Tensor] | None = None

    def wait(self) -> list[Tensor]:
        if self._results is None:
            self._results = list(torch.ops.functional_ds.wait(self.token, self.xs, self.site))
        return self._results

    def poll(self, timeout: float) -> bool:
        return True


@attrs.define(eq=False)
class GraphRecorder(CallRecorder):
    """Records a rank's collectives into the graph that is being traced.

    Attributes:
        sites: the collectives so far; a node refers to one by its index.
        notes: what the step reports about itself.
    """

    records = traces = True
    sites: list[CallSite] = attrs.field(factory=list)
    notes: TraceNotes = attrs.field(factory=TraceNotes)
    _label: str = ""
    _units: int = 0
    _recomputed: int = 0
    _batch: int = 0
    _batches: int = 0
    _turns: Counter[CallSequence] = attrs.field(factory=Counter)

    def start(
        self, call: Call, leaves: Sequence[Tensor], group: Group, here: CallContext, *, beside: bool, early: bool
    ) -> Handle:
        """Two nodes: one here, and one where the results are used."""
        sequence, batch = sequence_of(call, group), self._batch if call.collective.is_message else 0
        turn = self._turns[sequence]
        self._turns[sequence] += 1
        plain = attrs.evolve(call, out=None)  # which would be memory of the trace
        self.sites.append(CallSite(plain, group, beside, early, self._label, turn, batch))
        xs, site = [leaf.detach() for leaf in leaves], len(self.sites) - 1
        with carrying_out(self.sites):
            return _RecordedHandle(torch.ops.functional_ds.start(xs, site), xs, site)

    @contextmanager
    def batch(self, world: World) -> Iterator[None]:
        """A context in which messages share one number, and a graph starts them together."""
        self._batches += 1
        with setting(self, _batch=self._batches):
            yield

    @contextmanager
    def labelled(self, name: str) -> Iterator[None]:
        """A context in which collectives carry something of this name, and all nodes share one number."""
        outer, self._label = self._label, name
        self._units += 1
        with tagged(UNIT, self._units):
            yield
        self._label = outer

    def recomputing(self) -> AbstractContextManager[None]:
        """A context in which all nodes share one number."""
        self._recomputed += 1
        return tagged(RECOMPUTED, self._recomputed)

    def gathers(self, gathering: UnitGathering | None) -> None:
        """For graph passes that do the same."""
        self.notes.gathering = gathering

    def ran(self, module: Any) -> None:
        """The modes are those of a graph's calls."""
        self.notes.modes[module] = module.modes

    def buffer(self, module: Any, name: str, buffer: Tensor) -> Tensor:
        """An input of the graph."""
        return self.notes.buffers.get((module, name), buffer)


class _GraphOfThread(threading.local):
    run: Any = None  # what the graph that this thread runs, or traces, refers to by numbers


_HERE = _GraphOfThread()


def carrying_out(sites: Sequence[CallSite]) -> AbstractContextManager[None]:
    """A context in which this thread's operators refer to these sites."""
    return setting(_HERE, run=(sites, {}))


def site_here(number: int) -> Any:
    """The site with this number in this thread."""
    return _HERE.run[0][number]


def starter_of(site: CallSite) -> Callable[[list[Tensor]], Handle]:
    """A function that starts a collective on tensors."""
    call, group, beside, early = site.call, site.group, site.beside, site.early
    return lambda xs: start_call(call, xs, group, beside=beside, early=early).handle


def batch_starter_of(sites: Sequence[CallSite]) -> Callable[[Sequence[list[Tensor]]], list[Handle]]:
    """A function that starts messages together, each on tensors."""
    starters, world = [*map(starter_of, sites)], sites[0].group.world

    def start(batch: Sequence[list[Tensor]]) -> list[Handle]:
        with world.batch():
            return [starter(xs) for starter, xs in zip(starters, batch, strict=True)]

    return start


def waiter_of(site: CallSite) -> Callable[[Handle, list[Tensor]], list[Tensor]]:
    """A function that waits for a collective that was started on tensors, and gives its results."""
    if site.sends:
        return lambda handle, xs: [nothing(x, x.shape) for x, _ in zip(xs, handle.wait(), strict=True)]
    return lambda handle, xs: [_apart(result.contiguous(), xs) for result in handle.wait()]


def _start(xs: list[Tensor], site: int) -> Tensor:
    sites, under_way = _HERE.run
    if sites[site].batch and sites[site].group.world.in_launch_order(xs[0].device):
        raise RuntimeError("where messages run in the order of their starts, a graph by itself batches none: call the step")
    under_way[site] = starter_of(sites[site])(xs)
    return torch.zeros((), dtype=torch.int64)


def _wait(token: Tensor, xs: list[Tensor], site: int) -> list[Tensor]:
    sites, under_way = _HERE.run
    return waiter_of(sites[site])(under_way.pop(site), xs)


def _apart(result: Tensor, xs: list[Tensor]) -> Tensor:
    """The result in new memory, as operators promise."""
    memory = result.untyped_storage().data_ptr()
    return result.clone() if memory and any(memory == x.untyped_storage().data_ptr() for x in xs) else result


def _wait_fake(token: Tensor, xs: list[Tensor], site: int) -> list[Tensor]:
    call_site: CallSite = _HERE.run[0][site]
    if call_site.sends:
        return [nothing(x, x.shape) for x in xs]
    here = CallContext(call_site.call.options, call_site.group.rank, call_site.group.size)
    shapes = [outline(call_site.call, x, here) for x in xs]
    return [x.new_empty(shape.shape, dtype=shape.dtype) for x, shape in zip(xs, shapes, strict=True)]


torch.library.define("functional_ds::start", "(Tensor[] xs, int site) -> Tensor")
torch.library.define("functional_ds::wait", "(Tensor token, Tensor[] xs, int site) -> Tensor[]")
torch.library.impl("functional_ds::start", "CompositeExplicitAutograd", _start)
torch.library.impl("functional_ds::wait", "CompositeExplicitAutograd", _wait)
torch.library.register_fake("functional_ds::start", lambda xs, site: torch.empty((), dtype=torch.int64))
torch.library.register_fake("functional_ds::wait", _wait_fake)
START = torch.ops.functional_ds.start.default
WAIT = torch.ops.functional_ds.wait.default
fx.has_side_effect(START)  # other ranks take part, whether this one uses the result or not
fx.has_side_effect(WAIT)


def site_of(node: fx.Node) -> int:
    """The number of the collective that a node starts or waits for."""
    number = node.args[1 if node.target is START else 2]
    if not isinstance(number, int):
        raise ValueError(f"{node} has no site: its arguments are {node.args}")
    return number
