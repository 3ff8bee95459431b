"""Functions that a graph calls eagerly, because their inner sizes depend on values: one node forward, one backward.

``run(Tensor[] xs, int site) -> Tensor[]`` returns the result and a token, which holds what autograd saved.
``run_backward(Tensor token, Tensor[] xs, Tensor grad, int site) -> Tensor[]`` returns the gradients. Autograd saves places
instead of ``xs``, so a graph may free and regather them in between.
"""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, fx
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, get_proxy_slot

from functional_ds.base import tree
from functional_ds.base.torch_private import storage_id
from functional_ds.comm.calls.dispatch import outline
from functional_ds.comm.record.group import Group, Ready
from functional_ds.comm.table.collective import Call, CallContext, Handle
from functional_ds.comm.worlds.current import CallRecorder, recording
from functional_ds.dry_run.operations import OperationCounter, SizedOperation
from functional_ds.step.axes import axes, with_axes

from .graph_collectives import GraphRecorder, carrying_out, site_here
from .host_calls import HostSite


@attrs.frozen(eq=False)
class InnerCall:
    """A collective within a function that a graph calls; its tensors have the numbers of rows of a dry run."""

    call: Call
    group: Group
    xs: Sequence[Tensor]

    @property
    def agreement(self) -> Any:
        """What must be equal on all ranks: everything except numbers of rows."""
        row, private = self.call.collective, self.call.collective.private
        options = [(name, value) for name, value in self.call.options.items() if name not in private]
        return row.name, options, [(x.dtype, tuple(x.shape[1:])) for x in self.xs]


@attrs.frozen(eq=False)
class EagerSite:
    """One call of a function.

    Attributes:
        function: of tensors; the shape of its result does not depend on values.
        asks: which of its tensors have gradients.
        output: the result without values.
        work: its operations and collectives, forward and backward, in order, for even routing to experts.
        kept: the bytes that the backward pass needs in addition to the given tensors, likewise.
        autocasts: for each device type whether autocast is on, and its dtype.
    """

    function: Callable[..., Tensor]
    asks: tuple[bool, ...]
    output: Tensor
    work: tuple[Sequence[SizedOperation | InnerCall], Sequence[SizedOperation | InnerCall]]
    kept: int
    autocasts: Sequence[tuple[str, bool, torch.dtype]]

    @property
    def name(self) -> str:
        """Its name in lists of sites."""
        return "eager"

    def inner(self, *, backward: bool) -> list[InnerCall]:
        """Its collectives."""
        return [call for call in self.work[backward] if isinstance(call, InnerCall)]

    def run(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """The result, and a token with what the backward pass needs."""
        kept = _Kept.of(xs)
        outer = _autocasts()
        _set_autocasts(self.autocasts)
        try:
            out = kept.called(self.function, xs, self.asks)
        finally:
            _set_autocasts(outer)
        token = torch.zeros((), dtype=torch.int64)
        token.kept = kept  # type: ignore[attr-defined]
        return [out.detach().contiguous(), token]

    def run_backward(self, token: Tensor, xs: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
        """The gradients by the tensors that have some."""
        kept: _Kept = token.kept  # type: ignore[attr-defined]
        grads = kept.gradients(xs, grad)
        of = [x for x, asks in zip(xs, self.asks, strict=True) if asks]
        memory = grad.untyped_storage().data_ptr()
        given = [x.new_zeros(x.shape) if g is None else g for x, g in zip(of, grads, strict=True)]
        own = [g.clone() if g.untyped_storage().data_ptr() == memory else g for g in given]
        return [g.reshape(x.shape).contiguous() for x, g in zip(of, own, strict=True)]


def eager_site(node: fx.Node, sites: Sequence[Any]) -> EagerSite | None:
    """What a node calls; None for other nodes."""
    return sites[int(str(node.args[-1]))] if node.target in (RUN, RUN_BACKWARD) else None


def _autocasts() -> list[tuple[str, bool, torch.dtype]]:
    return [
        (device_type, torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
        for device_type in ("cpu", "cuda")
    ]


def _set_autocasts(autocasts: Sequence[tuple[str, bool, torch.dtype]]) -> None:
    for device_type, enabled, dtype in autocasts:
        torch.set_autocast_enabled(device_type, enabled)
        torch.set_autocast_dtype(device_type, dtype)


@attrs.define(eq=False)
class _Kept:
    """What autograd saves for a call, with the given tensors replaced by their places, so that their memory may be freed.

    Leaves of a unit share memory, and a regathered unit may be at another address: a place is relative to its leaf.

    Attributes:
        memory: the given tensors by their storages, while the call runs.
        beside: bytes of the other storages that are saved.
    """

    memory: dict[int, list[tuple[int, Tensor]]]
    beside: dict[int, int] = attrs.field(factory=dict)
    edges: list[GradientEdge] = attrs.field(factory=list)
    now: Sequence[Tensor] = ()
    _out: list[GradientEdge | None] = attrs.field(factory=list)  # taken by the backward pass

    @staticmethod
    def of(xs: Sequence[Tensor]) -> "_Kept":
        """Before a call with these."""
        by_storage: dict[int, list[tuple[int, Tensor]]] = {}
        for place, x in enumerate(xs):
            if x.numel() and x.is_contiguous():
                by_storage.setdefault(storage_id(x.untyped_storage()), []).append((place, x.detach()))
        return _Kept(by_storage)

    def called(self, function: Callable[..., Tensor], xs: Sequence[Tensor], asks: Sequence[bool]) -> Tensor:
        """The result; keeps its graph."""
        anchor, given = torch.empty(0, requires_grad=True), [*xs]
        with torch.set_grad_enabled(any(asks)), saved_tensors_hooks(self._pack, self._unpack):
            for place, ask in enumerate(asks):
                if ask:
                    given[place] = _Given.apply(anchor, xs[place])
                    self.edges.append(get_gradient_edge(given[place]))
            out = function(*given)
        self.memory = {}
        if self.edges:
            self._out.append(get_gradient_edge(out) if out.requires_grad else None)
        return out

    def gradients(self, xs: Sequence[Tensor], grad: Tensor) -> Sequence[Tensor | None]:
        """The gradients by the given tensors that ask, which have their memory here; once."""
        if not self._out:
            raise RuntimeError("the backward pass of a call in a graph runs once, behind its forward pass")
        out, self.now = self._out.pop(), xs
        if out is None:
            return [None] * len(self.edges)
        grads = torch.autograd.grad([out], self.edges, [grad], allow_unused=True)
        self.now = ()
        return grads

    def _pack(self, x: Tensor) -> Any:
        storage = x.untyped_storage()
        for place, given in self.memory.get(storage_id(storage), ()):
            begin = x.storage_offset() - given.storage_offset()
            span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
            if x.dtype == given.dtype and x.numel() and begin >= 0 and begin + span <= given.numel():
                return place, x.shape, x.stride(), begin
        self.beside[storage_id(storage)] = storage.nbytes()
        return x.detach()

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        place, shape, stride, begin = packed
        given = self.now[place].contiguous()
        return torch.as_strided(given, shape, stride, given.storage_offset() + begin)


class _Given(torch.autograd.Function):
    """A tensor as a node's result, so that the graph of later results ends there."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor) -> Tensor:
        return x.detach()


# -- tracing -----------------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class _InnerCalls(CallRecorder):
    """Records collectives of a dry run on tensors without values."""

    records = True
    work: list[SizedOperation | InnerCall] = attrs.field(factory=list)

    def start(
        self, call: Call, leaves: Sequence[Tensor], group: Group, here: CallContext, *, beside: bool, early: bool
    ) -> Handle:
        self.work.append(InnerCall(call, group, [leaf.detach() for leaf in leaves]))
        return Ready([outline(call, leaf, here) for leaf in leaves])

    def recomputing(self) -> Any:
        raise RuntimeError("an exchange of experts' rows is recomputed or offloaded, which no graph holds")


class _WorkOfCall(OperationCounter):
    """A function's operations, and whether it uses tensors of the trace that it was not given, or draws."""

    def __init__(self, tracer: Any, work: list[SizedOperation | InnerCall]) -> None:
        super().__init__()
        self.tracer, self.work, self.others, self.draws = tracer, work, False, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = (x for x in tree.leaves((args, kwargs)) if isinstance(x, Tensor))
        self.draws = self.draws or torch.Tag.nondeterministic_seeded in func.tags
        self.others = self.others or any(get_proxy_slot(x, self.tracer, None) is not None for x in given)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def add(self, operation: SizedOperation, result: Any) -> None:
        """An operation ran and gave this."""
        self.work.append(operation)


class _AxesOutside(dict[str, Any]):
    """The axes of a step, which a function that a graph calls does not have."""

    def get(self, name: str, default: Any = None) -> Any:
        if name in self:
            raise RuntimeError(
                f"a function of experts' rows asks for the step's axis {name!r}, which a graph lacks: ask outside of "
                "it, and pass the group"
            )
        return default


class StepRecorder(GraphRecorder):
    """Records collectives into a graph, functions whose inner sizes depend on values, and functions on the host."""

    def host(
        self, function: Callable[..., Any], given: Sequence[Tensor], memory: Sequence[Tensor] = (), like: Tensor | None = None
    ) -> Tensor:
        """A node that calls a function of what tensors carry, and of memory; its result is like ``like``, or carried."""
        self.sites.append(HostSite(function, like))  # type: ignore[arg-type]
        tensors = [[x.detach() for x in given], [x.detach() for x in memory]]
        with carrying_out(self.sites):
            result: Tensor = torch.ops.functional_ds.host(*tensors, len(self.sites) - 1)
        return result

    def eager(self, function: Callable[..., Tensor], xs: Sequence[Tensor]) -> Tensor:
        """Two nodes: a call of the function here, and another in the backward pass.

        Raises:
            RuntimeError: it uses tensors of the trace that it is not given, asks for an axis, or draws from torch's generator.
        """
        xs = [x.view_as(x) for x in xs]  # fetches sharded params
        asks = tuple(x.requires_grad and torch.is_grad_enabled() for x in xs)
        mode = get_proxy_mode()
        trial = _InnerCalls()
        with disable_proxy_modes_tracing():
            fresh = [x.detach() for x in xs]
            kept = _Kept.of(fresh)
            tracer: Any = mode and mode.tracer
            with recording(trial), with_axes(_AxesOutside(axes())), _WorkOfCall(tracer, trial.work) as seen:
                out = kept.called(function, fresh, asks)
                forward = [*trial.work]
                if out.requires_grad:
                    grad = torch.ones_like(out)
                    trial.work.clear()
                    kept.gradients(fresh, grad)
            backward = trial.work if out.requires_grad else []
            if seen.others:
                raise RuntimeError(
                    "a function of experts' rows uses tensors that are not variables of it, such as a module's parameters: "
                    "pass fds.moe.gated_mlp(...), or a function that names its tensors"
                )
            if seen.draws:
                raise RuntimeError("a function of experts' rows draws by torch's generator: draw outside of it, or by fds.Key")
            output = torch.empty_like(out.detach(), memory_format=torch.contiguous_format)
        site = EagerSite(function, asks, output, (forward, backward), sum(kept.beside.values()), _autocasts())
        self.sites.append(site)  # type: ignore[arg-type]
        group = next((call.group for call in site.inner(backward=False)), None)
        result: Tensor = _EagerCall.apply(len(self.sites) - 1, asks, group, *xs)
        return result


class _EagerCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, site: int, asks: tuple[bool, ...], group: Group | None, *xs: Tensor) -> Tensor:
        out, token = torch.ops.functional_ds.run([x.detach() for x in xs], site)
        ctx.site, ctx.asks, ctx.group = site, asks, group  # the group, as nodes of collectives have it
        ctx.save_for_backward(token, *xs)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        token, *xs = ctx.saved_tensors
        grads = iter(torch.ops.functional_ds.run_backward(token, [x.detach() for x in xs], grad, ctx.site))
        return (None, None, None, *(next(grads) if ask else None for ask in ctx.asks))


def _run_fake(xs: list[Tensor], site: int) -> list[Tensor]:
    output = site_here(site).output
    return [xs[0].new_empty(output.shape, dtype=output.dtype), torch.empty((), dtype=torch.int64)]


def _run_backward_fake(token: Tensor, xs: list[Tensor], grad: Tensor, site: int) -> list[Tensor]:
    return [x.new_empty(x.shape) for x, asks in zip(xs, site_here(site).asks, strict=True) if asks]


torch.library.define("functional_ds::run", "(Tensor[] xs, int site) -> Tensor[]")
torch.library.define("functional_ds::run_backward", "(Tensor token, Tensor[] xs, Tensor grad, int site) -> Tensor[]")
torch.library.impl("functional_ds::run", "CompositeExplicitAutograd", lambda xs, site: site_here(site).run(xs))
torch.library.impl(
    "functional_ds::run_backward",
    "CompositeExplicitAutograd",
    lambda token, xs, grad, site: site_here(site).run_backward(token, xs, grad),
)
torch.library.register_fake("functional_ds::run", _run_fake)
torch.library.register_fake("functional_ds::run_backward", _run_backward_fake)
RUN = torch.ops.functional_ds.run.default
RUN_BACKWARD = torch.ops.functional_ds.run_backward.default
fx.has_side_effect(RUN)  # other ranks take part
fx.has_side_effect(RUN_BACKWARD)
