"""What an optimizer is: a pure pair over lists of tensors, or a function from a ``LeafMap`` to such a pair."""

import inspect
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.base.weighted import Weighted
from functional_ds.sharding.leaf_map import LeafMap

from .kernels import divided

__all__ = ["Hyper", "Optimizer", "PerParameter", "Rate", "as_optimizer"]

Rate = float | Tensor
Hyper = float | Tensor
_OF_TORCH = {"AdamW", "Adam", "SGD", "Adagrad"}  # that are here by their names in small letters


@attrs.frozen
class Optimizer:
    """An ``init``/``update`` pair that need not know which leaf an element belongs to.

    Attributes:
        init: from the trained tensors to the optimizer's state.
        update: ``(params, grads, state, rate) -> (params, state)``. It owns its arguments and may write into them. The
            gradients are a ``Weighted`` list: the mean gradient is ``grads.sum / grads.weight``. ``rate`` multiplies the
            learning rate.
        name: for printing.
        skips: whether ``update`` itself leaves everything as it is where ``grads.skip`` is true. For an optimizer that does
            not, the library copies params and state before each update that may be skipped.
        elementwise: whether each element moves as its own gradients say, whatever the other elements' are. Where this is
            unknown (None), a small example is tried before the optimizer first gets tensors that ZeRO has flattened or cut,
            and an optimizer that moves the example's pieces otherwise than the whole is refused. ``True`` turns the trial off.
        skips_unused: whether ``update`` itself leaves alone the leaves that ``grads.unused`` names. For an optimizer that does
            not, the library calls it with views of the other leaves. Its state must then consist of lists like that of the
            params and of numbers that stay or count updates.
        formula: ``update`` in new tensors, for ``fds.differentiable``. An optimizer without one gets copies there, so its
            ``update`` must consist of operations of torch that have derivatives.
        tensors: the names of hyperparameters that are tensors, which ``formula`` alone can use.
    """

    init: Callable[[list[Tensor]], Any]
    update: Callable[[list[Tensor], Weighted, Any, Rate], tuple[list[Tensor], Any]]
    name: str = "optimizer"
    skips: bool = False
    elementwise: bool | None = None
    skips_unused: bool = False
    formula: Callable[[list[Tensor], Weighted, Any, Rate], tuple[list[Tensor], Any]] | None = None
    tensors: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return self.name


@attrs.frozen
class PerParameter:
    """An optimizer that must know which elements belong to which parameter.

    Attributes:
        make: from a ``LeafMap`` to the optimizer for tensors in which the leaves lie as it says.
        name: for printing.
        formula: as ``make``, to an optimizer that updates in new tensors, for ``fds.differentiable``.
    """

    make: Callable[[LeafMap], Optimizer]
    name: str = "optimizer"
    formula: Callable[[LeafMap], Optimizer] | None = None

    def __repr__(self) -> str:
        return self.name


def as_optimizer(rule: Any) -> Optimizer | PerParameter:
    """An optimizer as it is; an optax-shaped pair (``init(params)``, ``update(grads, state, params=...)``) adapted.

    Such a pair returns additive updates. ``rate`` scales them, which for a learning rate that enters linearly (optax's and
    TorchOpt's do) is the same as scaling the learning rate. Under ZeRO it gets flat tensors with many leaves in each, and in
    stages 1 to 3 shards of those, so only elementwise pairs are correct there; others are refused as far as the trial of
    ``Optimizer.elementwise`` can tell. Clip with ``T.clip``, and write what needs leaves as a ``PerParameter``.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(rule, Optimizer | PerParameter):
        return rule
    if isinstance(rule, torch.optim.Optimizer) or (isinstance(rule, type) and issubclass(rule, torch.optim.Optimizer)):
        name = rule.__name__ if isinstance(rule, type) else type(rule).__name__
        same = f"fds.{name.lower()}(lr, ...)" if name in _OF_TORCH else "an optimizer of fds, or fds.Optimizer(init, update)"
        raise TypeError(f"optimizer=torch.optim.{name} changes parameters of its own in place; pass {same}")
    if not callable(getattr(rule, "init", None)) or not callable(getattr(rule, "update", None)):
        raise TypeError(f"optimizer={rule!r} is neither an fds optimizer nor an optax-shaped pair of init and update")
    keep = {"inplace": False} if "inplace" in inspect.signature(rule.update).parameters else {}

    def changes(params: list[Tensor], grads: Weighted, state: Any, rate: Rate) -> tuple[list[tuple[Tensor, Tensor]], Any]:
        updates, state = rule.update(divided(grads, params), state, params=params, **keep)
        return [(p, change * rate) for p, change in zip(params, updates, strict=True)], state

    def update(params: list[Tensor], grads: Weighted, state: Any, rate: Rate) -> tuple[list[Tensor], Any]:
        pairs, state = changes(params, grads, state, rate)
        return [p.add_(change) for p, change in pairs], state

    def formula(params: list[Tensor], grads: Weighted, state: Any, rate: Rate) -> tuple[list[Tensor], Any]:
        pairs, state = changes(params, grads, state, rate)
        return [p + change.to(p.dtype) for p, change in pairs], state

    return Optimizer(rule.init, update, f"{type(rule).__name__}(...)", formula=formula)
