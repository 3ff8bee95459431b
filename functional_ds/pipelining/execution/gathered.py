"""``GatheredParams``: some of the params as whole leaves, for all micro-batches of one optimizer step."""

from collections.abc import Mapping, Sequence

import attrs
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.torch_private import storage_id
from functional_ds.step.state import State
from functional_ds.step.step import Step
from functional_ds.step.tape import Tape

__all__ = ["GatheredParams"]


@attrs.define(eq=False)
class GatheredParams:
    """The leaves that the step's view makes of some of the params. Micro-batches share them.

    Law: ``collect`` gives the gradients of the stored params by the pushed gradients of the leaves: the view's transpose.

    Attributes:
        step: the finished step.
        state: its params are these alone.
        places: the places of their gradients among all gradients.
        records: whether gradients are wanted.
        carry: gradients of earlier batches of the same optimizer step.
        last: whether no further batch follows.
        leaves: by path; an empty dict before the first ``gather``.
    """

    step: Step
    state: State
    places: Sequence[int]
    records: bool
    carry: list[Tensor] | None = None
    last: bool = True
    leaves: dict[str, Tensor] = attrs.field(factory=dict)
    _seen: dict[str, Tensor] = attrs.field(factory=dict)
    _gathered: dict[int, tuple[str, int]] = attrs.field(factory=dict)  # a leaf's path and the bytes of each storage of the view
    _tape: Tape | None = None
    _freed: bool = False
    _through: bool = True  # whether autograd records the view

    @property
    def whole(self) -> bool:
        """Whether ``gather`` has nothing to do."""
        return self._tape is not None and not self._freed

    def gather(self) -> None:
        """Makes the leaves whole; collective where they are sharded. A second call does nothing."""
        if self._tape is None:
            self._open()
        elif self._freed:
            self._regather()
        self._freed = False

    def free(self) -> None:
        """Frees the memory of gathered leaves. The leaves stay the same tensors, and ``gather`` fills them again."""
        if not self._freed:
            for path, _ in self._gathered.values():
                self.leaves[path].untyped_storage().resize_(0)
            self._freed = True

    def durable(self, tensor: Tensor) -> Tensor:
        """A tensor that may be used after ``free``: a clone, if it lies in a gathered leaf's memory."""
        return tensor.clone() if self._gathered and storage_id(tensor) in self._gathered else tensor

    def push(self, grads: Mapping[str, Tensor]) -> None:
        """Takes the gradients by all leaves, by path, and starts their reductions."""
        tape, freed = self._opened(), self._freed
        if self._through:
            self.gather()  # autograd may have saved a leaf's memory for the view's backward
        tape.push(self._seen, grads, through=self._through)
        if freed:
            self.free()

    def collect(self) -> list[Tensor]:
        """The gradients of the stored params."""
        return self._opened().collect()

    def close(self) -> None:
        """Closes the tape, also after an error."""
        if self._tape is not None:
            self._tape.__exit__(None, None, None)
            self._tape = None

    def _opened(self) -> Tape:
        return self._open() if self._tape is None else self._tape

    def _open(self) -> Tape:
        tape = self._tape = Tape(records=self.records, carry=self.carry, last=self.last)
        tape.__enter__()
        given = self.step.view(self.state, tape)
        self._through = not tape.takes(given)
        order = dict.fromkeys((*tape.placeholders.values(), *given))  # each unit is fetched once, here
        self._seen = {path: _fetched(given[path]) for path in order if path in given}
        tape.step_aside()
        self.leaves = {path: leaf.detach().requires_grad_(leaf.requires_grad) for path, leaf in self._seen.items()}
        stored = {storage_id(leaf) for leaf in tree.leaves(self.state.params) if isinstance(leaf, Tensor)}  # not on a disk
        made = {storage_id(leaf): (path, leaf.untyped_storage().nbytes()) for path, leaf in self.leaves.items()}
        self._gathered = {storage: held for storage, held in made.items() if storage not in stored}
        return tape

    def _regather(self) -> None:
        with Tape(records=False) as tape:
            given = self.step.view(self.state, tape)
            for path, size in self._gathered.values():
                leaf = self.leaves[path]
                leaf.untyped_storage().resize_(size)  # before the gather, so that whoever counts at gathers sees both
                fresh = given[path].detach().untyped_storage()
                leaf.untyped_storage().copy_(fresh, non_blocking=False)


def _fetched(leaf: Tensor) -> Tensor:
    return leaf if type(leaf) is Tensor else leaf.view_as(leaf)
