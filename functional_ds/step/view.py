"""``View``: the params as a loss sees them, and ``pull``, the transpose of what made them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import attrs
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.torch_private import gradients

from .graph_checks import bypassed

__all__ = [
    "NeedsWhole",
    "Outputs",
    "Pull",
    "Pulled",
    "Pulling",
    "View",
    "dense",
    "differentiate",
    "in_this_thread",
    "sum_of",
    "wide",
    "wide_dtype",
]

Outputs = Sequence[tuple[Tensor, Tensor | None]]  # what a backward pass begins at, with gradients; None for a loss's one


class NeedsWhole(BaseException):
    """A loss does what a view of params in shards cannot serve: it may run once more on a view with ``whole=True``.

    It is no ``Exception``, so that a loss that catches those does not catch it.
    """


class Pulled(NamedTuple):
    """Gradients of the stored leaves, those of earlier passes included, and the places of the leaves that got none now."""

    sums: list[Tensor]
    unused: Sequence[int]


@attrs.frozen(eq=False)
class Pulling:
    """A pull that has begun, whose reductions over the ranks may be under way.

    Attributes:
        wait: gives its result, once.
        drop: gives it up, on all ranks.
    """

    wait: Callable[[], Pulled]
    drop: Callable[[], None] = lambda: None


class Pull(Protocol):
    """The transpose of a view: from gradients of what was computed from its params to those of the stored leaves.

    Law 64: it is linear, ``<pull(c), dp> = <c, view'(dp)>``.
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
            outputs: tensors computed from the view's params, or these params, with their gradients; None where a
                ``loss.backward()`` of other code is about to run, whose gradients ``wait`` then takes.
            carry: the sums of earlier micro-batches, which are consumed.
            last: whether no further micro-batch follows.
            retain_graph: whether another backward pass will go through this graph.
            passes: how many passes are in ``carry``, where it is only to be reduced and ``outputs`` is empty.
        """
        ...


def _never(node: Any, output: int) -> str | None:
    return None


@attrs.frozen(eq=False, repr=False)
class View:
    """The params that a loss sees, and how gradients come back from them: ``params, pull = vjp(view, state)``.

    ```
    view = step.view(state, trains=True)
    with view.scope():
        loss = f(view.params)
    grads, unused = view.pull([(loss, None)], carry, last).wait()
    view.close()
    ```

    A transform that wraps the phase changes params by ``map``; autograd takes their gradients back.

    Attributes:
        params: a tree, of leaves or of placeholders that fetch them.
        pull: the transpose. It ends the forward pass first.
        leaves: what a backward pass differentiates by.
        scope: makes a context for each run of a function of ``params``: saved-tensor hooks, say.
        finish: ends the forward pass; collective where params are gathered. Again does nothing.
        close: lets go of everything, whatever happened.
        placeholders: the paths of tensors that only stand for a leaf, by id; what is fetched together is in a row.
        owns: the path of the leaf in whose memory a tensor lies; None where all memory stays for the whole pass.
        path_of: the path of the leaf that is an output of a node of the graph, where the view makes such nodes.
        guards: functions that look through a new graph, from what the backward pass begins at.
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

        >>> from functional_ds.step.plain_view import stored_view
        >>> view = stored_view({"w": torch.tensor([1.0, 2.0])}, trains=True).map(lambda params: {"w": params["w"] ** 2})
        >>> view.pull([(view.params["w"].sum(), None)], None, True).wait()
        Pulled(sums=[tensor([2., 4.])], unused=[])
        """
        with torch.set_grad_enabled(bool(self.leaves)), self.scope():
            return attrs.evolve(self, params=function(self.params))


def in_this_thread() -> AbstractContextManager[None]:
    """Keeps backward passes in this thread, whose pass a recomputation looks for; on a GPU they have threads of their own."""
    return torch.autograd.grad_mode.set_multithreading_enabled(False)


def differentiate(
    outputs: Outputs, leaves: Sequence[Tensor], *, retain_graph: bool = False, suspects: Mapping[str, Tensor] | None = None
) -> list[Tensor | None]:
    """The gradients of outputs, weighed by theirs, by some leaves; None where there is none.

    Args:
        outputs: may be among the leaves.
        leaves: what to differentiate by.
        retain_graph: whether another backward pass will go through this graph.
        suspects: placeholders that may have gone into a function in place of their leaf, by path.

    Raises:
        RuntimeError: one has.
    """
    places = {id(leaf): place for place, leaf in enumerate(leaves)}
    grads: list[Tensor | None] = [None] * len(leaves)
    computed = [(x, grad) for x, grad in outputs if x.requires_grad and id(x) not in places]
    if computed and leaves:
        roots, seeds = [x for x, _ in computed], [None if grad is None else grad.to(x.dtype) for x, grad in computed]
        with in_this_thread():
            if suspects:
                ones = [torch.ones_like(root) if seed is None else seed for root, seed in zip(roots, seeds, strict=True)]
                every = gradients(roots, ones, [*leaves, *suspects.values()], retain_graph=retain_graph)
                for path, grad in zip(suspects, every[len(leaves) :], strict=True):
                    if grad is not None:
                        raise bypassed(path)
                grads = list(every[: len(leaves)])
            else:
                grads = list(torch.autograd.grad(roots, leaves, seeds, retain_graph=retain_graph, allow_unused=True))
    for x, grad in outputs:
        if id(x) in places:
            grads[places[id(x)]] = sum_of(grads[places[id(x)]], torch.ones_like(x) if grad is None else grad)
    return grads


def sum_of(one: Tensor | None, other: Tensor | None) -> Tensor | None:
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


def wide(grad: Tensor) -> Tensor:
    """A copy as something that sums of micro-batches may grow in."""
    return grad.to(wide_dtype(grad.dtype), copy=True, memory_format=torch.contiguous_format)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of micro-batches' gradients grow in: fp32 for half precision, else the same."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
