"""``estimated``: what a model's stages take, from shapes alone."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from functional_ds import tree
from functional_ds.comm.cost import Link
from functional_ds.key import Key
from functional_ds.trainable import is_trainable
from functional_ds.weighted import weigh

from .boundary import Boundary
from .costs import Costs
from .flight import Flight
from .recorder import Saved
from .stages import Stages

__all__ = ["estimated"]


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
    held, rows = stages.by_path(params), []
    stages.check(params, batch)
    before: Boundary | None = None
    with FakeTensorMode(allow_non_fake_inputs=True):
        micro = tree.map(_blank, batch)
        for index in range(len(stages)):
            own = {path: _blank(held[path]).requires_grad_(is_trainable(held[path])) for path in stages[index].paths}
            x, inputs = (None, []) if before is None else before.value([_like(leaf) for leaf in before.onward])
            apart = [leaf for leaf in (*own.values(), *tree.leaves(micro)) if isinstance(leaf, Tensor)]
            with Saved(lambda apart=apart: apart) as saved, FlopCounterMode(display=False) as forward:  # type: ignore[misc]
                y = stages.run(index, own, x, micro, Key.of(0))
            last = index == len(stages) - 1
            outputs = [weigh(y[0] if isinstance(y, tuple) else y, "the loss").sum] if last else Boundary.of(y).smooth(tree.leaves(y))
            flight = Flight.of(inputs, [output for output in outputs if output.requires_grad])
            seeds = [torch.ones_like(output) for output in outputs if output.requires_grad]
            with FlopCounterMode(display=False) as back:
                flight.backward_inputs(seeds, [leaf for leaf in own.values() if leaf.requires_grad])
            with FlopCounterMode(display=False) as weights:
                flight.backward_weights()
            before = None if last else Boundary.of(y)
            sent = before.bytes if before is not None else 0
            works = [counter.get_total_flops() / flops for counter in (forward, back, weights)]
            rows.append((*works, float(sent), float(saved.bytes)))
    forward_, inputs_, weights_, messages, activations = zip(*rows, strict=True)
    messages = (*messages[:-1], messages[-2] if len(messages) > 1 else 0.0)
    further = {} if link is None else {"link": link}
    return Costs(
        forward=forward_, inputs=inputs_, weights=weights_, message=messages, activations=activations, **further
    )


def _blank(leaf: Any) -> Any:
    return torch.empty(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _like(leaf: Tensor) -> Tensor:
    return torch.empty(leaf.shape, dtype=leaf.dtype)
