"""The new values of an update, beside the old ones until it is complete: all of it or nothing."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.base.marks import like_marked
from functional_ds.base.torch_private import storage_id
from functional_ds.step.state.state import State

from .buffers import PARAM, Buffer
from .files import OffloadError
from .handles import OnHost, Version, is_handle, typed
from .leaf_states import beside_params, flat, parted
from .plan import LeafPiece, OffloadedLeaf, StateTensor
from .storage import Storage

__all__ = ["Transaction"]


@attrs.define(eq=False, repr=False)
class Transaction:
    """Collects the new values of offloaded units.

    Where there are files, no value of the old state is written over before ``commit``: tensors on the disk get new versions,
    and params in memory are written where their gradients were. Without files nothing can fail, so all is written in place.

    Attributes:
        storage: the state's.
        grads: of the trained units, by leaf.
        old: for each unit the leaves of its content before the update.
        new: after it; complete after ``commit``.
        error: the first that a file raised. Reads and writes that follow are of no use.
    """

    storage: Storage
    grads: dict[int, Tensor]
    old: list[list[Any]]
    new: list[list[Any]] = attrs.field(init=False)
    error: OffloadError | None = None
    _versions: dict[tuple[int, int], Version] = attrs.field(factory=dict)
    _params: dict[int, Tensor] = attrs.field(factory=dict)  # new values of params in memory
    _holders: Counter[int] = attrs.field(init=False)  # how many gradients lie in a storage

    def __attrs_post_init__(self) -> None:
        self.new = [[*leaves] for leaves in self.old]
        self._holders = Counter(storage_id(grad) for grad in self.grads.values())

    @staticmethod
    def of(storage: Storage, state: State, grads: list[Tensor]) -> "Transaction":
        """The transaction of a state, taken apart by units."""
        rests = parted(beside_params(state, storage.plan.slots), storage.plan.lengths)
        pairs = zip(flat(state.params)[0], rests, strict=True)
        old = [flat({"params": [param], "rest": rest})[0] for param, rest in pairs]
        return Transaction(storage, {u.leaf: grads[u.trained] for u in storage.plan.units if u.trained is not None}, old)

    @contextmanager
    def noting_errors(self) -> Iterator[None]:
        """Goes on after an error of a file: other ranks are waiting in the collectives that follow."""
        try:
            yield
        except OffloadError as error:
            self.error = self.error or error

    def grad(self, piece: LeafPiece) -> Tensor:
        """The piece's stretch of its gradient."""
        found = self.grads[piece.unit.leaf]
        return found if piece.unit.whole else found.view(-1)[piece.start : piece.stop]

    def in_memory(self, piece: LeafPiece, i: int, tensor: StateTensor) -> Tensor:
        """The piece's stretch of a tensor in memory, leaf ``i`` of the content."""
        return piece.of(tensor, _values(self.old[piece.unit.leaf][i]))

    def put(self, piece: LeafPiece, found: list[Any], buffer: Buffer) -> None:
        """Starts to bring the new values of a piece, which may lie in the buffer, where they belong."""
        unit, regions = piece.unit, self.storage.regions[piece.unit.leaf]
        buffer.writes = tuple(write for write in buffer.writes if not write.done())
        for i, (tensor, value) in enumerate(zip(unit.tensors, found, strict=True)):
            if tensor is None:
                self.new[unit.leaf][i] = self.new[unit.leaf][i] if piece.start else value
            elif tensor.place == "disk":
                with self.noting_errors():
                    if self.error is None:
                        write = self._version(unit, i, tensor).write(value, buffer.memory[regions[i]])
                        buffer.writes = (*buffer.writes, write)
            elif i in regions:
                buffer.copy_out(regions[i], value, piece.of(tensor, self._param(unit)))
            elif not _begins_with(own := self.in_memory(piece, i, tensor), value):
                own.copy_(value)

    def _version(self, unit: OffloadedLeaf, i: int, tensor: StateTensor) -> Version:
        if (unit.leaf, i) not in self._versions:
            self._versions[unit.leaf, i] = self.storage.version(unit, tensor)
        return self._versions[unit.leaf, i]

    def _param(self, unit: OffloadedLeaf) -> Tensor:
        """Where the new values of a param in memory are written."""
        if unit.leaf not in self._params:
            param = _values(self.old[unit.leaf][PARAM])
            self._params[unit.leaf] = param.detach() if self.storage.disk is None else self._spare(unit, param)
        return self._params[unit.leaf]

    def _spare(self, unit: OffloadedLeaf, param: Tensor) -> Tensor:
        grad = self.grads[unit.leaf]
        alone = self._holders[storage_id(grad)] == 1
        if alone and grad.device == param.device and grad.nbytes >= param.nbytes and grad.numel():
            return typed(grad.view(-1).view(torch.uint8), param.dtype, param.shape)
        return torch.empty_like(param, pin_memory=param.is_pinned())

    def finish_writes(self) -> None:
        """Waits until all is written."""
        for version in self._versions.values():
            for write in version.writes:
                with self.noting_errors():
                    write.result()

    def commit(self, unit: OffloadedLeaf) -> None:
        """Puts the new values of a unit in the place of the old ones."""
        leaves = self.new[unit.leaf]
        for i, _ in unit.on_disk():
            leaves[i] = self._versions[unit.leaf, i].done()
        if unit.leaf in self._params and self.storage.disk is not None:
            old, new = leaves[PARAM], self._params[unit.leaf]
            tight = new.untyped_storage().nbytes() == new.nbytes
            value = like_marked(new, _values(old)) if tight else _values(old).detach().copy_(new)
            leaves[PARAM] = self.storage.on_host(unit, value) if isinstance(old, OnHost) else value
        if is_handle(leaves[PARAM]):
            self.storage.prefetcher.know(leaves[PARAM])


def _values(leaf: Any) -> Tensor:
    found: Tensor = leaf.host if isinstance(leaf, OnHost) else leaf
    return found


def _begins_with(own: Tensor, value: Tensor) -> bool:
    """Whether both begin at one place of one memory; tensors without values have no addresses."""
    places = [(storage_id(x), x.storage_offset() * x.element_size()) for x in (own, value)]
    return places[0] == places[1]
