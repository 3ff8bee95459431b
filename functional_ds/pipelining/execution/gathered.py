"""``GatheredParams``: some of the params, gathered for all micro-batches of one optimizer step."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.torch_private import is_fake, storage_id
from functional_ds.comm.worlds.current import recorder
from functional_ds.step.state.state import State
from functional_ds.step.step import Step
from functional_ds.step.views.view import NeedsWhole, Pulling, View


@attrs.define(eq=False)
class GatheredParams:
    """The leaves that the step's view makes of some of the params, shared by micro-batches.

    Law: ``collect`` gives the gradients of the stored params from the pushed gradients of the leaves: the view's transpose.

    Attributes:
        step: the finished step.
        state: with only these params.
        places: the indices of their gradients among all gradients.
        trains: whether gradients are wanted.
        carry: gradients of earlier batches of the same optimizer step.
        last: whether no further batch follows.
        leaves: by path; an empty dict before the first ``gather``.
        used: the paths of leaves whose gradients were pushed.
    """

    step: Step
    state: State
    places: Sequence[int]
    trains: bool
    carry: list[Tensor] | None = None
    last: bool = True
    leaves: dict[str, Tensor] = attrs.field(factory=dict)
    used: set[str] = attrs.field(factory=set)
    _view: View | None = None
    _seen: dict[str, Tensor] = attrs.field(factory=dict)  # what autograd computed from the view's params
    _gathered: dict[int, tuple[str, int]] = attrs.field(factory=dict)  # a leaf's path and the bytes of each storage of the view
    _pulling: Pulling | None = None
    _freed: bool = False

    @property
    def whole(self) -> bool:
        """Whether ``gather`` has nothing to do."""
        return self._view is not None and not self._freed

    def gather(self) -> None:
        """Gathers the leaves, once; collective if they are sharded."""
        if self._view is None:
            self._open()
        elif self._freed:
            self._regather()
        self._freed = False

    def free(self) -> None:
        """Frees the memory of gathered leaves. The leaves stay the same tensors, and ``gather`` fills them again."""
        if not self._freed:
            if self._gathered and recorder().traces:
                raise RuntimeError(
                    "the pipeline frees params of stages before the step ends (by resident=, or evictions in its schedule), "
                    "which no graph does"
                )
            for path, _ in self._gathered.values():
                self.leaves[path].untyped_storage().resize_(0)
            self._freed = True

    def durable(self, tensor: Tensor) -> Tensor:
        """A tensor that may be used after ``free``: a clone, if it is in a gathered leaf's memory."""
        return tensor.clone() if self._gathered and storage_id(tensor) in self._gathered else tensor

    def push(self, grads: Mapping[str, Tensor]) -> None:
        """Takes the gradients by all leaves, by path, and starts their reductions."""
        view, freed = self._opened(), self._freed
        self.used.update(grads)
        whole = {path: view.params[path] for path in grads}
        if not all(view.placeholders.get(id(leaf)) == path for path, leaf in whole.items()):
            self.gather()  # autograd may have saved a leaf's memory for the view's backward
            whole = self._seen
        outputs = [(whole[path], grad) for path, grad in grads.items() if whole[path].requires_grad]
        self._pulling = view.pull(outputs, self.carry, self.last)
        if freed:
            self.free()

    def collect(self) -> list[Tensor]:
        """The gradients of the stored params."""
        view = self._opened()
        pulling = view.pull((), self.carry, self.last) if self._pulling is None else self._pulling
        return pulling.wait().sums

    def unused(self) -> frozenset[str]:
        """The paths of the trained leaves whose gradients were not pushed."""
        return frozenset(path for path, leaf in self.leaves.items() if leaf.requires_grad and path not in self.used)

    def close(self) -> None:
        """Closes the view, also after an error."""
        if self._view is not None:
            self._view.close()
            self._view = None

    def _opened(self) -> View:
        return self._open() if self._view is None else self._view

    def _open(self) -> View:
        view = self._view = self.step.view(self.state, trains=self.trains)
        order = dict.fromkeys((*view.placeholders.values(), *view.params))  # each unit is fetched once, here
        self._seen = {path: leaf for path, leaf in self._fetched(view, order).items() if path in view.params}
        self.leaves = {path: leaf.detach().requires_grad_(leaf.requires_grad) for path, leaf in self._seen.items()}
        stored = {storage_id(leaf) for leaf in tree.leaves(self.state.params) if isinstance(leaf, Tensor)}  # not on a disk
        made = {storage_id(leaf): (path, leaf.untyped_storage().nbytes()) for path, leaf in self.leaves.items()}
        self._gathered = {storage: held for storage, held in made.items() if storage not in stored}
        return view

    def _fetched(self, view: View, order: Any) -> dict[str, Tensor]:
        try:
            with torch.set_grad_enabled(self.trains), view.scope():
                fetched = {path: _plain(view.params[path]) for path in order if path in view.params}
            view.finish()
        except NeedsWhole as error:
            raise RuntimeError(str(error)) from error
        return fetched

    def _regather(self) -> None:
        view = self.step.view(self.state, trains=False)
        try:
            with torch.no_grad(), view.scope():
                for path, size in self._gathered.values():
                    leaf = self.leaves[path]
                    leaf.untyped_storage().resize_(size)  # before the gather, so that counts at gathers see both
                    fresh = view.params[path].detach().untyped_storage()
                    leaf.untyped_storage().copy_(fresh, non_blocking=False)
            view.finish()
        finally:
            view.close()


def _plain(leaf: Tensor) -> Tensor:
    """A lazy leaf as a view; others stay the leaves by which the view differentiates."""
    return leaf if type(leaf) is Tensor or is_fake(leaf) else leaf.view_as(leaf)
