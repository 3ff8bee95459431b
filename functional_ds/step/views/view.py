"""``View``: the params as a loss sees them, and ``pull``, the backward pass (VJP) to the stored leaves."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import attrs
import torch
from torch import Tensor
from torch.overrides import has_torch_function

from functional_ds.base import tree
from functional_ds.base.torch_private import gradients

from .graph_checks import bypassed

Outputs = Sequence[tuple[Tensor, Tensor | None]]  # where a backward pass begins, with gradients; None means one, for a loss


class NeedsWhole(BaseException):
    """Raised if a loss needs whole params and the view has shards: the loss may run again on a view with ``whole=True``.

    It is not an ``Exception``, so that a loss that catches those does not catch it.
    """


class Pulled(NamedTuple):
    """Gradients of the stored leaves, with those of earlier passes, and the places of the leaves without one in this pass."""

    sums: list[Tensor]
    unused: Sequence[int]


@attrs.frozen(eq=False)
class Pulling:
    """A pull whose reductions over the ranks may still be running.

    Attributes:
        wait: returns its result, once.
        drop: abandons it, on all ranks.
    """

    wait: Callable[[], Pulled]
    drop: Callable[[], None] = lambda: None


class Pull(Protocol):
    """The transpose (VJP) of a view: from gradients of what was computed from its params to those of the stored leaves.

    It is linear, ``<pull(c), dp> = <c, view'(dp)>``.
    """

    def __call__(
        self,
        outputs: Outputs | None,
        carry: list[Tensor] | None,
        last: bool,
        *,
        retain_graph: bool = False,
        passes: int = 0,
    ) -> Pulling:
        """Runs a backward pass.

        Args:
            outputs: tensors computed from the view's params, or these params, with their gradients; None if other code is about
                to run ``loss.backward()``, whose gradients ``wait`` then takes.
            carry: the sums of earlier micro-batches, which are consumed.
            last: whether no further micro-batch follows.
            retain_graph: whether another backward pass will use this graph.
            passes: how many passes are in ``carry``, if it is only to be reduced and ``outputs`` is empty.
        """
        ...


def _never(node: Any, output: int) -> str | None:
    return None


@attrs.frozen(eq=False, repr=False)
class View:
    """The params that a loss sees, and how gradients flow back from them: ``params, pull = vjp(view, state)``.

    ```
    view = step.view(state, trains=True)
    with view.scope():
        loss = f(view.params)
    grads, unused = view.pull([(loss, None)], carry, last).wait()
    view.close()
    ```

    A transform that wraps the phase changes params by ``map``; autograd differentiates it.

    Attributes:
        params: a tree of tensors, or of lazy tensors that fetch them.
        pull: the transpose. It ends the forward pass first.
        leaves: what a backward pass differentiates by.
        scope: makes a context for each run of a function of ``params``, with saved-tensor hooks for example.
        finish: ends the forward pass, once; collective if params are gathered.
        close: releases everything, also after an error.
        placeholders: the paths of tensors that stand for a leaf, by id; those fetched together are adjacent.
        owns: the path of the leaf whose memory holds a tensor; None if all memory is the state's.
        path_of: the path of the leaf that is an output of a node of the graph, if the view makes such nodes.
        guards: functions that inspect a new graph, from where the backward pass begins.
    """

    params: Any
    pull: Pull
    leaves: Sequence[Tensor] = ()
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    finish: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None
    placeholders: Mapping[int, str] = attrs.field(factory=dict)
    owns: Callable[[Tensor], str | None] | None = None
    path_of: Callable[[Any, int], str | None] = _never
    guards: tuple[Callable[[Sequence[Tensor]], None], ...] = ()

    def __repr__(self) -> str:
        how = "placeholders" if self.placeholders else "stored"
        return f"View({len(tree.leaves(self.params))} params, {how}{', trains' if self.leaves else ''})"

    def map(self, function: Callable[[Any], Any]) -> "View":
        """The view of ``function(params)``, through which gradients flow back.

        >>> from functional_ds.step.views.plain_view import stored_view
        >>> view = stored_view({"w": torch.tensor([1.0, 2.0])}, trains=True).map(lambda params: {"w": params["w"] ** 2})
        >>> view.pull([(view.params["w"].sum(), None)], None, True).wait()
        Pulled(sums=[tensor([2., 4.])], unused=[])
        """
        with torch.set_grad_enabled(bool(self.leaves)), self.scope():
            return attrs.evolve(self, params=function(self.params))


def in_this_thread() -> AbstractContextManager[None]:
    """Keeps backward passes in this thread, so that recomputation finds its pass; on a GPU they have their own threads."""
    return torch.autograd.grad_mode.set_multithreading_enabled(False)


def differentiate(
    outputs: Outputs, leaves: Sequence[Tensor], suspects: Mapping[str, Tensor], tokens: Sequence[Tensor], *, retain_graph: bool
) -> list[Tensor | None]:
    """The gradients of outputs, weighted by theirs, by some leaves; None for unused leaves.

    Args:
        outputs: may be among the leaves.
        leaves: what to differentiate by.
        suspects: placeholders that a function may have used instead of their leaf, by path.
        tokens: scalars of one dtype that the backward pass begins at, too, with gradients of zero.
        retain_graph: whether another backward pass will use this graph.

    Raises:
        RuntimeError: a function has used one.
    """
    places = {id(leaf): place for place, leaf in enumerate(leaves)}
    grads: list[Tensor | None] = [None] * len(leaves)
    computed = [(x, grad) for x, grad in outputs if x.requires_grad and id(x) not in places]
    if (computed or tokens) and leaves:
        roots, seeds = [x for x, _ in computed], [None if grad is None else grad.to(x.dtype) for x, grad in computed]
        zeros = [torch.zeros_like(token) for token in tokens[:1]] * len(tokens)
        with in_this_thread():
            if suspects or _is_plain(roots, seeds, leaves):
                ones = [torch.ones_like(root) if seed is None else seed for root, seed in zip(roots, seeds, strict=True)]
                every = gradients([*roots, *tokens], [*ones, *zeros], [*leaves, *suspects.values()], retain_graph=retain_graph)
                if used := [path for path, grad in zip(suspects, every[len(leaves) :], strict=True) if grad is not None]:
                    raise bypassed(used[0])
                grads = list(every[: len(leaves)])
            else:
                seeds, roots = [*seeds, *zeros], [*roots, *tokens]
                grads = list(torch.autograd.grad(roots, leaves, seeds, retain_graph=retain_graph, allow_unused=True))
    for x, grad in outputs:
        if id(x) in places:
            grads[places[id(x)]] = sum_of(grads[places[id(x)]], torch.ones_like(x) if grad is None else grad)
    return grads


def _is_plain(roots: Sequence[Tensor], seeds: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> bool:
    """Whether torch's checks of a backward pass find nothing: the first one imports sympy, which takes half a second."""
    if has_torch_function((*roots, *leaves)):
        return False
    pairs = zip(roots, seeds, strict=True)
    return all(
        not x.is_nested and (x.shape == seed.shape if seed is not None else x.numel() == 1 and x.is_floating_point())
        for x, seed in pairs
    )


def sum_of(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one if other is None else one + other


def dense(grad: Tensor) -> Tensor:
    """The gradient.

    Raises:
        ValueError: it is sparse.
    """
    if grad.layout != torch.strided:
        raise ValueError(
            f"the gradient of a leaf of shape {list(grad.shape)} is sparse, and updates are dense: build the embedding with "
            "sparse=False"
        )
    return grad


def wide(grad: Tensor) -> Tensor:
    """A copy in the dtype of sums over micro-batches."""
    return grad.to(wide_dtype(grad.dtype), copy=True, memory_format=torch.contiguous_format)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over micro-batches: fp32 for half precision, else the same."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
