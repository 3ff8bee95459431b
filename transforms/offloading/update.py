"""Updates in pieces, all or nothing: the next piece is fetched and the last written back while one is computed."""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import cycle, islice
from time import perf_counter
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.marks import like_marked
from functional_ds.base.torch_private import storage_id
from functional_ds.base.weighted import Weighted
from functional_ds.comm.worlds.current import recorder
from functional_ds.sharding.leaf_map import LeafMap
from functional_ds.step.phase_signatures import Metrics
from functional_ds.step.state.state import State
from functional_ds.step.step import Step

from .files import OffloadError
from .handles import OnHost, Version, is_handle
from .leaf_states import assembled, beside_params, content, flat, on_device, parted, without_leaves
from .plan import LeafPiece, OffloadedLeaf, OffloadPlan, StateTensor, cut
from .prefetch import refuse_streams
from .storage import GRAD, PARAM, Buffer, Storage
from .tensor_info import begins_with, typed
from .traced import failed, settled


@attrs.define(eq=False, repr=False)
class Transaction:
    """Collects the new values of offloaded units.

    With files, no value of the old state is overwritten before ``commit``: tensors on disk get new versions, and params in
    memory are written where their gradients were. Without files nothing can fail, so everything is written in place.

    Attributes:
        storage: the state's.
        grads: of the trained units, by leaf.
        old: for each unit the leaves of its content before the update.
        new: after it; complete after ``commit``.
        error: the first error of a file. Later reads and writes are ignored.
        transfers: the reads and writes of a step that is traced, whose errors a node of its graph finds.
    """

    storage: Storage
    grads: dict[int, Tensor]
    old: list[list[Any]]
    new: list[list[Any]] = attrs.field(init=False)
    error: OffloadError | None = None
    transfers: list[Any] = attrs.field(factory=list)
    _versions: dict[tuple[int, int], Version] = attrs.field(factory=dict)
    _params: dict[int, Tensor] = attrs.field(factory=dict)  # new values of params in memory
    _holders: Counter[int] = attrs.field(init=False)  # how many gradients share a storage

    def __attrs_post_init__(self) -> None:
        self.new = [[*leaves] for leaves in self.old]
        self._holders = Counter(storage_id(grad) for grad in self.grads.values())

    @staticmethod
    def of(storage: Storage, state: State, grads: list[Tensor]) -> "Transaction":
        """The transaction of a state, split by units."""
        rests = parted(beside_params(state, storage.plan.slots), storage.plan.lengths)
        pairs = zip(flat(state.params)[0], rests, strict=True)
        old = [flat({"params": [param], "rest": rest})[0] for param, rest in pairs]
        return Transaction(storage, {u.leaf: grads[u.trained] for u in storage.plan.units if u.trained is not None}, old)

    @contextmanager
    def noting_errors(self) -> Iterator[None]:
        """Continues after a file error, because other ranks are waiting in the collectives that follow."""
        try:
            yield
        except OffloadError as error:
            self.error = self.error or error

    def grad(self, piece: LeafPiece) -> Tensor:
        """The piece's range of its gradient."""
        grad = self.grads[piece.unit.leaf]
        return grad if piece.unit.whole else grad.view(-1)[piece.start : piece.stop]

    def in_memory(self, piece: LeafPiece, i: int, tensor: StateTensor) -> Tensor:
        """The piece's range of a tensor in memory, leaf ``i`` of the content."""
        return piece.of(tensor, _values(self.old[piece.unit.leaf][i]))

    def put(self, piece: LeafPiece, values: list[Any], buffer: Buffer) -> None:
        """Starts to store the new values of a piece, which may be in the buffer."""
        unit, regions = piece.unit, self.storage.regions[piece.unit.leaf]
        buffer.writes = tuple(write for write in buffer.writes if not write.done())
        for i, (tensor, value) in enumerate(zip(unit.tensors, values, strict=True)):
            if tensor is None:
                self.new[unit.leaf][i] = self.new[unit.leaf][i] if piece.start else value
            elif tensor.place == "disk":
                with self.noting_errors():
                    if self.error is None:
                        write = self._version(unit.leaf, i).write(value, buffer.memory[regions[i]])
                        buffer.writes = (*buffer.writes, write)
                        self.transfers.append(write)
            elif i in regions:
                buffer.copy_out(regions[i], value, piece.of(tensor, self._param(unit)))
            elif not begins_with(current := self.in_memory(piece, i, tensor), value):
                current.copy_(value)

    def _version(self, leaf: int, i: int) -> Version:
        if (leaf, i) not in self._versions:
            self._versions[leaf, i] = self.old[leaf][i].version()
        return self._versions[leaf, i]

    def _param(self, unit: OffloadedLeaf) -> Tensor:
        """The memory for the new values of a param in memory."""
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
        """Waits for all writes."""
        for version in self._versions.values():
            for write in version.writes:
                with self.noting_errors():
                    write.result()

    def commit(self, unit: OffloadedLeaf) -> None:
        """Replaces the old values of a unit by the new ones."""
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
    tensor: Tensor = leaf.host if isinstance(leaf, OnHost) else leaf
    return tensor


_HOST = torch.device("cpu")


@attrs.frozen(eq=False)
class _Fetching:
    """A piece on its way into a buffer; ``reads`` are those from the disk, by the tensor's index."""

    piece: LeafPiece
    buffer: Buffer
    reads: Mapping[int, "Future[int]"]


@attrs.define(eq=False, repr=False)
class PieceUpdate:
    """Runs the inner update on states of one piece.

    The inner update must be elementwise, except for what it asks of the step: ``norm`` and ``finite`` cover all gradients, and
    ``leaf_map`` tells which elements the piece has. Shared values, such as a loss scale, are passed to every piece as they were
    before the update; the first piece's results are kept.
    """

    inner: Any
    step: Step
    state: State
    grads: Weighted
    plan: OffloadPlan
    device: torch.device
    _answers: dict[str, Tensor] = attrs.field(factory=dict)
    _first: list[tuple[State, Metrics]] = attrs.field(factory=list)  # of the first piece, once it has run

    def run(
        self, piece: Any, grads: list[Tensor], *, device: torch.device, leaf_map: Callable[[LeafMap], LeafMap]
    ) -> list[Any]:
        """Updates a piece's content on a device and returns its leaves; ``leaf_map`` restricts a leaf map to the piece."""
        answers = {name: lambda *_, name=name: self._ask(name).to(device) for name in ("norm", "finite")}
        step = attrs.evolve(self.step, over_ranks={**self.step.over_ranks, **answers})
        step = step.wrapped("piece", leaf_map=lambda *_: leaf_map(self.step.leaf_map(self.state)))
        rest = on_device(piece["rest"], device)
        state = tree.replace(
            self.state,
            params=piece["params"],
            optimizer=rest["optimizer"],
            step=self.state.step.to(device),
            slots={**self.state.slots, **rest["slots"]},
            skip=on_device(self.state.skip, device),
            finite=on_device(self.state.finite, device),
        )
        after, metrics = self.inner(step, state, Weighted(grads, on_device(self.grads.weight, device)))
        self._first = self._first or [(after, metrics)]
        return flat(content(after, self.plan.slots))[0]

    def first(self) -> tuple[State, Metrics]:
        """The first piece's result. A rank without pieces runs an empty one, so that it takes part in the collectives."""
        if not self._first:
            empty = {"params": [], "rest": without_leaves(beside_params(self.state, self.plan.slots))}
            self.run(empty, [], device=self.device, leaf_map=lambda parts: cut(parts, None, 0, 0))
        return self._first[0]

    def whole(self, leaves: list[list[Any]]) -> tuple[State, Metrics]:
        """The state after the update, and the metrics, from the leaves of each unit's content."""
        first, metrics = self.first()
        contents = [tree.unflatten(unit.spec, values) for unit, values in zip(self.plan.units, leaves, strict=True)]
        spec = flat(self.state.params)[1]
        state = assembled(self.state, first, contents, params=spec, slots=self.plan.slots, device=self.device)
        return state, on_device(metrics, self.device)

    def _ask(self, name: str) -> Tensor:
        """The step's answer for all gradients: computed by the first piece, before any gradient is overwritten."""
        if name not in self._answers:
            self._answers[name] = self.step.over_ranks[name](self.step, self.state, self.grads.sum)
        return self._answers[name]


def _settle(error: OffloadError | None, count: Tensor) -> None:
    """Raises this rank's error, or one that says that other ranks have some."""
    others = int(count)
    if error is not None:
        raise error
    if others:
        raise OffloadError(f"offload: the files of {others} other ranks went wrong; no rank has changed its state")


@attrs.define(eq=False, repr=False)
class Update:
    """One update of an offloaded state by the inner update.

    A rank whose disk fails continues with zeros, so that no other rank waits for it. Then all ranks vote: either all commit, or
    all raise and keep the old state.
    """

    storage: Storage
    inner: PieceUpdate
    changes: Transaction
    _waited: float = 0.0  # seconds for the disk and for copies from the device

    @staticmethod
    def of(storage: Storage, inner: Any, step: Step, state: State, grads: Weighted) -> "Update":
        """The update of a state by an inner update, with the gradients."""
        refuse_streams(storage.cuda)
        grads = tree.replace(grads, sum=[grad.detach().contiguous() for grad in grads.sum])
        pieces = PieceUpdate(inner, step, state, grads, storage.plan, storage.device)
        return Update(storage, pieces, Transaction.of(storage, state, grads.sum))

    def run(self) -> tuple[State, Metrics]:
        """The state after it.

        Raises:
            OffloadError: a file failed, here or on another rank; the old state stays valid.
        """
        began, disk = perf_counter(), self.storage.disk
        trained = [unit for unit in self.storage.plan.units if unit.trained is not None]
        offloaded, resident = [u for u in trained if u.offloaded], [u for u in trained if not u.offloaded]
        if disk is None:
            self._update_resident(resident)  # first, so that device and host compute concurrently
        self._update_offloaded([piece for unit in offloaded for piece in unit.pieces()])
        if disk is not None:
            self._vote()
            self._update_resident(resident)
            if not recorder().traces:
                disk.traffic.waited += self._waited
                disk.traffic.computed += perf_counter() - began - self._waited
        for unit in offloaded:
            self.changes.commit(unit)
        return self.inner.whole(self.changes.new)

    def _update_resident(self, units: list[OffloadedLeaf]) -> None:
        """Updates units on the device, in place."""
        for unit in units:
            piece, content = LeafPiece(unit, 0, unit.numel), tree.unflatten(unit.spec, self.changes.old[unit.leaf])
            grads, device = [self.changes.grads[unit.leaf]], self.storage.device
            self.changes.new[unit.leaf] = self.inner.run(content, grads, device=device, leaf_map=piece.leaf_map)

    def _update_offloaded(self, pieces: list[LeafPiece]) -> None:
        """Fetch | compute | write back: all buffers except the one being computed are being filled or emptied."""
        if not pieces:
            return
        buffers, fetching = self.storage.buffers, deque[_Fetching]()
        for stream in (self.storage.incoming, self.storage.outgoing):
            stream.wait_for_device()
        # A wrong prefetch may still read params on the host, which are written once ``incoming`` is done.
        self.storage.incoming.wait_for(self.storage.prefetcher.copies)
        todo = zip(pieces, cycle(buffers), strict=False)
        try:
            fetching.extend(self._fetch(*work) for work in islice(todo, len(buffers)))
            while fetching:
                self._compute(fetching[0])
                fetching.popleft()
                fetching.extend(self._fetch(*work) for work in islice(todo, 1))
        finally:
            for pending in fetching:  # after an error; the next update has the same buffers
                for read in pending.reads.values():
                    read.exception()
        with self._waiting():
            self.changes.finish_writes()
        for buffer in buffers:
            buffer.writes = ()
        for stream in (self.storage.incoming, self.storage.outgoing):
            stream.hold_device()

    def _fetch(self, piece: LeafPiece, buffer: Buffer) -> _Fetching:
        """Starts to fill a buffer."""
        regions, old, reads = self.storage.regions[piece.unit.leaf], self.changes.old[piece.unit.leaf], {}
        for i, tensor in piece.unit.on_disk():
            index = piece.span(tensor)[0] // old[i].chunk
            reads[i] = old[i].read_piece(index, into=buffer.memory[regions[i]], after=buffer.writes)
        staged, param = [], piece.unit.tensors[PARAM]
        if param is not None and PARAM in regions and PARAM not in reads:
            staged.append((regions[PARAM], self.changes.in_memory(piece, PARAM, param)))
        if GRAD in regions:
            staged.append((regions[GRAD], self.changes.grad(piece)))
        buffer.copy_in(staged)
        return _Fetching(piece, buffer, reads)

    def _compute(self, fetching: _Fetching) -> None:
        """Updates a piece once it is fetched, and starts to write it back."""
        piece, buffer = fetching.piece, fetching.buffer
        regions = self.storage.regions[piece.unit.leaf]
        with self._waiting():
            self.changes.transfers.extend(fetching.reads.values())
            for i, read in fetching.reads.items():
                with self.changes.noting_errors():
                    read.result()
                if read.exception() is not None:
                    buffer.memory[regions[i]].zero_()
            buffer.wait()
        leaves = [self._operand(piece, i, buffer) for i in range(len(piece.unit.tensors))]
        grad = self.changes.grad(piece)
        grad = buffer.tensor(regions[GRAD], grad.dtype, grad.shape) if GRAD in regions else grad
        content = tree.unflatten(piece.unit.spec, leaves)
        updated = self.inner.run(content, [grad], device=_HOST, leaf_map=piece.leaf_map)
        self.changes.put(piece, updated, buffer)

    def _operand(self, piece: LeafPiece, i: int, buffer: Buffer) -> Any:
        """A leaf of the piece's content, in host memory."""
        tensor, regions = piece.unit.tensors[i], self.storage.regions[piece.unit.leaf]
        if tensor is None:
            leaf = self.changes.old[piece.unit.leaf][i]
            return leaf.detach().to(_HOST, copy=True) if isinstance(leaf, Tensor) else leaf
        if i in regions:
            return buffer.tensor(regions[i], tensor.dtype, piece.shape(tensor))
        return self.changes.in_memory(piece, i, tensor)

    def _vote(self) -> None:
        """All ranks that share a batch commit, or none does.

        Raises:
            OffloadError: a file failed on one of them.
        """
        self.inner.first()
        state, error = self.inner.state, self.changes.error
        if recorder().traces:
            wrong = failed(self.changes.transfers)
            settled(_settle, wrong, self.inner.step.sum_over_ranks(state, wrong))
            return
        wrong = torch.full((), float(error is not None), device=state.step.device)  # no copy, which would stop the host
        with self._waiting():  # for the slowest rank
            _settle(error, self.inner.step.sum_over_ranks(state, wrong))

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began = perf_counter()
        try:
            yield
        finally:
            self._waited += perf_counter() - began
