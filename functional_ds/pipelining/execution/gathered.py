"""``Room``: a part of the params, whole and ready for use, within one optimizer step."""

from collections.abc import Mapping, Sequence

import attrs
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.torch_private import storage_id
from functional_ds.step.state import State
from functional_ds.step.step import Step
from functional_ds.step.tape import Tape

__all__ = ["Room"]


@attrs.define(eq=False)
class Room:
    """What the step's view gives of a part of the params, as leaves that many micro-batches use.

    Law: gradients by the leaves, pushed once, come out as those of the stored params: the transpose of the view.

    Attributes:
        state: whose params are this part alone.
        places: which of all gradients are theirs.
        records: whether gradients are wanted.
        carry: gradients of earlier batches of the same optimizer step.
        last: whether no further batch follows.
        leaves: by path; empty before the room is first filled.
    """

    step: Step
    state: State
    places: Sequence[int]
    records: bool
    carry: list[Tensor] | None = None
    last: bool = True
    leaves: dict[str, Tensor] = attrs.field(factory=dict)
    _seen: dict[str, Tensor] = attrs.field(factory=dict)
    _gathered: dict[int, str] = attrs.field(factory=dict)  # a leaf for each storage that the view has made
    _tape: Tape | None = None
    _gone: bool = False
    _through: bool = True  # whether autograd has a part in the view

    def fill(self) -> None:
        """Makes the leaves whole; collective where they are sharded. Again does nothing."""
        if self._tape is None:
            self._open()
        elif self._gone:
            self._refill()
        self._gone = False

    def empty(self) -> None:
        """Gives back the memory of leaves that were gathered; the leaves stay what they are and can be filled again."""
        if not self._gone:
            for path in self._gathered.values():
                self.leaves[path].untyped_storage().resize_(0)
            self._gone = True

    def lasting(self, tensor: Tensor) -> Tensor:
        """A tensor that will be used later: a copy, if it lies in memory that comes and goes."""
        return tensor.clone() if self._gathered and storage_id(tensor) in self._gathered else tensor

    def push(self, grads: Mapping[str, Tensor]) -> None:
        """Takes the gradients by the leaves, all of them; reductions begin."""
        tape, gone = self._opened(), self._gone
        if self._through:
            self.fill()  # what autograd has saved of the view may lie in the leaves' memory
        tape.push(self._seen, grads, through=self._through)
        if gone:
            self.empty()

    def collect(self) -> list[Tensor]:
        """The gradients of the stored params."""
        return self._opened().collect()

    def close(self) -> None:
        """Lets go of everything; an error does, too."""
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
        made = {storage_id(leaf): path for path, leaf in self.leaves.items()}
        self._gathered = {storage: path for storage, path in made.items() if storage not in stored}
        return tape

    def _refill(self) -> None:
        with Tape(records=False) as tape:
            given = self.step.view(self.state, tape)
            for path in self._gathered.values():
                leaf, fresh = self.leaves[path], given[path].detach().untyped_storage()
                leaf.untyped_storage().resize_(fresh.nbytes())
                leaf.untyped_storage().copy_(fresh, non_blocking=False)


def _fetched(leaf: Tensor) -> Tensor:
    return leaf if type(leaf) is Tensor else leaf.view_as(leaf)
