"""One forward pass and its backward: what must stay in place until both are over."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from functional_ds.base.torch_private import at_backward_end, gradients, graph_number, has_late_hooks, storage_id

from .buffers import BufferScope

__all__ = ["PassAgain", "Tape", "current_tape", "in_this_thread", "inspect_graph"]


class PassAgain(BaseException):
    """A forward pass failed on what its view can do without: the loss, which is pure, may run once more.

    It is no ``Exception``, so that a loss that catches those does not catch it.

    Attributes:
        left: what the view goes on with then.
    """

    def __init__(self, words: str, left: Any) -> None:
        super().__init__(words)
        self.left = left


def inspect_graph(roots: Sequence[Tensor], placeholders: Mapping[int, str]) -> None:
    """Refuses graphs that lose gradients.

    Three things go past what a tape can see: reentrant checkpoints, whose inside is not part of the graph; functions that
    take a placeholder of a parameter as if it were the parameter; and parameters that are no params of the step.

    Args:
        roots: what the backward pass begins at.
        placeholders: paths of the tensors that stand for a parameter, by id.

    Raises:
        RuntimeError: with what would do.
    """
    todo = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if node.name() == "CheckpointFunctionBackward":
            raise RuntimeError(
                "torch.utils.checkpoint with use_reentrant=True gives no gradients to what it recomputes here; "
                "pass use_reentrant=False"
            )
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in placeholders:
            raise _bypassed(placeholders[id(variable)])
        if isinstance(variable, nn.Parameter) and variable.requires_grad and not hasattr(variable, _WATCHED):
            raise RuntimeError(
                f"the loss uses a parameter of shape {list(variable.shape)} that is none of the step's params, so it would not "
                "be trained: with apply, params = fds.functional(module), call apply(params, ...) in the loss instead of the "
                "module; put further parameters into params, and run what is not trained under torch.no_grad()"
            )
        following = dict.fromkeys(
            each for each, _ in node.next_functions if each is not None
        )  # in order, so errors do not vary
        todo.extend(each for each in following if each not in seen)
        seen.update(following)


def _bypassed(path: str) -> RuntimeError:
    return RuntimeError(
        f"the parameter {path!r} went straight into a custom autograd.Function, a compiled function or a transform of "
        "torch.func, where its gradient would be lost; pass p.view_as(p) instead of p"
    )


_WATCHED = "_fds_watched"  # on leaves of tapes: a loss may go through the functions of several steps
_HERE = threading.local()  # the tapes that this thread has open


def in_this_thread() -> AbstractContextManager[None]:
    """Keeps backward passes in this thread, whose tapes a recomputation looks for; on a GPU they have threads of their own."""
    return torch.autograd.grad_mode.set_multithreading_enabled(False)


def current_tape() -> "Tape | None":
    """The innermost open tape of this thread."""
    tapes = getattr(_HERE, "tapes", None)
    return tapes[-1] if tapes else None


class Tape:
    """The scope of a loss and its gradients.

    A ``view`` hands the tape what it needs: leaves to differentiate by (``watch``), contexts for the forward pass, work at
    its end, and work at the very end. Modules that were given a step's parameters keep them until the tape closes, because
    a recomputation inside the backward pass reads them again.

    Attributes:
        records: whether gradients are wanted; evaluation opens a tape that does not record.
        carry: gradients so far, in earlier micro-batches; consumed by the backward pass.
        last: whether this is the last micro-batch of the optimizer step. Both may be set until the backward pass begins.
        flushes: how many micro-batches have left the sums in ``carry``, where these are reduced without a further loss; else 0.
        loss: the loss, where it was computed already; else the function of the step computes it.
        roots: further tensors to begin the backward pass at, with gradient zero, so that their nodes run in any case.
        placeholders: paths of the tensors that only stand for a parameter, by id; what is fetched together is in a row.
        suspects: those that may have gone past the tape, as far as the view can tell.
        inspects: whether a graph of this kind is to be looked through for what would lose gradients.
        inspectors: functions of the roots that look through such a graph, too.
        path_of: the path of the leaf that is an output of a node of the graph, where the view makes such nodes.
        repeats: whether the pass runs again after a ``PassAgain``.
        left: what such a pass has left.
        claims: functions that know a param, or a view of one, whose memory comes and goes.
        calls: who runs modules inside of a module, the outermost last.
        slots: what transforms keep for this pass, by name.
        buffers: what modules hold beside parameters in this pass; None where nothing that they write is to be kept.
        modules: the copies of modules that this pass uses.
        forward_ended: whether the forward pass is over.
        in_backward: whether a backward pass has begun, whose gradients were not collected yet.
    """

    def __init__(
        self,
        *,
        records: bool = True,
        carry: list[Tensor] | None = None,
        last: bool = True,
        inspects: Callable[[Any], bool] = lambda kind: False,
        repeats: bool = False,
        left: Any = None,
        buffers: BufferScope | None = None,
        flushes: int = 0,
    ) -> None:
        self.records = records
        self.carry = carry
        self.last = last
        self.flushes = flushes
        self.loss: Any = None
        self.roots: list[Tensor] = []
        self.placeholders: dict[int, str] = {}
        self.suspects: list[Tensor] = []
        self.repeats = repeats
        self.left = left
        self.claims: list[Callable[[Tensor], bool]] = []
        self.calls: tuple[Any, ...] = ()
        self.slots: dict[str, Any] = {}
        self.buffers = buffers
        self.modules: dict[Any, list[Any]] = {}
        self.inspects = inspects
        self.inspectors: list[Callable[[Sequence[Tensor]], None]] = []
        self.path_of: Callable[[Any, int], str | None] = lambda node, output: None
        self._leaves: list[Tensor] = []
        self._collect: Callable[[list[Tensor | None]], list[Tensor]] = self._add
        self._unused: Callable[[], list[int]] | None = None
        self._without: list[int] = []  # the watched leaves that got no gradient
        self._push: Callable[[Mapping[str, Tensor]], None] | None = None
        self._pushed: list[Tensor | None] | None = None
        self._forward = ExitStack()  # the contexts in force
        self._contexts: list[Callable[[], AbstractContextManager[Any]]] = []
        self._at_forward_end: list[Callable[[], None]] = []
        self.forward_ended = False
        self._at_backward: list[Callable[[], None]] = []
        self.in_backward = False
        self._seeds_roots = False  # whether ``backward`` runs, not one that somebody else has begun
        self._drop: Callable[[], None] = lambda: None
        self._whole = ExitStack()

    def __repr__(self) -> str:
        return f"Tape({len(self._leaves)} leaves, records={self.records}, last={self.last})"

    def __enter__(self) -> "Tape":
        _HERE.__dict__.setdefault("tapes", []).append(self)
        self._forward.enter_context(torch.set_grad_enabled(self.records))
        self._first_node = graph_number(torch.zeros((), requires_grad=True).view(())) if self.records else 0
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self.end_forward()
            else:
                self._at_forward_end.clear()
                self._forward.pop_all().__exit__(kind, error, trace)
        finally:
            while self in _HERE.tapes:
                _HERE.tapes.remove(self)
            self._whole.close()
            self._leaves = []  # the tape is in a cycle, and the params' memory should not wait for the garbage collector

    @property
    def trains(self) -> bool:
        """Whether there is a leaf to differentiate by."""
        return bool(self._leaves)

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Inside, this open tape is the current one again: passes that several tapes record take turns."""
        _HERE.__dict__.setdefault("tapes", []).append(self)
        try:
            yield
        finally:
            _HERE.tapes.pop()

    def step_aside(self) -> None:
        """Ends the forward pass and makes way for the tape before: this one stays open, but is not the current one."""
        self.end_forward()
        _HERE.tapes.remove(self)

    def pause(self) -> None:
        """Makes way for the tape before, and leaves the contexts of the forward pass, which ``running`` goes on with."""
        self._forward.close()
        _HERE.tapes.remove(self)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, the forward pass of a tape that was paused goes on."""
        with ExitStack() as stack, self.resumed():
            stack.enter_context(torch.set_grad_enabled(self.records))
            for context in self._contexts:
                stack.enter_context(context())
            yield

    # -- for views -----------------------------------------------------------------------------------------------------

    def watch(self, tensor: Tensor) -> Tensor:
        """A leaf to differentiate by; the gradients come in the order of these calls."""
        if not self.records:
            return tensor.detach()
        leaf = tensor.detach().requires_grad_()
        setattr(leaf, _WATCHED, True)
        self._leaves.append(leaf)
        return leaf

    def during_forward(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        """Enters a context that ends with the forward pass, and a new one wherever that goes on after a pause."""
        self._contexts.append(context)
        self._forward.enter_context(context())

    def at_forward_end(self, work: Callable[[], None]) -> None:
        """Does ``work`` between the forward pass and the backward, unless the forward pass failed; the latest comes first."""
        self._at_forward_end.append(work)

    def at_backward(self, work: Callable[[], None]) -> None:
        """Does ``work`` whenever a backward pass begins."""
        self._at_backward.append(work)

    def at_end(self, work: Callable[[], None]) -> None:
        """Does ``work`` when the tape closes, whatever happened."""
        self._whole.callback(work)

    def collect_with(
        self,
        collect: Callable[[list[Tensor | None]], list[Tensor]],
        unused: Callable[[], list[int]] | None = None,
        drop: Callable[[], None] = lambda: None,
    ) -> None:
        """Says how the leaves' gradients of this pass become those of the step so far, ``carry`` included.

        Args:
            collect: from the watched leaves' gradients, None where there is none, to those of the step.
            unused: the places of the trained leaves that got none in this pass, if the watched leaves are not those.
            drop: is called instead of ``collect`` where a backward pass is given up.
        """
        self._collect, self._unused, self._drop = collect, unused, drop

    def push_with(self, push: Callable[[Mapping[str, Tensor]], None]) -> None:
        """Says how the gradients of what the view gave, by path, are taken; else autograd takes them back to the leaves."""
        self._push = push

    # -- for gradients -------------------------------------------------------------------------------------------------

    def end_forward(self) -> None:
        """Ends the forward pass; again does nothing."""
        if self.forward_ended and not self._at_forward_end:
            return
        self._forward.close()
        work, self._at_forward_end = self._at_forward_end, []
        with torch.set_grad_enabled(self.records):
            for each in reversed(work):
                each()
        if not self.forward_ended:
            self.forward_ended = True
            for leaf in self._leaves:
                leaf.grad = None

    def begin_backward(self) -> None:
        """Ends the forward pass and begins a backward pass; again does nothing, until that is over."""
        self.end_forward()
        if not self.in_backward:
            self.in_backward = True
            for each in self._at_backward:
                each()

    def enter_backward(self) -> None:
        """Begins a backward pass within one that somebody else has begun; until that ends, this tape is the current one."""
        with self.resumed():
            self.begin_backward()
        tapes = _HERE.tapes
        tapes.append(self)

        def leave() -> None:
            if self in tapes:
                tapes.remove(self)

        at_backward_end(leave)

    @property
    def differentiates(self) -> bool:
        """Whether ``backward`` runs, and not a backward pass that somebody else has begun."""
        return self._seeds_roots

    def drop_backward(self) -> None:
        """Gives up a backward pass that has begun, on all ranks."""
        if self.in_backward:
            self.in_backward = False
            self._drop()

    def backward(self, loss: Tensor | None, *, retain_graph: bool = False) -> list[Tensor]:
        """The gradients of ``loss`` by the watched leaves, plus ``carry``; a leaf that the loss does not use gets zeros.

        A custom function's backward may run backward passes of its own, as reversible blocks do: what these leave in ``.grad``
        belongs to the gradients. What a ``backward()`` inside of the loss left there does not.

        Args:
            loss: None where a tape flushes.
            retain_graph: whether another backward pass will go through this graph.
        """
        self.begin_backward()
        roots = [root for root in (loss, *self.roots) if root is not None and root.requires_grad]
        self._refuse_hooks()
        if roots and self.inspects(max(map(graph_number, roots)) - self._first_node):
            inspect_graph(roots, self.placeholders)
            for inspect in self.inspectors:
                inspect(roots)
        grads: list[Tensor | None] = [None] * len(self._leaves)
        if roots and self._leaves:
            zeros = {(root.shape, root.dtype, root.device): root for root in roots}  # units' tokens are alike, and have one
            zeros = {kind: torch.zeros_like(root) for kind, root in zeros.items()}
            seeds = [None if root is loss else zeros[root.shape, root.dtype, root.device] for root in roots]
            self._seeds_roots = True
            with in_this_thread():
                grads = self._differentiate(roots, seeds, retain_graph)
        return self._collected(grads)

    def collect_backward(self) -> list[Tensor]:
        """The gradients that a ``loss.backward()`` has left, as ``backward`` would return them."""
        self._refuse_hooks()
        return self._collected([None] * len(self._leaves))

    def _collected(self, grads: list[Tensor | None]) -> list[Tensor]:
        total = [_sum(leaf.grad, grad) for leaf, grad in zip(self._leaves, grads, strict=True)]
        for leaf in self._leaves:
            leaf.grad = None
        found = self._collect(total)
        self.in_backward = self._seeds_roots = False
        return found

    def inspect_again(self, loss: Tensor) -> None:
        """Looks through the graph if no other has left the same leaves without a gradient, which may be lost ones."""
        if loss.requires_grad and self.inspects(tuple(self.unused())):
            inspect_graph([loss, *self.roots], self.placeholders)

    def _refuse_hooks(self) -> None:
        for leaf in self._leaves:
            if has_late_hooks(leaf):
                raise RuntimeError(
                    f"the loss registered a hook on a parameter of shape {list(leaf.shape)} by "
                    "register_post_accumulate_grad_hook, which would never run, because gradients are not accumulated in "
                    ".grad; use register_hook"
                )

    def _differentiate(self, roots: list[Tensor], seeds: list[Tensor | None], retain_graph: bool) -> list[Tensor | None]:
        if not self.suspects:
            return list(torch.autograd.grad(roots, self._leaves, seeds, retain_graph=retain_graph, allow_unused=True))
        ones = [torch.ones_like(root) if seed is None else seed for root, seed in zip(roots, seeds, strict=True)]
        grads = gradients(roots, ones, [*self._leaves, *self.suspects], retain_graph=retain_graph)
        for suspect, grad in zip(self.suspects, grads[len(self._leaves) :], strict=True):
            if grad is not None:
                raise _bypassed(self.placeholders[id(suspect)])
        return list(grads[: len(self._leaves)])

    def unused(self) -> list[int]:
        """The places of the trained leaves that got no gradient in this pass, in the order of ``Step.leaf_map``."""
        return self._without if self._unused is None else self._unused()

    def takes(self, given: Mapping[str, Tensor]) -> bool:
        """Whether ``push_with``'s function takes the gradients of what a view gave: nothing was computed from its own."""
        return self._push is not None and all(
            type(leaf) is not Tensor and self.placeholders.get(id(leaf)) == path for path, leaf in given.items()
        )

    def push(self, seen: Mapping[str, Tensor], grads: Mapping[str, Tensor], *, through: bool) -> None:
        """Takes the gradients of what the loss has ``seen`` of the view, once: the transpose of the view begins.

        Reductions that it starts go on meanwhile; ``collect`` waits for them.

        Args:
            seen: what the view gave, by path.
            grads: by path.
            through: whether autograd takes them back to the leaves, whatever ``push_with`` was told.
        """
        self.begin_backward()
        if self._push is not None and not through:
            self._push(grads)
            self._pushed = [None] * len(self._leaves)
            return
        places = {id(leaf): place for place, leaf in enumerate(self._leaves)}
        pairs = [(seen[path], grad) for path, grad in grads.items() if seen[path].requires_grad]
        roots = [root for root in self.roots if root.requires_grad]
        computed = [(output, grad) for output, grad in pairs if id(output) not in places]
        self._pushed = [None] * len(self._leaves)
        if (computed or roots) and self._leaves:
            outputs = [*(output for output, _ in computed), *roots]
            seeds = [*(grad.to(output.dtype) for output, grad in computed), *map(torch.zeros_like, roots)]
            with in_this_thread():
                self._pushed = list(torch.autograd.grad(outputs, self._leaves, seeds, allow_unused=True))
        for output, grad in pairs:
            if id(output) in places:  # the view gives the leaf itself
                place = places[id(output)]
                before = self._pushed[place]
                self._pushed[place] = grad if before is None else before + grad

    def collect(self) -> list[Tensor]:
        """The gradients by the watched leaves of what was pushed, plus ``carry``; nothing pushed are zeros."""
        self.begin_backward()
        pushed, self._pushed = self._pushed, None
        self.in_backward = False
        return self._collect([None] * len(self._leaves) if pushed is None else pushed)

    def _add(self, grads: list[Tensor | None]) -> list[Tensor]:
        self._without = [place for place, grad in enumerate(grads) if grad is None]
        found = [
            torch.zeros_like(leaf) if grad is None else dense(grad) for grad, leaf in zip(grads, self._leaves, strict=True)
        ]
        if self.carry is None:
            return _apart(found) if self.last else [wide(grad) for grad in found]
        return [total.add_(grad) for total, grad in zip(self.carry, found, strict=True)]


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one if other is None else one + other


def dense(grad: Tensor) -> Tensor:
    """A gradient, which must not be sparse.

    Raises:
        ValueError: it is.
    """
    if grad.layout != torch.strided:
        raise ValueError(
            f"the gradient of a leaf of shape {list(grad.shape)} is sparse, and updates are dense: build the embedding with "
            "sparse=False"
        )
    return grad


def _apart(grads: list[Tensor]) -> list[Tensor]:
    """Each dense and in memory of its own, because updates write into gradients.

    Autograd gives two leaves that are added one tensor, and one that is summed an expanded scalar.
    """
    known: set[int] = set()
    found = []
    for grad in grads:
        apart, place = grad, storage_id(grad)
        if place in known or 0 in grad.stride():
            apart = grad.clone(memory_format=torch.contiguous_format)
            place = storage_id(apart)
        found.append(apart)
        known.add(place)
    return found


def wide(grad: Tensor) -> Tensor:
    """A copy as something that sums of micro-batches may grow in."""
    return grad.to(wide_dtype(grad.dtype), copy=True, memory_format=torch.contiguous_format)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of micro-batches' gradients grow in: fp32 for half precision, else the same."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
