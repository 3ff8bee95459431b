"""``Boundary``: structure, shapes and dtypes of what a stage sends to the next, inferred before anything runs."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import optree
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.torch_private import FakeTensorMode, disable_torch_function_subclass
from functional_ds.base.weighted import Weighted
from functional_ds.comm.worlds.current import recorder
from functional_ds.pipelining.stages.stages import LossInput, OnesReadMode, Stages, mapped, standing_for
from functional_ds.step.axes import EAGER_FIRST
from functional_ds.step.pass_scope import Pass
from functional_ds.step.state.state import State
from functional_ds.step.step import Step


@attrs.frozen
class TensorMeta:
    """A tensor without values.

    Attributes:
        shape: its sizes.
        dtype: its element type.
        device: its device's type.
        grad: whether gradients flow back through it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    grad: bool

    @staticmethod
    def of(tensor: Tensor) -> "TensorMeta":
        """From a tensor."""
        return TensorMeta(tuple(tensor.shape), tensor.dtype, tensor.device.type, tensor.requires_grad)

    def like(self) -> Tensor:
        """A tensor of that shape whose elements share one memory location."""
        return torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@attrs.frozen
class Boundary:
    """What a stage sends to the next: a tree of tensors without values.

    Attributes:
        spec: the tree's structure.
        leaves: its tensors, in order.
    """

    spec: optree.PyTreeSpec = attrs.field(repr=False)
    leaves: tuple[TensorMeta, ...]

    @staticmethod
    def of(value: Any) -> "Boundary":
        """From a stage's result."""
        return Boundary(tree.structure(value), tuple(map(TensorMeta.of, tree.tensors(value, "what it gives"))))

    def tensors(self, value: Any) -> list[Tensor]:
        """The tensors of a stage's result.

        Raises:
            ValueError: structure, shapes or dtypes are not those of the boundary.
        """
        leaves, spec = tree.flatten(value)
        if spec != self.spec:
            raise ValueError(f"its structure is {spec}; on shapes alone it was {self.spec}")
        for leaf, meta in zip(leaves, self.leaves, strict=True):
            if leaf.shape != meta.shape or leaf.dtype != meta.dtype or leaf.requires_grad != meta.grad:
                raise ValueError(f"it gives {TensorMeta.of(leaf)}; on shapes alone it was {meta}")
        return leaves

    def value(self, tensors: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
        """The received tensors as a tree, and those of them whose gradients are sent back."""
        inputs = [leaf.requires_grad_() for leaf in self.differentiable(tensors)]
        return tree.unflatten(self.spec, tensors), inputs

    def differentiable(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors through which gradients flow."""
        return [tensor for tensor, meta in zip(tensors, self.leaves, strict=True) if meta.grad]

    @property
    def onward(self) -> list[Tensor]:
        """Tensors like those that are sent to the next stage."""
        return [meta.like() for meta in self.leaves]

    @property
    def back(self) -> list[Tensor]:
        """Tensors like the gradients that come back."""
        return self.differentiable(self.onward)

    @property
    def bytes(self) -> int:
        """The bytes that are sent to the next stage."""
        return sum(like.numel() * like.itemsize for like in self.onward)

    def __str__(self) -> str:
        return ", ".join(map(str, self.leaves)) or "nothing"


@attrs.frozen(eq=False)
class Crossing:
    """What crosses between all stages for one micro-batch.

    Attributes:
        boundaries: after each stage but the last.
        sums: the dtypes of the loss's sum and of each metric's, by name.
    """

    boundaries: tuple[Boundary, ...]
    sums: Mapping[str, torch.dtype]


def on_shapes(group: comm.Group) -> bool:
    """Whether each rank runs separately, without values."""
    return group.world.device.type == "meta"


def signature(batch: Any, *, trains: bool) -> tuple[Any, ...]:
    """Everything in a batch that the shapes in a pipeline depend on."""
    leaves, spec = tree.flatten(batch)
    return (trains, spec, *((tuple(leaf.shape), leaf.dtype) for leaf in leaves))


_READS_PARAMS = (
    "a transform's phase loss reads {!r} for {!r}: in a pipeline it has the leaves of the last stage alone, so a term of all "
    "params would differ from that on one device; add its gradient, or the metric, in the phase update, where each rank has "
    "the leaves of its stages"
)


@attrs.frozen(eq=False)
class ShapeRun:
    """Runs a micro-batch through the stages on tensors without values.

    Attributes:
        step: the finished step; its phases ``forward`` and ``loss`` run the stages.
        state: the step's state.
        stages: the model's.
        leaves: the leaves that the step's view gives to each stage of this rank, by path; on shapes only, of all ranks.
        visit: the micro-batch, and the weight of a plain mean of it.
        trains: whether gradients are wanted.
        group: the pipeline's ranks.
    """

    step: Step
    state: State
    stages: Stages
    leaves: Mapping[int, Mapping[str, TensorMeta]]
    visit: LossInput
    trains: bool
    group: comm.Group

    def crossing(self, placement: Sequence[int]) -> Crossing:
        """What is sent between the stages, which are on the ranks of ``placement``.

        Collective, a few small messages for each stage: stage after stage, its rank runs it on fake tensors and broadcasts the
        result's shapes, or the error. So all ranks know, or raise the same error, before any of them computes. In a world of
        shapes each rank runs all stages, and the ranks' results are compared afterwards.

        Raises:
            ValueError: a stage does not accept the previous stage's output, or cannot run on shapes.
        """
        if recorder().traces:
            raise RuntimeError(f"{EAGER_FIRST}: ranks tell each other the shapes between stages")
        boundaries: list[Boundary] = []
        alone = on_shapes(self.group)
        for index, holder in enumerate(placement):
            told: Any = None
            if alone or self.group.rank == holder:
                told = self._outgoing(index, boundaries[-1] if boundaries else None)
            if alone:
                self.group.world.agreed(f"stage {index} gives {told!r}", self.group)
            else:
                told = comm.broadcast_object(told, holder, self.group)
            if isinstance(told, str):
                raise ValueError(told)
            if isinstance(told, dict):
                return Crossing(tuple(boundaries), told)
            boundaries.append(told)
        raise AssertionError("the last stage says what it sums")

    def _outgoing(self, index: int, before: Boundary | None) -> "Boundary | dict[str, torch.dtype] | str":
        """A stage's output; of the last one, the dtypes of its sums; or an error, as text."""
        last, state, visit = index == len(self.stages) - 1, self.state, self.visit
        try:
            quiet = Pass(trains=False)  # one that trains compares values between ranks
            trial = OnesReadMode if last else FakeTensorMode  # a loss may read numbers, to report them
            with quiet, trial(allow_non_fake_inputs=True) as mode, torch.set_grad_enabled(self.trains or last):
                trained = {path for path, meta in self.leaves[index].items() if meta.grad and self.trains}
                params = {path: _fake(meta, last or path in trained) for path, meta in self.leaves[index].items()}
                x = None if before is None else before.value([_fake(meta, False) for meta in before.leaves])[0]
                micro = mapped(lambda leaf: standing_for(leaf, mode, "cpu"), visit.batch)
                if last:
                    loss, metrics = self.step.loss(state, params, LossInput(micro, x, visit.weight, trained))
                    sums = {"loss": loss, **metrics}
                    for name, value in sums.items():
                        read = _reached(value, params)
                        if read:
                            return _READS_PARAMS.format(read, name)
                    return {name: value.sum.dtype for name, value in sums.items()}
                run = self.stages[index].run
                y = Boundary.of(self.step.forward(state, lambda given: run(params, x, given, state.key), micro))
                if on_shapes(self.group):
                    return attrs.evolve(y, leaves=tuple(attrs.evolve(leaf, device="meta") for leaf in y.leaves))
                return y
        except Exception as error:  # of the user's function; all ranks must raise it
            taken = "a micro-batch" if before is None else str(before)
            return f"stage {index} ({self.stages[index].name}) cannot be run on {taken}: {type(error).__name__}: {error}"


def _reached(value: Weighted, params: Mapping[str, Tensor]) -> str:
    """The path of a leaf that contributes to a loss or metric; empty if none does."""
    leaves = {path: leaf for path, leaf in params.items() if leaf.requires_grad}
    results = [part for part in (value.sum, value.weight) if isinstance(part, Tensor) and part.requires_grad]
    if not leaves or not results:
        return ""
    ones = [torch.ones_like(result) for result in results]
    grads: Sequence[Tensor | None] = torch.autograd.grad(
        results, list(leaves.values()), ones, retain_graph=True, allow_unused=True
    )
    return next((path for path, grad in zip(leaves, grads, strict=True) if grad is not None), "")


def view_metas(step: Step, part: State) -> dict[str, TensorMeta]:
    """The leaves that the step's view gives for some of the params; collective in ZeRO stage 3."""
    view = step.view(part)
    try:
        with view.scope(), disable_torch_function_subclass():  # a deferred leaf need not be fetched for this
            metas = {path: TensorMeta.of(leaf) for path, leaf in view.params.items()}
        view.finish()
        return metas
    finally:
        view.close()


def _fake(meta: TensorMeta, trains: bool) -> Tensor:
    device = "cpu" if meta.device == "meta" else meta.device
    differentiable = meta.dtype.is_floating_point or meta.dtype.is_complex
    return torch.empty(meta.shape, dtype=meta.dtype, device=device).requires_grad_(trains and differentiable)
