"""The view of a single-device step: the stored params themselves."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.marks import is_trainable
from functional_ds.base.torch_private import storage_id

from .graph_checks import WriteGuard, refuse_late_hooks, watched
from .view import Outputs, Pulled, Pulling, View, dense, differentiate, sum_of, wide


def stored_view(params: Any, *, trains: bool, looks: bool = False) -> View:
    """The stored params themselves; their gradients come from autograd.

    A custom function's backward may run nested backward passes, as reversible blocks do: what these leave in ``.grad`` is added
    to the gradients. What a ``backward()`` inside of the loss left there is not.

    Args:
        params: a tree of tensors.
        trains: whether gradients are wanted.
        looks: whether to compare the params' values, too, for writes of the loss.
    """
    leaves: list[Tensor] = []
    writes = WriteGuard(lambda place: tree.named(params)[place][0], sums=looks)

    def seen(leaf: Tensor) -> Tensor:
        if not (trains and is_trainable(leaf)):
            return leaf.detach()
        leaves.append(watched(leaf.detach().requires_grad_()))
        return leaves[-1]

    def finish() -> None:
        writes.check_all()
        for leaf in leaves:
            leaf.grad = None

    def pull(
        outputs: Outputs | None, carry: list[Tensor] | None, last: bool, *, retain_graph: bool = False, passes: int = 0
    ) -> Pulling:
        refuse_late_hooks(leaves)
        grads = differentiate(outputs or (), leaves, {}, (), retain_graph=retain_graph)

        def wait() -> Pulled:
            refuse_late_hooks(leaves)
            total = [grad if leaf.grad is None else sum_of(leaf.grad, grad) for leaf, grad in zip(leaves, grads, strict=True)]
            finish()
            unused = [place for place, grad in enumerate(total) if grad is None]
            return Pulled(_added(leaves, total, carry, last), unused)

        return Pulling(wait)

    view = tree.map(seen, params)
    writes.note(0, dict(enumerate(tree.leaves(view))))
    # ``close`` drops the leaves: the view is in a cycle, and their memory should not wait for garbage collection
    return View(view, pull, leaves, finish=finish, close=leaves.clear)


def _added(leaves: Sequence[Tensor], grads: Sequence[Tensor | None], carry: list[Tensor] | None, last: bool) -> list[Tensor]:
    """Gradients, zeros for None, added to ``carry``, or in new memory."""
    new = [torch.zeros_like(leaf) if grad is None else dense(grad) for grad, leaf in zip(grads, leaves, strict=True)]
    if carry is None:
        return _apart(new) if last else [wide(grad) for grad in new]
    return [total.add_(grad) for total, grad in zip(carry, new, strict=True)]


def _apart(grads: list[Tensor]) -> list[Tensor]:
    """Each gradient dense and in separate memory, because updates write into gradients.

    Autograd gives two leaves that are added one tensor, and a leaf that is summed an expanded scalar.
    """
    storages = [*map(storage_id, grads)]
    first = dict(zip(reversed(storages), reversed(range(len(grads))), strict=True))  # the place of the first gradient in each
    apart = [first[storage] == place and 0 not in grads[place].stride() for place, storage in enumerate(storages)]
    return [x if alone else x.clone(memory_format=torch.contiguous_format) for x, alone in zip(grads, apart, strict=True)]
