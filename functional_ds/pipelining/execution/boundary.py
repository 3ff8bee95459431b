"""What stages hand each other: structures, shapes and dtypes, found without values before anything runs."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs
import optree
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.torch_private import FakeTensorMode, disable_torch_function_subclass
from functional_ds.pipelining.stages.stages import Stages, Visit
from functional_ds.step.state import State
from functional_ds.step.step import Step
from functional_ds.step.tape import Tape

__all__ = ["Blank", "Boundary", "Crossing", "boundaries", "outlined", "signature"]


@attrs.frozen
class Blank:
    """A tensor without values.

    Attributes:
        grad: whether gradients flow back through it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    grad: bool

    @staticmethod
    def of(tensor: Tensor) -> "Blank":
        """A tensor's."""
        return Blank(tuple(tensor.shape), tensor.dtype, tensor.device.type, tensor.requires_grad)

    def like(self) -> Tensor:
        """Something of that shape that takes no memory."""
        return torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@attrs.frozen(slots=False)
class Boundary:
    """What crosses from a stage to the next: a tree of tensors without values."""

    spec: optree.PyTreeSpec = attrs.field(repr=False)
    leaves: tuple[Blank, ...]

    @staticmethod
    def of(value: Any) -> "Boundary":
        """A value's."""
        return Boundary(tree.structure(value), tuple(map(Blank.of, tree.tensors(value, "what it gives"))))

    def tensors(self, value: Any) -> list[Tensor]:
        """The tensors of a value, which must be as the boundary says."""
        leaves, spec = tree.flatten(value)
        if spec != self.spec:
            raise ValueError(f"its structure is {spec}; on shapes alone it was {self.spec}")
        for leaf, blank in zip(leaves, self.leaves, strict=True):
            if leaf.shape != blank.shape or leaf.dtype != blank.dtype or leaf.requires_grad != blank.grad:
                raise ValueError(f"it gives {Blank.of(leaf)}; on shapes alone it was {blank}")
        return leaves

    def value(self, tensors: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
        """The tree of what has arrived, and those of its leaves whose gradients go back."""
        smooth = [leaf.requires_grad_() for leaf, blank in zip(tensors, self.leaves, strict=True) if blank.grad]
        return tree.unflatten(self.spec, tensors), smooth

    def smooth(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Those through which gradients flow."""
        return [tensor for tensor, blank in zip(tensors, self.leaves, strict=True) if blank.grad]

    @cached_property
    def onward(self) -> list[Tensor]:
        """Something like what is sent to the next stage."""
        return [blank.like() for blank in self.leaves]

    @cached_property
    def back(self) -> list[Tensor]:
        """Something like the gradients that come back."""
        return self.smooth(self.onward)

    @property
    def bytes(self) -> int:
        """Of what is sent onward."""
        return sum(like.numel() * like.itemsize for like in self.onward)

    def __str__(self) -> str:
        return ", ".join(map(str, self.leaves)) or "nothing"


@attrs.frozen(eq=False)
class Crossing:
    """What a micro-batch hands from stage to stage.

    Attributes:
        sums: the dtype of the loss's sum and of each metric's, by name.
    """

    boundaries: tuple[Boundary, ...]
    sums: Mapping[str, torch.dtype]


def signature(batch: Any, *, trains: bool) -> tuple[Any, ...]:
    """What the shapes in a pipeline depend on."""
    leaves, spec = tree.flatten(batch)
    return (trains, spec, *((tuple(leaf.shape), leaf.dtype) for leaf in leaves))


def boundaries(
    step: Step,
    state: State,
    stages: Stages,
    *,
    placement: Sequence[int],
    leaves: Mapping[int, Mapping[str, Blank]],
    batch: Any,
    weight: float | None,
    trains: bool,
    group: comm.Group,
) -> Crossing:
    """What crosses between the stages for a micro-batch like this one, of which a plain mean weighs ``weight``.

    Each rank runs its stages on fake tensors, in the stages' order, and tells the others what came out; so all of them know,
    or raise alike, before any of them computes. Collective; a few small messages for each stage.

    Args:
        leaves: what the step's view gives of this rank's stages' params.

    Raises:
        ValueError: a stage cannot take what the one before gives, or cannot be run on shapes alone.
    """
    found: list[Boundary] = []
    for index, holder in enumerate(placement):
        told: Any = None
        if group.rank == holder:
            before = found[-1] if found else None
            told = _outline(step, state, stages, index, before, leaves[index], Visit(batch, None, weight), trains)
        told = comm.broadcast_object(told, holder, group)
        if isinstance(told, str):
            raise ValueError(told)
        if isinstance(told, dict):
            return Crossing(tuple(found), told)
        found.append(told)
    raise AssertionError("the last stage says what it sums")


def _outline(
    step: Step,
    state: State,
    stages: Stages,
    index: int,
    before: Boundary | None,
    leaves: Mapping[str, Blank],
    visit: Visit,
    trains: bool,
) -> "Boundary | dict[str, torch.dtype] | str":
    try:
        quiet = Tape(records=False)  # what is kept for a backward, and compared between ranks for it, has values
        with quiet, FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.set_grad_enabled(trains):
            params = {path: _fake(blank, trains) for path, blank in leaves.items()}
            x = None if before is None else before.value([_fake(blank, False) for blank in before.leaves])[0]
            micro = tree.map(lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, visit.batch)
            if index == len(stages) - 1:
                loss, metrics = step.loss(state, params, Visit(micro, x, visit.weight))
                return {name: value.sum.dtype for name, value in {"loss": loss, **metrics}.items()}
            return Boundary.of(step.forward(state, lambda given: stages.run(index, params, x, given, state.key), micro))
    except Exception as error:  # whatever a user's function raises; the other ranks are to know
        taken = "a micro-batch" if before is None else str(before)
        return f"stage {index} ({stages.stages[index].name}) cannot be run on {taken}: {type(error).__name__}: {error}"


def outlined(step: Step, part: State) -> dict[str, Blank]:
    """What the step's view gives of a part of the params; collective where a pass is, as in ZeRO stage 3."""
    with Tape() as tape, disable_torch_function_subclass():  # a deferred leaf need not be fetched for this
        return {path: Blank.of(leaf) for path, leaf in step.view(part, tape).items()}


def _fake(blank: Blank, trains: bool) -> Tensor:
    made = torch.empty(blank.shape, dtype=blank.dtype, device=blank.device)
    return made.requires_grad_(blank.grad and trains)
