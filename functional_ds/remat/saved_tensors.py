"""Stores saved tensors by a policy: resident, on the host, or partitioned.

``torch.autograd.graph.save_on_cpu`` copies each tensor as often as it is saved, params included, synchronously with the
device's work. Here a tensor is copied once however often it is saved, params are not copied, copies overlap computation, and
fetching a tensor starts the fetch of the next.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base.device_streams import Arrival, CopyStream
from functional_ds.base.torch_private import is_fake, saved_tensors_hooks_in_force, storage_id, version_of
from functional_ds.comm.worlds.current import recorder
from functional_ds.step.pass_scope import current_pass
from functional_ds.step.views.graph_checks import check_version

from .partitioned import PartitionedTensor, PartitionLog, partition
from .policy import Keep


def is_own(tensor: Tensor) -> bool:
    """Whether it is a plain tensor; a tensor without values is, if a step is traced into a graph."""
    return type(tensor) is Tensor or (is_fake(tensor) and recorder().records)


def address_of(tensor: Tensor) -> int:
    """The address of its memory; a substitute if it has no values."""
    return storage_id(tensor) if is_fake(tensor) else tensor.untyped_storage().data_ptr()


# -- flat and back -------------------------------------------------------------------------------------------------------


@attrs.frozen
class _Strides:
    """A tensor's layout in memory.

    Attributes:
        shape: its sizes.
        sizes: the sizes without expanded dims, which are 1.
        stride: the strides of these elements.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    stride: tuple[int, ...]

    def restore(self, flat: Tensor) -> Tensor:
        """The inverse of ``compact``: the same values, shape and order in memory."""
        return flat.as_strided(self.sizes, self.stride).expand(self.shape)


def compact(tensor: Tensor) -> tuple[Tensor, _Strides]:
    """The distinct elements in memory, flat in memory order, and the strides that undo it.

    The flat tensor is a view if the elements are dense, else a copy. Law: ``strides.restore(flat)`` is bitwise the tensor, and
    has its strides if it was dense.

    >>> import torch
    >>> flat, strides = compact(torch.arange(6).view(2, 3).t().expand(4, 3, 2))
    >>> flat.tolist(), strides.restore(flat).shape
    ([0, 1, 2, 3, 4, 5], torch.Size([4, 3, 2]))
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    distinct = tensor
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            distinct = distinct.narrow(dim, 0, 1)
    if not _dense(distinct.shape, distinct.stride()):
        distinct = distinct.contiguous()
    flat = distinct.as_strided((distinct.numel(),), (1,), distinct.storage_offset())
    return flat, _Strides(tuple(tensor.shape), tuple(distinct.shape), tuple(distinct.stride()))


def _dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill one range of memory without overlap."""
    following = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != following:
            return False
        following *= size
    return True


# -- stored tensors ------------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class HostTensor:
    """A flat tensor in host memory.

    Attributes:
        host: the values.
        stream: copies them to and from the device. On a CPU they are copied too, so that reports are the same.
        previous: the tensor that was offloaded before this one. A backward pass needs it next, so its fetch begins with this
            one's.
    """

    host: Tensor
    stream: CopyStream
    previous: "weakref.ref[HostTensor] | None" = None
    _arriving: Arrival | None = None

    @property
    def held(self) -> int:
        """Bytes on the host."""
        return self.host.nbytes

    def fetch(self) -> Tensor:
        """The flat tensor on its device."""
        arriving, self._arriving = self.start(), None
        previous = self.previous() if self.previous is not None else None
        if previous is not None and self.stream.overlaps:
            previous.start()
        return arriving.wait()

    def start(self) -> Arrival:
        """Starts the copy to the device, once."""
        if self._arriving is None:
            self._arriving = self.stream.to_device(self.host)
        return self._arriving


class Resident:
    """A saved tensor that stays on its device.

    Attributes:
        whole: bytes of its memory; 0 for a sparse tensor.
        held: bytes that this rank holds for it.
    """

    keep = Keep.SAVE

    def __init__(self, tensor: Tensor) -> None:
        # The tensor itself would keep alive the graph that it belongs to; and one that stands for a param has no version.
        self.tensor = tensor if is_own(tensor) and tensor.grad_fn is None else tensor.detach()
        self.version = version_of(self.tensor)
        self.whole = self.held = tensor.untyped_storage().nbytes() if tensor.layout == torch.strided else 0

    @property
    def changed(self) -> bool:
        """Whether an operation has written into it since."""
        return version_of(self.tensor) != self.version

    def get(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was changed in place.
        """
        check_version(self.tensor, self.version)
        return self.tensor.detach()


@attrs.define(eq=False)
class Offloaded:
    """A saved tensor that is offloaded, or of which only this rank's piece is kept. It is fetched once for all its uses.

    Attributes:
        keep: OFFLOAD or PARTITION.
        place: where its elements are.
        whole: bytes of the tensor.
        memory: the storage that it had on the device.
        uses: how often it was saved.
    """

    keep: Keep
    place: HostTensor | PartitionedTensor
    whole: int
    memory: "weakref.ref[torch.UntypedStorage]"
    uses: int = 0
    _strides: _Strides = attrs.field(kw_only=True)
    _left: int = 0
    _fetched: Tensor | None = None
    _version: int = 0

    @property
    def held(self) -> int:
        """Bytes that this rank, or its host, holds for it."""
        return self.place.held

    def get(self) -> Tensor:
        """The tensor, a copy that all uses share.

        Raises:
            RuntimeError: a use has changed it in place.
        """
        if self._fetched is None:
            self._fetched, self._left = self.place.fetch(), max(self.uses, 1)
            self._version = version_of(self._fetched)
        flat, self._left = self._fetched, self._left - 1
        check_version(flat, self._version)
        if not self._left:
            self._fetched = None
        return self._strides.restore(flat)


@attrs.define(eq=False)
class TensorStore:
    """Stores saved tensors; one that is saved twice is stored once.

    Attributes:
        group: the ranks that partition tensors.
        log: the tensors that were partitioned since the ranks last compared them.
    """

    group: comm.Group | None = None
    log: PartitionLog = attrs.field(factory=PartitionLog)
    _known: "dict[Any, tuple[weakref.ref[torch.UntypedStorage], weakref.ref[Offloaded]]]" = attrs.field(factory=dict)
    _streams: dict[torch.device, CopyStream] = attrs.field(factory=dict)
    _last: "weakref.ref[HostTensor] | None" = None

    @staticmethod
    def current(group: comm.Group | None, *, compares: bool = True) -> "TensorStore":
        """The current pass's store for this group; outside a pass a new one.

        Args:
            group: the ranks that partition.
            compares: whether a store that is new to the pass compares the ranks' logs at the end of the forward pass.
        """
        pass_ = current_pass()
        if pass_ is None:
            return TensorStore(group)
        stores: list[TensorStore] = pass_.slots.setdefault("tensor_stores", [])
        store = next((store for store in stores if store.group is group), None)
        if store is None:
            store = TensorStore(group)
            stores.append(store)
            if compares:
                pass_.at_forward_end(store.compare)
        return store

    def keep(self, tensor: Tensor, how: Keep) -> Resident | Offloaded:
        """Stores a tensor for the backward pass."""
        if how is Keep.SAVE:
            return Resident(tensor)
        storage = tensor.untyped_storage()
        bits = tensor.is_conj(), tensor.is_neg()
        view = (int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype, bits)
        key = (address_of(tensor), view, version_of(tensor), how)
        known = self._known.get(key)
        kept = known[1]() if known is not None and known[0]() is storage else None
        if kept is None:
            flat, strides = compact(tensor)
            place = self._to_host(flat) if how is Keep.OFFLOAD else self._partition(flat)
            kept = Offloaded(how, place, flat.nbytes, weakref.ref(storage), strides=strides)
            self._known[key] = kept.memory, weakref.ref(kept)
        kept.uses += 1
        return kept

    def hold_device(self) -> None:
        """Orders later work of the devices, such as in-place writes, after the copies to the host so far."""
        for stream in self._streams.values():
            stream.hold_device()

    def compare(self) -> None:
        """Checks, before the backward pass, that all ranks of the group partitioned the same tensors.

        Raises:
            RuntimeError: on all ranks, if they did not.
        """
        if self.group is None or self.group.size == 1:
            return
        if recorder().records:  # the eager step before has compared, and ranks compare what their graphs gather
            self.log.clear()
        else:
            self.log.compare(self.group)

    def _to_host(self, flat: Tensor) -> HostTensor:
        stream = self._streams.setdefault(flat.device, CopyStream(flat.device, "activations"))
        host = HostTensor(stream.to_host(flat), stream, self._last)
        self._last = weakref.ref(host)
        return host

    def _partition(self, flat: Tensor) -> PartitionedTensor:
        if self.group is None:
            raise ValueError(
                "partition: no group is given to partition activations over; pass a group, such as group=mesh['tp']"
            )
        self.log.add(flat)
        return partition(flat, self.group)


# -- hooks ---------------------------------------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class SavedTensorHooks:
    """Saved-tensor hooks: what autograd saves instead of a tensor, and the tensor from it.

    ``torch.autograd.graph.saved_tensors_hooks`` nest, but torch applies only the innermost.
    """

    pack: Callable[[Tensor], Any]
    unpack: Callable[[Any], Tensor]

    @staticmethod
    def in_force() -> "SavedTensorHooks":
        """This thread's hooks. Without any, tensors are kept, and in-place changes raise an error."""
        # Torch has no public name for this; dynamo and AOTAutograd ask in the same way.
        hooks = saved_tensors_hooks_in_force()
        return SavedTensorHooks(*hooks) if hooks else SavedTensorHooks(Resident, lambda kept: kept.get())
