"""Traces a simulated rank's operations and collectives, with a checksum of each result."""

import ctypes
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import attrs
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from functional_ds.base.torch_private import TorchDispatchMode, backward_pass, schema_of, storage_id
from functional_ds.comm.record.group import Group, call_site
from functional_ds.comm.table.collective import Call, Variance

from .declarations import raw_bytes
from .linearity import ARITHMETIC, makes_constants

_SWEEP = 1024  # after that many new storages, freed ones are removed

Kind = Literal["first use", "operator", "draw", "write", "call", "declaration", "gradient"]


class Values(tuple[int, ...]):
    """The value numbers of an argument: one for a tensor, several for a list."""


@attrs.frozen(eq=False)
class TracedValue:
    """A value of the trace.

    Attributes:
        key: equal for values that come from the same operations on the same inputs, at the same lines.
        bits: a checksum of its bytes; None if not computed.
        zero: whether all bytes are zero.
        shape: its sizes.
    """

    key: int
    bits: int | None
    zero: bool
    shape: tuple[int, ...]


@attrs.define(eq=False)
class TracedEvent:
    """An operation, collective or declaration of a rank.

    Attributes:
        kind: its kind.
        name: the operator's name without its overload, or the collective's.
        site: the file and line of the program.
        backward: whether it belongs to a backward pass.
        inputs: numbers of values.
        outputs: numbers of values.
        operands: an operator's arguments, with ``Values`` for tensors.
        group: the group of a collective or declaration.
        call: the collective.
        variance: the declared variance.
        transposed: for a backward pass, the source line of the forward call.
        key: identifies collectives, declarations and arithmetic on all ranks; else 0.
    """

    kind: Kind
    name: str
    site: str
    backward: bool
    inputs: tuple[int, ...]
    outputs: list[int] = attrs.field(factory=list)
    operands: tuple[Any, ...] = ()
    group: Group | None = None
    call: Call | None = None
    variance: Variance | None = None
    transposed: str | None = None
    key: int = 0


@attrs.define(eq=False)
class _TracedStorage:
    """A storage: the value of all of it, and the values of tensors in it.

    The weak reference prevents the storage's id from being reused.
    """

    reference: StorageWeakRef
    whole: int
    tensors: dict[tuple[Any, ...], int] = attrs.field(factory=dict)


class OpTrace(TorchDispatchMode):
    """Records the thread's operations while it is active.

    Attributes:
        events: in order.
        values: by number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[TracedEvent] = []
        self.values: list[TracedValue] = []
        self._memory: dict[int, _TracedStorage] = {}
        self._room = _SWEEP
        self._times: Counter[int] = Counter()
        self._quiet = False

    @property
    def index(self) -> int:
        """The index of the last event."""
        return len(self.events) - 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Records nothing inside the block."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._quiet:
            return func(*args, **kwargs)
        operands = tuple(self._operand(value) for value in (*args, *kwargs.values()))
        out = func(*args, **kwargs)
        written = _written(func, args, kwargs)
        known = set(map(id, written))
        made = [tensor for tensor in _tensors([out]) if id(tensor) not in known]
        name = schema_of(func).name.partition("::")[2]
        if name.startswith("_foreach_") and isinstance(operands[0], Values):
            for place in range(len(operands[0])):
                sliced = tuple(Values(x[place : place + 1]) if isinstance(x, Values) else x for x in operands)
                self._operator(name.removeprefix("_foreach_"), sliced, written[place : place + 1], made[place : place + 1])
        elif written or made:
            draws = torch.Tag.nondeterministic_seeded in func.tags and _probability(func, args, kwargs) != 0
            self._operator(name, operands, written, made, draws=draws)
        return out

    def _operator(
        self, name: str, operands: tuple[Any, ...], written: Sequence[Tensor], made: Sequence[Tensor], *, draws: bool = False
    ) -> None:
        inputs = tuple(number for operand in operands if isinstance(operand, Values) for number in operand)
        event = self._event("draw" if draws else "operator", name.strip("_"), inputs, operands=operands)
        self._define(event, [*written, *made], writes=len(written))

    # -- collectives and declarations ----------------------------------------------------------------------------------

    def call(self, call: Call, leaves: Sequence[Tensor], group: Group, transposed: str | None) -> TracedEvent:
        """Records the start of a collective; ``give`` records its results."""
        inputs = tuple(self.number(leaf) for leaf in leaves)
        name = call.title(group.rank)[0]
        return self._event("call", name, inputs, group=group, call=call, transposed=transposed)

    def give(self, event: TracedEvent, results: Sequence[Tensor]) -> None:
        """Records the results of an event as new values."""
        with self.paused():
            self._define(event, results, writes=0)

    def declare(self, variance: Variance, leaves: Sequence[Tensor], group: Group, *, gradient: bool, site: str) -> None:
        """Records a declaration of leaves or gradients."""
        with self.paused():
            inputs = tuple(self.number(leaf) for leaf in leaves)
            event = self._event(
                "gradient" if gradient else "declaration", variance.value, inputs, group=group, variance=variance
            )
            event.site = site
            self._define(event, leaves, writes=0)

    # -- values --------------------------------------------------------------------------------------------------------

    def number(self, tensor: Tensor) -> int:
        """The number of a tensor's value, which may be new."""
        memory = self._memory.get(storage_id(tensor)) if _is_plain(tensor) else None
        number = None if memory is None else memory.tensors.get(_layout(tensor))
        if number is not None:
            return number
        with self.paused():
            if memory is None:
                event = self._event("first use", "", ())
            else:  # a view that was made before the last write
                event = self._event("operator", "view", (memory.whole,), operands=(Values((memory.whole,)),))
            self._define(event, [tensor], writes=0)
            return event.outputs[0]

    def _operand(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return Values((self.number(value),))
        if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
            return Values(self.number(item) for item in value if isinstance(item, Tensor))
        return value

    def _event(self, kind: Kind, name: str, inputs: tuple[int, ...], **fields: Any) -> TracedEvent:
        event = TracedEvent(kind, name, call_site(), backward_pass() != -1, inputs, **fields)
        if event.group is not None:  # its ranks make these calls in one order
            event.key = self._new_key(kind, name, event.group.name)
        elif name in ARITHMETIC:
            event.key = self._new_key(kind, name, event.site)
        self.events.append(event)
        return event

    def _new_key(self, *what: Any) -> int:
        key = hash(what)
        self._times[key] += 1
        return hash((key, self._times[key]))

    def _define(self, event: TracedEvent, tensors: Sequence[Tensor], *, writes: int) -> None:
        """New values for the tensors, of which the first ``writes`` were written into."""
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        key = event.key
        if event.group is None:
            alike = event.kind == "draw" or makes_constants(event.name)  # independent of the inputs
            inputs = () if alike else tuple(self.values[number].key for number in event.inputs)
            key = self._new_key(event.kind, event.name, event.site, inputs, shapes)
        for place, tensor in enumerate(tensors):
            bits, zero = _checksum(tensor) if _has_content(event.name) else (None, False)
            self.values.append(TracedValue(hash((key, place)), bits, zero, shapes[place]))
            number = len(self.values) - 1
            event.outputs.append(number)
            if _is_plain(tensor):
                self._place(tensor, number, written=place < writes)

    def _place(self, tensor: Tensor, number: int, *, written: bool) -> None:
        storage = storage_id(tensor)
        memory = self._memory.get(storage)
        if memory is None:
            self._memory[storage] = memory = _TracedStorage(StorageWeakRef(tensor.untyped_storage()), number)
            self._forget()
        elif written:
            memory.tensors.clear()
            memory.whole = number if _covers(tensor) else self._joined(memory.whole, number)
        memory.tensors[_layout(tensor)] = number

    def _joined(self, whole: int, part: int) -> int:
        """The value of a storage after a write to a part of it."""
        key = hash(("write", self.values[whole].key, self.values[part].key))
        self.values.append(TracedValue(key, None, False, ()))
        event = self._event("write", "write", (whole, part), operands=(Values((whole, part)),))
        event.outputs.append(len(self.values) - 1)
        return event.outputs[0]

    def _forget(self) -> None:
        if len(self._memory) > self._room:
            self._memory = {number: memory for number, memory in self._memory.items() if not memory.reference.expired()}
            self._room = len(self._memory) + _SWEEP


def _has_content(name: str) -> bool:
    """Whether an operator's result is initialized."""
    return "empty" not in name


def _probability(func: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """The dropout probability of an attention operator; None if it has none."""
    place = next((place for place, argument in enumerate(schema_of(func).arguments) if argument.name == "dropout_p"), None)
    return None if place is None else args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)


def _covers(tensor: Tensor) -> bool:
    return tensor.nbytes == tensor.untyped_storage().nbytes()


def _checksum(tensor: Tensor) -> tuple[int | None, bool]:
    """A checksum of the bytes, and whether all elements are zero; (None, False) for tensors without values."""
    if not _is_plain(tensor) or tensor.is_meta:
        return None, False
    if not tensor.nbytes:
        return 0, True
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        tensor = raw_bytes(tensor).view(-1).view(tensor.dtype)
    data = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())  # NumPy lacks some dtypes
    *low, high = data[: tensor.itemsize]
    if any(low) or high & 0x7F:
        return zlib.crc32(data), False
    countable = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor  # -0.0 is zero; torch cannot count float8
    return zlib.crc32(data), not countable.detach().count_nonzero()


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    flat = (item for value in values for item in (value if isinstance(value, (list, tuple)) else (value,)))
    return [item for item in flat if isinstance(item, Tensor)]


def _written(func: Any, args: Sequence[Any], kwargs: Any) -> list[Tensor]:
    """The tensors that an operator writes to."""
    if not schema_of(func).is_mutable:
        return []
    places = enumerate(schema_of(func).arguments)
    given = [args[i] if i < len(args) else kwargs.get(a.name) for i, a in places if a.alias_info and a.alias_info.is_write]
    return _tensors(given)
