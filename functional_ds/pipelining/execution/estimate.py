"""``estimated``: estimates the costs of a model's stages from shapes."""

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from functional_ds.base import tree
from functional_ds.base.containers import register_containers
from functional_ds.base.marks import is_trainable
from functional_ds.base.prng import Key
from functional_ds.base.torch_private import FakeTensorMode
from functional_ds.base.weighted import weigh
from functional_ds.comm.algorithms.cost import Link
from functional_ds.dry_run.events import FakeRecorder
from functional_ds.pipelining.planning.costs import Costs
from functional_ds.pipelining.stages.stages import Stages
from functional_ds.step.pass_scope import Pass

from .boundary import Boundary
from .recorder import SavedBytes
from .split_backward import InFlightMicroBatch


def estimated(stages: Stages, params: Any, batch: Any, *, flops: float = 1e12, link: Link | None = None) -> Costs:
    """Estimates the stages' costs for a micro-batch like ``batch``, on tensors without values.

    Law: ``activations`` is exactly what a ``Recorder`` counts in a run: the distinct storages that autograd saves in a forward,
    without params, the batch, and what outlives the backward (module buffers).

    Args:
        stages: the model's stages.
        params: the user's tree; meta tensors are enough. Stages compute in the dtypes of params and batch.
        batch: a micro-batch; its values are not used.
        flops: floating-point operations per second. Only matrix products, convolutions and attention count.
        link: between neighbouring ranks, not shared; by default messages take no time.

    Raises:
        ValueError: a stage does not accept the previous stage's output.

    >>> from functional_ds.pipelining import stages
    >>> layer = lambda p, x: torch.tanh(x @ p["w"])
    >>> params = [{"w": torch.empty(8, 8, device="meta")} for _ in range(2)]
    >>> model = stages([layer, layer], params, inputs=lambda x: x, loss=lambda y, x: y.sum())
    >>> costs = estimated(model, params, torch.empty(4, 8, device="meta"), flops=1.0)
    >>> costs.forward, costs.inputs, costs.weights, costs.message, costs.activations
    ((512.0, 512.0), (0.0, 512.0), (512.0, 512.0), (128.0, 128.0), (128.0, 256.0))
    >>> costs.shared  # what the first stage gives
    (0.0, 128.0)
    """
    register_containers(batch)
    held = stages.by_path(params)
    stages.check(params, batch)
    costs: list[_StageCost] = []
    with Pass(trains=False), FakeTensorMode(allow_non_fake_inputs=True), FakeRecorder() as run, torch.enable_grad():
        micro = tree.map(_empty, batch)
        for index in range(len(stages)):
            leaves = {path: _empty(held[path]).requires_grad_(is_trainable(held[path])) for path in stages[index].paths}
            costs.append(_run(stages, index, leaves, costs[-1] if costs else None, micro, run))
        gc.collect()  # a graph may be in a cycle
        activations = [cost.activations for cost in costs]
    sent = [0 if cost.after is None else cost.after.bytes for cost in costs]
    sent[-1] = sent[-2] if len(sent) > 1 else 0  # nothing is sent; a link between all stages has one size
    further = {} if link is None else {"link": link}
    return Costs(
        forward=[cost.forward / flops for cost in costs],
        inputs=[cost.inputs / flops for cost in costs],
        weights=[cost.weights / flops for cost in costs],
        message=sent,
        activations=activations,
        shared=[cost.shared for cost in costs],
        **further,
    )


@attrs.frozen
class _StageCost:
    """One stage's costs.

    Attributes:
        forward, inputs, weights: operations of F, I and W.
        saved: the bytes of each storage that its forward saves.
        shared: of these, the bytes of the previous stage's output, which has saved them too.
        after: what it sends to the next stage.
        keeps: for each tensor of that, whether its forward has saved it.
    """

    forward: int
    inputs: int
    weights: int
    saved: Mapping[StorageWeakRef, int]
    shared: int
    after: Boundary | None
    keeps: Sequence[bool]

    @property
    def activations(self) -> int:
        """The bytes that its forward saves and that are freed by the end; module buffers outlive the backward."""
        return sum(size for storage, size in self.saved.items() if storage.expired())


def _run(
    stages: Stages, index: int, leaves: dict[str, Tensor], before: _StageCost | None, micro: Any, run: FakeRecorder
) -> _StageCost:
    arrived = [] if before is None or before.after is None else [torch.empty_like(leaf) for leaf in before.after.onward]
    x, inputs = (None, []) if before is None or before.after is None else before.after.value(arrived)
    apart = [leaf for leaf in (*leaves.values(), *tree.leaves(micro)) if isinstance(leaf, Tensor)]
    begun = run.events.flops
    with SavedBytes(lambda: apart) as saved:
        y = stages.run(index, leaves, x, micro, Key.of(0))
    forward = run.events.flops
    last = index == len(stages) - 1
    after = None if last else Boundary.of(y)
    given = [weigh(y[0] if isinstance(y, tuple) else y, "the loss").sum] if after is None else tree.leaves(y)
    outputs = [output for output in given if output.requires_grad]
    keeps = [_storage(leaf) in saved.sizes for leaf in given]
    in_flight = InFlightMicroBatch.of(inputs, outputs)
    in_flight.backward_inputs([torch.ones_like(output) for output in outputs], [w for w in leaves.values() if w.requires_grad])
    back = run.events.flops
    in_flight.backward_weights()
    both = {_storage(leaf) for leaf, kept in zip(arrived, before.keeps if before else (), strict=True) if kept}
    shared = sum(saved.sizes[storage] for storage in both if storage in saved.sizes)
    return _StageCost(forward - begun, back - forward, run.events.flops - back, saved.sizes, shared, after, keeps)


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _empty(leaf: Any) -> Any:
    return torch.empty(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, Tensor) else leaf
