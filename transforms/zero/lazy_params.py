"""Lazy params: gathered unit by unit at first use, with gradients passed to a reducer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from functional_ds.base import tree
from functional_ds.base.torch_private import (
    below_autograd,
    disable_torch_function_subclass,
    in_dual_level,
    in_torch_func,
    outside_functorch,
)
from functional_ds.comm.worlds.current import recorder
from functional_ds.sharding.layout import Layout
from functional_ds.step.views.graph_checks import WriteGuard, watched
from functional_ds.step.views.view import NeedsWhole, Outputs, Pulled, Pulling, View, differentiate

from .reduce import Reducer
from .state import ZeroCache
from .units.lazy_tensor import LazyLeaves, LazyTensor, closed
from .units.prefetch import FetchPlan
from .units.saved_places import SavedPlaces, UnitLeaves
from .units.unit_source import UnitSource, WholeParams


class _UnitNode(torch.autograd.Function):
    """An autograd node from the view's one differentiable leaf to a unit's trained leaves, whose gradients it passes on.

    It is made at the unit's first use. Autograd runs later nodes first, so it completes a unit before earlier ones. The first
    output is a token among the roots of the backward pass, so the node runs exactly once on every rank, for any loss.

    Each recomputation adds a node before the unit's leaves, because what a backward pass within it saves depends on which
    leaves have one: autograd skips the gradients of whole nodes, not of single outputs. It passes gradients on only if a custom
    function runs a backward pass on what it recomputes.
    """

    @staticmethod
    def forward(
        ctx: Any, params: "LazyParams", unit: int, views: tuple[Tensor, ...], handle: Tensor, recomputed: bool
    ) -> tuple[Tensor, ...]:
        ctx.params, ctx.unit, ctx.recomputed = params, unit, recomputed
        ctx.set_materialize_grads(False)
        return (torch.empty((), device=params.device), *views)

    @staticmethod
    def backward(ctx: Any, token: Tensor | None, *grads: Tensor | None) -> tuple[None, ...]:
        if ctx.recomputed:
            ctx.params.nested(ctx.unit, grads)
        elif token is None:  # of a backward pass that the loss, or a custom function, runs
            ctx.params.take(ctx.unit, grads)
        else:
            ctx.params.completed(ctx.unit, grads)
        return None, None, None, None, None


# Without what ``Function.apply`` does for torch.func: units are entered outside of its transforms.
_plain_function: Any = super(torch.autograd.Function, _UnitNode)
_apply_node: Callable[..., tuple[Tensor, ...]] = _plain_function.apply
_AS_IT_IS: AbstractContextManager[Any] = nullcontext()


class LazyParams:
    """The params of one view, as lazy tensors.

    The first use of a leaf fetches its unit from the source. If gradients are wanted, it also adds an autograd node that passes
    the unit's gradients to the reducer. If the source frees units, a saved-tensor hook replaces what autograd saves of a unit
    by its place, so the unit can be freed after its forward and fetched again in the backward pass, without recomputing
    activations. A leaf is one tensor throughout a pass: it releases its memory when its unit is freed, and gets new memory when
    the unit is fetched again. So all its uses are uses of one tensor, as on a single device.

    Args:
        layout: the units.
        cache: of the state.
        source: makes the source of units, which reports to these params what it fetches and frees.
        reducer: makes the reducer of a backward pass, from ``pull``'s ``carry``, ``last`` and ``passes``.
        device: of the params.
        trains: whether gradients are wanted.
        whole: whether to gather all units before the loss begins, for losses that cannot continue without them.
        looks: whether to compare the values of whole units, too, for writes of the loss.
        reshard_last_units: whether to free the units that are whole at the end of the forward pass.
    """

    def __init__(
        self,
        layout: Layout,
        cache: ZeroCache,
        source: "Callable[[LazyParams], UnitSource]",
        reducer: Callable[[list[Tensor] | None, bool, int], Reducer],
        device: torch.device,
        *,
        trains: bool,
        whole: bool,
        looks: bool,
        reshard_last_units: bool,
    ) -> None:
        self.layout, self.device, self._cache = layout, device, cache
        self._trains, self._whole, self._reshard = trains, whole, reshard_last_units
        self.reducer: Reducer | None = None  # of the current backward pass
        self._make_reducer = reducer
        self._leaves = UnitLeaves()
        self._nested: dict[int, Tensor] = {}  # leaf -> its gradients of backward passes within the backward pass
        self._saved = SavedPlaces(layout, self._fetch, self._freeable)
        self._begun = self._settled = self._closed = False
        self._in_backward = False
        self._outside = False  # whether other code runs the backward pass
        self._suspects: dict[str, Tensor] = {}  # the lazy tensors that may have gone into a function then, by path
        wants_grads = trains and any(unit.trained_leaves for unit in layout.units)
        self._handle = watched(torch.zeros((), device=device).requires_grad_()) if wants_grads else None
        self._tokens: dict[int, Tensor] = {}  # of the units' nodes in the graph
        interrupted, cache.interrupted = cache.interrupted, None
        self._resumes = whole and interrupted is not None
        self.source: UnitSource = interrupted if self._resumes else source(self)
        looks = cache.forward.uses is None if self.source.frees else looks
        self._writes = WriteGuard(lambda place: layout.paths[place], sums=looks)
        last, cache.lazy = cache.lazy, None  # other views may open while this one is
        arguments = layout, device, trains, self.source.frees
        self._placeholders = last if last is not None and last.fit(*arguments) else LazyLeaves(*arguments)
        self._placeholders.values.point(self._leaves.whole, self._enter)
        self._lazy: list[LazyTensor] = self._placeholders.tensors

    def view(self) -> View:
        """The view of these params."""
        return View(
            tree.unflatten(self.layout.spec, self._lazy),
            self.pull,
            leaves=() if self._handle is None else (self._handle,),
            scope=self._scope,
            finish=self.finish,
            close=self.close,
            placeholders=self._placeholders.paths,
            owns=None if isinstance(self.source, WholeParams) else self._saved.owner,
            path_of=self.path_of,
        )

    def path_of(self, node: Any, output: int) -> str | None:
        """The path of the leaf that is this output of a node of the graph; None if it is none of these params'."""
        if getattr(node, "params", None) is not self or not output:
            return None
        path: str = self.layout.paths[self.layout.units[node.unit].trained_leaves[output - 1]]
        return path

    def forget(self, unit: int) -> None:
        """Releases the memory of a unit that the source has freed, except of leaves that are still referenced."""
        if self._cache.functional and not self._in_backward:
            return
        self._writes.check(unit)
        self._leaves.free(unit)

    def fetched(self, plan: FetchPlan, made: int) -> None:
        """Records the number of the pass's planned fetches so far."""
        if self.reducer is not None:
            self.reducer.fetched(plan, made)

    def take(self, unit: int, grads: Sequence[Tensor | None]) -> None:
        """Takes the gradients of a backward pass that ``pull`` does not run.

        During the loss they are ``.grad`` of the leaves. After it they are those of a ``loss.backward()``, which runs a unit's
        node once; later ones are of nested backward passes.
        """
        if self._outside and self.reducer is not None and not self.reducer.has(unit):
            self.completed(unit, grads)
        else:
            self.nested(unit, grads)

    def nested(self, unit: int, grads: Sequence[Tensor | None]) -> None:
        """Takes the gradients of a backward pass within the loss, or within a recomputation."""
        for leaf, grad in zip(self.layout.units[unit].trained_leaves, grads, strict=True):
            if grad is not None:
                self._found(leaf, grad)

    def completed(self, unit: int, grads: Sequence[Tensor | None]) -> None:
        """Takes the gradients of the unit's backward node."""
        if self.reducer is not None:
            self.reducer.add(unit, grads, self.device)
        if self.source.frees and not self._saved.refers_to(unit):
            self.source.release(unit)

    # -- forward -------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begins the forward pass, once."""
        if self._begun:
            return
        self._begun = True
        if self._resumes:
            self.source.resume(self.forget, self.fetched)
        else:
            self.source.begin(self._cache.forward)
        if self._cache.functional and self.source.frees:
            for unit in range(len(self.layout.units)):
                self._enter(unit)

    @contextmanager
    def _scope(self) -> Iterator[None]:
        """Saved-tensor hooks for units that are freed. torch.func does not allow hooks."""
        self._begin()
        replaces = self._trains and self.source.frees and not self._cache.functional
        try:
            with saved_tensors_hooks(self._saved.pack, self._saved.unpack) if replaces else nullcontext():
                yield
        except RuntimeError as error:
            if replaces and "saved tensor hooks" in str(error):
                raise self._again() from error
            raise

    def _again(self) -> BaseException:
        """The error where a torch.func transform is between the loss and a unit: the loss runs again, with all units gathered.

        A gather inside a transform would become part of it; and forward-mode levels are per process, which simulated ranks
        share.
        """
        words = "the loss uses torch.func or forward_ad, which does not go with gathers and the saved-tensor hooks of zero(3)"
        if self._in_backward:
            return RuntimeError(
                f"{words} in what a backward pass recomputes; use zero(2), or leave the layer that uses it out of remat"
            )
        self._cache.functional, self._cache.interrupted = True, self.source
        words += " in a pipeline; use zero(2) there, or torch.autograd.grad(..., create_graph=True) instead of torch.func"
        return RuntimeError(words) if self._whole else NeedsWhole(words)

    def _enter(self, unit: int) -> dict[int, Tensor]:
        """Fetches a unit; its leaves, the trained ones behind a node. The loss's grad and inference modes do not matter."""
        if torch.is_inference_mode_enabled() or in_torch_func():
            with torch.inference_mode(False), outside_functorch() as transforms:
                if self.source.frees and transforms:
                    raise self._again()
                return self._entered(unit)
        return self._entered(unit)

    def _entered(self, unit: int) -> dict[int, Tensor]:
        if self.source.frees and in_dual_level():
            raise self._again()
        flats = self.source.fetch(unit)
        leaves: dict[int, Tensor] = {}
        trained = self.layout.units[unit].trained_leaves
        for place, (index, flat) in enumerate(zip(self.layout.units[unit].segments, flats, strict=True)):
            segment = self.layout.segments[index]
            if not isinstance(self.source, WholeParams):
                self._saved.add(unit, place, flat)
            fresh = segment.trainable and self._handle is not None
            with below_autograd() if fresh else _AS_IT_IS:  # a base would keep alive the memory that a trained leaf releases
                leaves.update(zip(segment.leaves, segment.views(flat if fresh else flat.detach()), strict=True))
        if trained and self._handle is not None:
            views = [leaves[leaf] for leaf in trained]
            leaves.update(zip(trained, self._leaves.filled(unit, views, self._node), strict=True))
        if not self._in_backward:
            self._writes.note(unit, leaves)
        self._leaves.whole[unit] = leaves
        return leaves

    def _node(self, unit: int, views: Sequence[Tensor]) -> list[Tensor]:
        """The outputs of a new node of the unit: the trained leaves in ``views``."""
        with _AS_IT_IS if torch.is_grad_enabled() else torch.enable_grad():
            token, *outputs = _apply_node(self, unit, tuple(views), self._handle, self._in_backward)
        if not self._in_backward:
            self._tokens[unit] = token
        return outputs

    def finish(self) -> None:
        """Ends the forward pass, once."""
        if self._in_backward or self._closed:
            return
        self._begin()
        if self._trains:
            for unit in range(len(self.layout.units)):
                if self.layout.units[unit].trained_leaves and unit not in self._tokens:  # other ranks may have used them
                    self._node(unit, ())
        self._writes.check_all()
        self._set_grads_aside()
        if self._placeholders.values.bypassed:
            leaves = zip(self.layout.paths, self._lazy, strict=True)
            self._suspects = {path: leaf for path, leaf in leaves if leaf.requires_grad}
        self._leaves.clear()
        self._saved.clear()
        self.source.finish(reshard=self._reshard or not self._trains)
        self._in_backward = self._trains

    def _set_grads_aside(self) -> dict[int, Tensor]:
        """Removes what was assigned to the leaves' ``grad``: within the loss it is no part of the gradients."""
        with disable_torch_function_subclass():
            grads = {place: leaf.grad for place, leaf in enumerate(self._lazy) if leaf.grad is not None}
            for place in grads:
                self._lazy[place].grad = None
        return grads

    def close(self) -> None:
        """Drops all references. The graph's nodes refer to this object: a cycle, which would keep memory alive for a while."""
        if self._closed:
            return
        self._placeholders.values.point({}, closed)
        if self._settled and not recorder().records and not self._placeholders.marked:
            self._cache.lazy = self._placeholders
        del self._placeholders  # what weak tables hold ends with them
        for held in (self._leaves, self._saved, self._nested, self._tokens, self._suspects):
            held.clear()
        self._lazy, self._handle, self.reducer, self._closed = [], None, None, True
        self._make_reducer = _closed  # the step's state is behind the one that it had
        self.source = WholeParams(self.layout, ())

    # -- backward ------------------------------------------------------------------------------------------------------

    def pull(
        self,
        outputs: Outputs | None,
        carry: list[Tensor] | None,
        last: bool,
        *,
        retain_graph: bool = False,
        passes: int = 0,
    ) -> Pulling:
        """The backward pass (VJP): autograd passes each unit's gradients to the reducer as soon as they are complete."""
        if passes:  # nothing was computed from these params
            self.source = WholeParams(self.layout, ())
        else:
            self.finish()
        self.reducer, self._outside = self._make_reducer(carry, last, passes), outputs is None
        self.source.begin(self._cache.backward)
        if outputs is not None:
            given = {self._placeholders.paths.get(id(output)): grad for output, grad in outputs}
            if None in given:
                leaves, tokens = [] if self._handle is None else [self._handle], [*self._tokens.values()]
                differentiate(outputs, leaves, self._suspects, tokens, retain_graph=retain_graph)
            else:
                for unit in reversed(range(len(self.layout.units))):
                    if trained := self.layout.units[unit].trained_leaves:
                        self.completed(unit, [given.get(self.layout.paths[leaf]) for leaf in trained])
        return Pulling(self._settle, self._drop)

    def _fetch(self, unit: int) -> Sequence[Tensor]:
        return self.source.fetch(unit)

    def _freeable(self, unit: int) -> None:
        if self._in_backward:
            self.source.release(unit)

    def _found(self, leaf: int, grad: Tensor) -> None:
        if self._in_backward:
            self._nested[leaf] = self._nested[leaf] + grad if leaf in self._nested else grad
            return
        with disable_torch_function_subclass():
            before = self._lazy[leaf].grad
            self._lazy[leaf].grad = grad if before is None else before + grad

    def _settle(self) -> Pulled:
        reducer = self.reducer
        if reducer is None:
            raise RuntimeError("the gradients of this view were taken already, or it is closed")
        for unit in range(len(self.layout.units)) if self._outside else ():  # it may not have reached all of them
            if self.layout.units[unit].trained_leaves and not reducer.has(unit):
                self.completed(unit, ())
        renew = self.source.finish(reshard=True, note=reducer.out_of_place)
        self._collect_nested(reducer)
        sums, self._outside, self.reducer = reducer.finish(renew=renew), False, None
        self._settled = True
        return Pulled(sums, reducer.unused())

    def _drop(self) -> None:
        self.source.finish(reshard=True)
        self.reducer, self._outside = None, False

    def _collect_nested(self, reducer: Reducer) -> None:
        """Passes on what nested backward passes left after their units were complete."""
        for index, grad in self._set_grads_aside().items():
            self._found(index, grad)
        for unit in range(len(self.layout.units)) if self._nested else ():
            nested = [self._nested.get(leaf) for leaf in self.layout.units[unit].trained_leaves]
            if any(grad is not None for grad in nested):
                reducer.add_nested(unit, nested, self.device)


def _closed(carry: list[Tensor] | None, last: bool, passes: int) -> Reducer:
    raise RuntimeError("this view of params is closed, so no gradients can come back through it")
