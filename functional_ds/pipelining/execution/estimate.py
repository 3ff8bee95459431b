"""``estimated``: what a model's stages take, from shapes alone."""

from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from functional_ds.base import tree
from functional_ds.base.marks import is_trainable
from functional_ds.base.prng import Key
from functional_ds.base.torch_private import FakeTensorMode, TorchDispatchMode
from functional_ds.base.weighted import weigh
from functional_ds.comm.algorithms.cost import Link
from functional_ds.pipelining.planning.costs import Costs
from functional_ds.pipelining.stages.stages import Stages

from .boundary import Boundary
from .in_flight import Flight
from .recorder import Saved

__all__ = ["Operations", "estimated"]


def estimated(stages: Stages, params: Any, batch: Any, *, flops: float = 1e12, link: Link | None = None) -> Costs:
    """Costs of the stages for a micro-batch like ``batch``, found on tensors without values.

    Law: ``activations`` is what a ``Recorder`` counts in a run, to the byte: distinct storages that autograd keeps of a
    forward, but for params and the batch.

    Args:
        params: the user's tree; meta tensors will do. Their dtypes, and the batch's, are those that are computed in.
        flops: floating-point operations a second. Only matrix products, convolutions and attention count as work.
        link: between neighbouring ranks; none shared, by default, and free.

    Raises:
        ValueError: a stage cannot take what the one before gives.

    >>> from functional_ds.pipelining import stages
    >>> layer = lambda p, x: torch.tanh(x @ p["w"])
    >>> params = [{"w": torch.empty(8, 8, device="meta")} for _ in range(2)]
    >>> model = stages([layer, layer], params, inputs=lambda x: x, loss=lambda y, x: y.sum())
    >>> costs = estimated(model, params, torch.empty(4, 8, device="meta"), flops=1.0)
    >>> costs.forward, costs.inputs, costs.weights, costs.message, costs.activations
    ((512.0, 512.0), (0.0, 512.0), (512.0, 512.0), (128.0, 128.0), (128.0, 256.0))
    """
    held = stages.by_path(params)
    stages.check(params, batch)
    found: list[_Found] = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        micro = tree.map(_blank, batch)
        for index in range(len(stages)):
            own = {path: _blank(held[path]).requires_grad_(is_trainable(held[path])) for path in stages[index].paths}
            found.append(_run(stages, index, own, found[-1].after if found else None, micro))
    sent = [0 if each.after is None else each.after.bytes for each in found]
    sent[-1] = sent[-2] if len(sent) > 1 else 0  # nothing is sent; a link between all stages has one size
    further = {} if link is None else {"link": link}
    return Costs(
        forward=[each.forward / flops for each in found],
        inputs=[each.inputs / flops for each in found],
        weights=[each.weights / flops for each in found],
        message=sent,
        activations=[each.activations for each in found],
        **further,
    )


@attrs.frozen
class _Found:
    """One stage: operations of F, I and W, bytes that are kept, and what it gives."""

    forward: int
    inputs: int
    weights: int
    activations: int
    after: Boundary | None


def _run(stages: Stages, index: int, own: dict[str, Tensor], before: Boundary | None, micro: Any) -> _Found:
    x, inputs = (None, []) if before is None else before.value([torch.empty_like(leaf) for leaf in before.onward])
    apart = [leaf for leaf in (*own.values(), *tree.leaves(micro)) if isinstance(leaf, Tensor)]
    with Saved(lambda: apart) as saved, Operations() as forward:
        y = stages.run(index, own, x, micro, Key.of(0))
    last = index == len(stages) - 1
    after = None if last else Boundary.of(y)
    outputs = [weigh(y[0] if isinstance(y, tuple) else y, "the loss").sum] if after is None else after.smooth(tree.leaves(y))
    outputs = [output for output in outputs if output.requires_grad]
    flight = Flight.of(inputs, outputs)
    with Operations() as back:
        flight.backward_inputs([torch.ones_like(output) for output in outputs], [w for w in own.values() if w.requires_grad])
    with Operations() as weights:
        flight.backward_weights()
    return _Found(forward.total, back.total, weights.total, saved.bytes, after)


class Operations(TorchDispatchMode):
    """Counts the floating-point operations of products inside, by torch's formulas; without torch's hooks on modules.

    >>> with Operations() as counter:
    ...     _ = torch.ones(2, 3) @ torch.ones(3, 5)
    >>> counter.total
    60
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=result)
        return result


def _blank(leaf: Any) -> Any:
    return torch.empty(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, Tensor) else leaf
