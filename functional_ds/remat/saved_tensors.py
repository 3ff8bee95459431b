"""Where values lie between the forward pass and the backward, and the way back."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base.torch_private import saved_tensors_hooks_in_force, version_of
from functional_ds.step.tape import current_tape

from .cpu_offload import Hosted, Lane
from .partitioned import Account, Divided, divide
from .policy import Keep

__all__ = ["Away", "Form", "Here", "Hooks", "Keeper", "compact"]


@attrs.frozen(eq=False)
class Hooks:
    """What autograd keeps instead of a tensor, and the tensor from it.

    ``torch.autograd.graph.saved_tensors_hooks`` nest, but torch applies the innermost alone.
    """

    pack: Callable[[Tensor], Any]
    unpack: Callable[[Any], Tensor]

    @staticmethod
    def in_force() -> "Hooks":
        """Those of this thread; where there are none, the tensor stays as it is, and a change in place is refused."""
        # Torch has no public name for this; dynamo and AOTAutograd ask in the same way.
        found = saved_tensors_hooks_in_force()
        return Hooks(*found) if found else Hooks(Here, lambda kept: kept.get())


@attrs.frozen
class Form:
    """How a tensor lay in memory.

    Attributes:
        shape: its sizes.
        sizes: those of its elements that have memory of their own; 1 along axes that repeat them.
        stride: how the flat piece is to be seen.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    stride: tuple[int, ...]

    def restore(self, flat: Tensor) -> Tensor:
        """The tensor of a flat piece that ``compact`` gave: the same values, shape and order in memory."""
        return flat.as_strided(self.sizes, self.stride).expand(self.shape)


def compact(tensor: Tensor) -> tuple[Tensor, Form]:
    """The elements that have memory of their own, flat in the order of memory, and the form that undoes it.

    It is a view where the elements lie densely, else a copy. Law: ``form.restore(flat)`` is the tensor, bit for bit, and
    with its strides where it was dense.

    >>> import torch
    >>> flat, form = compact(torch.arange(6).view(2, 3).t().expand(4, 3, 2))
    >>> flat.tolist(), form.restore(flat).shape
    ([0, 1, 2, 3, 4, 5], torch.Size([4, 3, 2]))
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    own = tensor
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            own = own.narrow(axis, 0, 1)
    if not _dense(own.shape, own.stride()):
        own = own.contiguous()
    flat = own.as_strided((own.numel(),), (1,), own.storage_offset())
    return flat, Form(tuple(tensor.shape), tuple(own.shape), tuple(own.stride()))


def _dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill one piece of memory, each its own place."""
    following = 1
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if step != following:
            return False
        following *= size
    return True


class Here:
    """A value that stays where it is.

    Attributes:
        whole: bytes of its memory.
        held: bytes that keeping it takes on this rank.
    """

    keep = Keep.SAVE

    def __init__(self, tensor: Tensor) -> None:
        # The tensor itself would hold on to the graph that it is in.
        self.tensor = tensor.detach() if tensor.grad_fn is not None else tensor
        self.version = version_of(tensor)
        self.whole = self.held = tensor.untyped_storage().nbytes()

    @property
    def changed(self) -> bool:
        """Whether somebody has written into it since."""
        return version_of(self.tensor) != self.version

    def get(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was changed in place.
        """
        if self.changed:
            raise _changed(self.tensor, self.version)
        return self.tensor.detach()


class Away:
    """A value that is elsewhere, whole or in pieces; it comes back once for all its uses.

    Attributes:
        whole: bytes of the value.
        held: bytes that keeping it takes on this rank, or its host.
        uses: how often it was asked to be kept.
        memory: where it was.
    """

    def __init__(
        self, keep: Keep, place: Hosted | Divided, form: Form, whole: int, memory: "weakref.ref[torch.UntypedStorage]"
    ) -> None:
        self.keep, self.place, self.form, self.memory = keep, place, form, memory
        self.whole, self.held = whole, place.held
        self.uses = 0
        self._left, self._here, self._version = 0, None, 0

    _here: Tensor | None

    def get(self) -> Tensor:
        """The value; a copy that all uses share.

        Raises:
            RuntimeError: a use has changed it in place.
        """
        if self._here is None:
            self._here, self._left = self.place.fetch(), max(self.uses, 1)
            self._version = version_of(self._here)
        flat, self._left = self._here, self._left - 1
        if version_of(flat) != self._version:
            raise _changed(flat, self._version)
        if not self._left:
            self._here = None
        return self.form.restore(flat)


def _changed(tensor: Tensor, version: int) -> RuntimeError:
    return RuntimeError(
        f"a tensor of shape {list(tensor.shape)} that the backward pass needs has been modified by an inplace operation: it is "
        f"at version {version_of(tensor)}, expected {version}; use the out-of-place one"
    )


_Place = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype, int, Keep]


@attrs.define(eq=False)
class Keeper:
    """Keeps values; one that is asked for twice is kept once.

    Attributes:
        group: the ranks that divide values.
        account: of what was divided since the ranks last compared it.
    """

    group: comm.Group | None = None
    _known: "dict[_Place, tuple[weakref.ref[torch.UntypedStorage], weakref.ref[Away]]]" = attrs.field(factory=dict)
    _lanes: dict[torch.device, Lane] = attrs.field(factory=dict)
    _last: "weakref.ref[Hosted] | None" = None
    account: Account = attrs.field(factory=Account)

    @staticmethod
    def current(group: comm.Group | None, *, settles: bool = True) -> "Keeper":
        """The open tape's keeper for this group, outside of one a new keeper; ``settles``: ranks agree as the forward ends."""
        tape = current_tape()
        if tape is None:
            return Keeper(group)
        keepers: list[Keeper] = tape.slots.setdefault("keepers", [])
        for keeper in keepers:
            if keeper.group is group:
                return keeper
        keepers.append(Keeper(group))
        if settles:
            tape.at_forward_end(keepers[-1].agree)
        return keepers[-1]

    def keep(self, tensor: Tensor, how: Keep) -> Here | Away:
        """The value, kept so that it can come back."""
        if how is Keep.SAVE:
            return Here(tensor)
        storage = tensor.untyped_storage()
        where = (storage.data_ptr(), int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        place: _Place = (*where, version_of(tensor), how)
        known = self._known.get(place)
        kept = known[1]() if known is not None and known[0]() is storage else None
        if kept is None:
            kept = self._send(tensor, how)
            self._known[place] = weakref.ref(storage), weakref.ref(kept)
        kept.uses += 1
        return kept

    def _send(self, tensor: Tensor, how: Keep) -> Away:
        flat, form = compact(tensor)
        return Away(
            how,
            self._host(flat) if how is Keep.OFFLOAD else self._divide(flat),
            form,
            flat.nbytes,
            weakref.ref(tensor.untyped_storage()),
        )

    def _host(self, flat: Tensor) -> Hosted:
        if flat.device not in self._lanes:
            self._lanes[flat.device] = Lane(flat.device)
        lane = self._lanes[flat.device]
        hosted = Hosted(lane.away(flat), lane, self._last)
        self._last = weakref.ref(hosted)
        return hosted

    def _divide(self, flat: Tensor) -> Divided:
        if self.group is None:
            raise ValueError("partition: no group is given to divide activations over; pass group=mesh['tp'], say")
        self.account.add(flat)
        return divide(flat, self.group)

    def agree(self) -> None:
        """Before the backward pass: all ranks of the group divided the same values, or an error on all."""
        if self.group is not None and self.group.size > 1:
            self.account.settle(self.group)
