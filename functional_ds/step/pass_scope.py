"""``Pass``: the dynamic scope of one forward pass and its backward."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from types import TracebackType
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.torch_private import at_backward_end, graph_number, storage_id
from functional_ds.base.tree import setting
from functional_ds.base.weighted import Weighted
from functional_ds.comm.worlds.rng_state import RngState

from .phases import Trait
from .state.buffer_scope import BufferScope
from .state.buffers import BUFFERS
from .state.state import SeenGraphs, State, Summing, with_unused
from .views.graph_checks import check_graph, inspect_graph
from .views.view import NeedsWhole, Pulling, View

T = TypeVar("T")

_HERE = threading.local()  # this thread's stack of passes


def current_pass() -> "Pass | None":
    """The innermost pass of this thread."""
    passes = getattr(_HERE, "passes", None)
    return passes[-1] if passes else None


@attrs.define(eq=False)
class Pass:
    """One forward pass and its backward: the only dynamic scope besides the world. It is current inside of ``with pass_:``.

    Modules keep the step's params until the pass ends, because a recomputation in the backward pass reads them.

    Attributes:
        trains: whether gradients are wanted.
        buffers: module buffers in this pass; None if nothing that modules write is kept.
        graphs: which graphs were inspected before; None to inspect none.
        view: the params; None if several views serve one pass, as in a pipeline.
        loss: the loss, if it was computed already; else the step's function computes it.
        roots: further tensors to begin the backward pass at, with zero gradients, so that their nodes always run.
        calls: the module call stack: what runs modules inside of a module, the outermost last.
        axes: what transforms have set for the functions that run, by name.
        asked: the names that functions have asked for.
        slots: what transforms keep for this pass, by name.
        modules: the copies of modules that this pass uses.
        forward_ended: whether the forward pass is over.
    """

    trains: bool = True
    buffers: BufferScope | None = None
    graphs: SeenGraphs | None = None
    view: View | None = None
    loss: Any = None
    roots: list[Tensor] = attrs.field(factory=list)
    calls: tuple[Any, ...] = ()
    axes: Mapping[str, Any] = attrs.field(factory=dict)
    asked: set[str] = attrs.field(factory=set)
    slots: dict[str, Any] = attrs.field(factory=dict)
    modules: dict[Any, list[Any]] = attrs.field(factory=dict)
    forward_ended: bool = False
    _first_node: int = 0
    _at_forward_end: list[Callable[[], None]] = attrs.field(factory=list)
    _ending: ExitStack = attrs.field(factory=ExitStack)

    def __attrs_post_init__(self) -> None:
        self._first_node = graph_number(torch.zeros((), requires_grad=True).view(())) if self.graphs is not None else 0

    def __repr__(self) -> str:
        leaves = 0 if self.view is None else len(self.view.leaves)
        return f"Pass({leaves} leaves, trains={self.trains}, {'after its forward' if self.forward_ended else 'forward'})"

    def __enter__(self) -> "Pass":
        self.resume()
        return self

    def __exit__(self, raised: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end(failed=raised is not None)

    # -- being current -----------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Makes this the current pass."""
        _HERE.__dict__.setdefault("passes", []).append(self)

    def pause(self) -> None:
        """Makes the previous pass current."""
        _HERE.passes.remove(self)

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """A context in which this pass is current again: several open passes take turns."""
        self.resume()
        try:
            yield
        finally:
            _HERE.passes.pop()

    def resume_until_backward_ends(self) -> None:
        """Makes this the current pass until the running backward pass, which other code has begun, ends."""
        self.resume()
        passes = _HERE.passes

        def leave() -> None:
            if self in passes:
                passes.remove(self)

        at_backward_end(leave)

    # -- forward -----------------------------------------------------------------------------------------------------------

    @contextmanager
    def forward(self) -> Iterator[None]:
        """A context for functions of the view's params; it may be entered several times."""
        with torch.set_grad_enabled(self.trains), nullcontext() if self.view is None else self.view.scope():
            yield

    @contextmanager
    def run_by(self, *calls: Any, inside: tuple[Any, ...] = ()) -> Iterator[None]:
        """A context in which ``calls`` run modules inside of a module, before the present ones, and ``inside`` after them."""
        with setting(self, calls=(*calls, *self.calls, *inside)):
            yield

    @contextmanager
    def holding(self, slot: str, value: Any) -> Iterator[None]:
        """A context in which a slot has this value."""
        before, self.slots[slot] = self.slots.get(slot), value
        try:
            yield
        finally:
            self.slots[slot] = before

    def owns(self, tensor: Tensor) -> str | None:
        """The path of the param whose memory holds a tensor, if that memory is gathered; else None."""
        return None if self.view is None or self.view.owns is None else self.view.owns(tensor)

    @property
    def placeholders(self) -> Mapping[int, str]:
        """The paths of tensors that stand for a param, by id."""
        return {} if self.view is None else self.view.placeholders

    def at_forward_end(self, work: Callable[[], None]) -> None:
        """Runs ``work`` between the forward pass and the backward, unless the forward failed; last in, first out."""
        self._at_forward_end.append(work)

    def at_end(self, work: Callable[[], None]) -> None:
        """Runs ``work`` when the pass ends, also after an error."""
        self._ending.callback(work)

    # -- backward ----------------------------------------------------------------------------------------------------------

    def end_forward(self) -> None:
        """Ends the forward pass, once."""
        work, self._at_forward_end = self._at_forward_end, []
        with torch.set_grad_enabled(self.trains):
            for check in reversed(work):
                check()
            if not self.forward_ended and self.view is not None:
                self.view.finish()
        self.forward_ended = True

    def pull(self, loss: Tensor | None, carry: list[Tensor] | None, last: bool, *, retain_graph: bool = False) -> Pulling:
        """The gradients of a loss by the stored leaves, plus ``carry``: those of the view's ``pull``.

        Args:
            loss: None if other code is about to run the backward pass.
            carry: as for ``View.pull``.
            last: as for ``View.pull``.
            retain_graph: as for ``View.pull``.
        """
        self.end_forward()
        if self.view is None:
            raise RuntimeError("pull: this pass has no view of params")
        if loss is None:
            return self.view.pull(None, carry, last)
        outputs = [(x, None if x is loss else torch.zeros_like(x)) for x in (loss, *self.roots) if x.requires_grad]
        roots = [x for x, _ in outputs]
        if roots and self.graphs is not None and self.graphs.is_new(max(map(graph_number, roots)) - self._first_node):
            for guard in (self._inspect, *self.view.guards):
                guard(roots)
        return self.view.pull(outputs, carry, last, retain_graph=retain_graph)

    def inspect_again(self, loss: Tensor, unused: tuple[int, ...]) -> None:
        """Inspects the graph if the set of leaves without a gradient is new, since gradients may have been lost."""
        if loss.requires_grad and self.graphs is not None and self.graphs.is_new(unused):
            self._inspect([loss, *self.roots])

    def _inspect(self, roots: list[Tensor]) -> None:
        inspect_graph(roots, self.placeholders)

    def end(self, *, failed: bool = False) -> None:
        """Ends the pass. If it has not failed, its forward pass ends first, a collective for some views."""
        try:
            if not failed:
                self.end_forward()
        finally:
            while self in _HERE.passes:
                _HERE.passes.remove(self)
            try:
                self._ending.close()
            finally:
                if self.view is not None:
                    self.view.close()


# -- a forward pass alone --------------------------------------------------------------------------------------------------


def evaluated(step: Any, state: State, function: Callable[[Any], T], *, apart: bool = False) -> T:
    """``function(params)`` without gradients, in a new pass that keeps nothing.

    Args:
        step: whose phases.
        state: whose params.
        function: of the params as the loss sees them.
        apart: whether to copy results that may share memory with the params.
    """
    stored = {storage_id(x) for x in tree.leaves(state.params) if isinstance(x, Tensor)} if apart else set()

    def run(whole: bool) -> T:
        with Pass(trains=False, buffers=BufferScope(state.slots.get(BUFFERS), keeps=False)) as pass_:
            pass_.view = step.view(state, trains=False, whole=whole)
            with pass_.forward():
                result = function(pass_.view.params)
                shown = {id(leaf) for leaf in tree.leaves(pass_.view.params)} if apart else set()

                def lies_in_params(x: Any) -> bool:
                    return isinstance(x, Tensor) and (id(x) in shown or pass_.owns(x) is not None or storage_id(x) in stored)

                copied: T = tree.map(lambda x: x.clone() if lies_in_params(x) else x, result) if apart else result
                return copied

    return whole_if_needed(run, RngState.now() if step.has(Trait.SHARDS_PARAMS) else None)


def whole_if_needed(run: Callable[[bool], T], before: RngState | None = None) -> T:
    """``run(False)``; if it needs whole params, ``run(True)`` with the random state from before."""
    with suppress(NeedsWhole):
        return run(False)
    if before is not None:  # outside of the handler, which would keep alive the memory of the first run
        before.restore()
    return run(True)


# -- from a loss to a state and gradients ----------------------------------------------------------------------------------


def with_buffers(state: State, scope: BufferScope) -> State:
    """The state with the buffers after a pass."""
    return state if scope.buffers is None else state.put(**{BUFFERS: scope.collect()})


def differentiated(
    step: Summing,
    state: State,
    pass_: Pass,
    loss: Weighted,
    carry: Weighted | None,
    last: bool,
    *,
    retain_graph: bool = False,
    pulling: Pulling | None = None,
) -> tuple[State, Weighted]:
    """The state and the gradients after a backward pass from a loss, plus ``carry``.

    Args:
        step: whose pass it is.
        state: as after the forward pass.
        pass_: is open, and current.
        loss: of its forward pass; if other code has differentiated it, only its weight counts.
        carry: the sums of earlier micro-batches.
        last: whether no further one follows.
        retain_graph: whether another backward pass will use this graph.
        pulling: takes the gradients of a backward pass that other code has run.
    """
    if pulling is None:
        if pass_.graphs is not None:
            check_graph(loss, () if pass_.view is None else pass_.view.leaves)
        pulling = pass_.pull(loss.sum, None if carry is None else carry.sum, last, retain_graph=retain_graph)
    grads, unused = pulling.wait()
    pass_.inspect_again(loss.sum, tuple(unused))
    weight = loss.weight if carry is None else carry.weight + loss.weight
    return with_unused(step, state, unused), Weighted(grads, weight)


def detached(loss: Weighted, metrics: Mapping[str, Weighted]) -> dict[str, Weighted]:
    """A pass's metrics, including the loss."""
    return tree.map(torch.detach, {"loss": loss, **metrics})  # type: ignore[no-any-return]


@attrs.frozen(eq=False)
class Moment:
    """A captured pass, to restore when the backward pass recomputes a function.

    In a pipeline one pass has many micro-batches, whose axes differ in their documents.
    """

    pass_: Pass | None
    calls: tuple[Any, ...] = ()
    axes: Mapping[str, Any] = attrs.field(factory=dict)

    @staticmethod
    def now() -> "Moment":
        """Captures this thread's pass."""
        pass_ = current_pass()
        return Moment(None) if pass_ is None else Moment(pass_, pass_.calls, pass_.axes)

    def owns(self, tensor: Tensor) -> bool:
        """Whether the tensor is in the memory of a gathered param."""
        return self.pass_ is not None and self.pass_.owns(tensor) is not None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context in which the pass is current again, as it was."""
        pass_ = self.pass_
        if pass_ is None:
            yield
            return
        resumed = nullcontext() if current_pass() is pass_ else pass_.resumed()  # a device's backward has its own thread
        with setting(pass_, calls=self.calls, axes=self.axes), resumed:
            yield
