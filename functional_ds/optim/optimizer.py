"""The optimizer records: an ``init``/``update`` pair on lists of tensors, or a function from a ``LeafMap`` to one."""

import inspect
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.base.weighted import Weighted
from functional_ds.sharding.leaf_map import LeafMap

from .kernels import divided

Rate = float | Tensor
Hyper = float | Tensor
_OF_TORCH = {"AdamW", "Adam", "SGD", "Adagrad"}  # those with equivalents here, in lower case


@attrs.frozen
class Optimizer:
    """An optimizer as an ``init``/``update`` pair, in the style of optax, that does not depend on the boundaries of leaves.

    Attributes:
        init: from the trained tensors to the optimizer's state.
        update: ``(params, grads, state, rate) -> (params, state)``; may modify its arguments in place. The gradients are a
            ``Weighted`` list: the mean gradient is ``grads.sum / grads.weight``. ``rate`` multiplies the learning rate.
        name: for printing.
        skips: whether ``update`` does nothing if ``grads.skip`` is true. Otherwise the library copies params and state before
            each update that may be skipped.
        elementwise: whether the update of an element depends on its own gradients only. If unknown (None), the optimizer is
            tested on an example before it gets tensors that ZeRO has flattened or sharded, and raises an error if it is found
            not to be elementwise. ``True`` disables the test.
        skips_unused: whether ``update`` skips the leaves in ``grads.unused``. Otherwise the library calls it with views of the
            other leaves, and its state must consist of lists like the params, constants and counts of updates.
        formula: ``update`` out of place, for ``fds.differentiable``. Without it, ``update`` is called there with copies, and
            must consist of differentiable operations.
        tensors: the names of hyperparameters that are tensors and that only ``formula`` supports.

    >>> import torch, functional_ds as fds
    >>> def update(params, grads, state, rate):  # the sign of the gradient, with a learning rate of 0.5
    ...     return [p - 0.5 * rate * g.sign() for p, g in zip(params, grads.sum)], state
    >>> sign_sgd = Optimizer(lambda params: (), update, "sign_sgd", elementwise=True)
    >>> step = fds.train_step(lambda params, x: (params["w"] * x).sum(), sign_sgd)
    >>> state, _ = step(step.init({"w": torch.zeros(2)}), torch.tensor([3.0, -4.0]))
    >>> step.params(state)["w"].tolist()
    [-0.5, 0.5]
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
    """An optimizer that depends on which elements belong to which parameter, such as LAMB.

    Attributes:
        make: from a ``LeafMap`` to the optimizer for tensors with this layout of leaves.
        name: for printing.
        formula: like ``make``, for an out-of-place optimizer, for ``fds.differentiable``.

    >>> import torch, functional_ds as fds
    >>> def make(leaf_map):
    ...     print([leaf.path for leaf in leaf_map.leaves])
    ...     return fds.sgd(0.1)
    >>> step = fds.train_step(lambda params, x: (params["w"] * x).sum(), PerParameter(make, "my_sgd"))
    >>> _ = step.init({"b": torch.zeros(1), "w": torch.zeros(2)})
    ['b', 'w']
    """

    make: Callable[[LeafMap], Optimizer]
    name: str = "optimizer"
    formula: Callable[[LeafMap], Optimizer] | None = None

    def __repr__(self) -> str:
        return self.name


def as_optimizer(rule: Any) -> Optimizer | PerParameter:
    """Adapts an optax-style optimizer (``init(params)``, ``update(grads, state, params=...)``); others are returned unchanged.

    The updates that it returns are added to the params, scaled by ``rate``; this equals scaling the learning rate if the update
    is linear in it, as in optax and TorchOpt. Under ZeRO it gets flat tensors of many leaves, in stages 1 to 3 shards of them,
    so only elementwise optimizers are correct there; the test of ``Optimizer.elementwise`` detects many others. Clip with
    ``T.clip``, and write optimizers that need leaves as ``PerParameter``.

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
