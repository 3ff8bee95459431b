"""Traces a simulated rank's operations and collectives, with a checksum of each result."""

import ctypes
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, NamedTuple

import attrs
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from functional_ds.base.torch_private import TorchDispatchMode, backward_pass, schema_of, storage_id
from functional_ds.base.torch_replaced import mode_left
from functional_ds.base.tree import setting
from functional_ds.comm.record.group import Group, call_site
from functional_ds.comm.table.collective import Call, Variance

from .linearity import UNLIKE

_SWEEP = 1024  # after that many new storages, freed ones are removed
_PLAIN, _STRIDED = (Tensor, nn.Parameter), torch.strided

Kind = Literal["first use", "operator", "draw", "write", "call", "declaration", "gradient"]


class Values(tuple[int, ...]):
    """The value numbers of an argument: one for a tensor, several for a list."""

    __slots__ = ()


class Scalar(int):
    """The place of a number among ``OpTrace.scalars``."""


class TracedGroup(NamedTuple):
    """The group of a collective or declaration, the same on all of its ranks."""

    name: str
    ranks: tuple[int, ...]


class TracedEvent(NamedTuple):
    """An operation, collective or declaration of a rank.

    Attributes:
        kind: its kind.
        name: the operator's name without its overload, or the collective's.
        site: the file and line of the program.
        backward: whether it belongs to a backward pass.
        inputs: numbers of values.
        outputs: numbers of values.
        operands: the arguments of an operator that is not linear in all of them alike: ``Values`` and ``Scalar``.
        group: the group of a collective or declaration.
        takes: the declared variance, or that of the collective's input.
        gives: the variance of the collective's results.
        transpose_of: for the backward pass of a collective, the collective and its source line.
    """

    kind: Kind
    name: str
    site: str
    backward: bool
    inputs: tuple[int, ...]
    outputs: list[int]
    operands: tuple[Any, ...] = ()
    group: TracedGroup | None = None
    takes: Variance | None = None
    gives: Variance | None = None
    transpose_of: str = ""


@attrs.frozen(eq=False)
class _TracedOperator:
    """What the trace needs to know of an operator of torch.

    Attributes:
        name: its name without its overload and underscores.
        by_tensor: whether it does the same to each tensor of lists.
        unlike: whether its arguments play different parts.
        writes: the places and names of the arguments that it writes to.
        random: whether it may draw random numbers, unless its dropout probability is zero.
        dropout: the place of that argument; None if it has none.
    """

    name: str
    by_tensor: bool
    unlike: bool
    writes: tuple[tuple[int, str], ...]
    random: bool
    dropout: int | None

    def written(self, args: Sequence[Any], kwargs: Any) -> list[Tensor]:
        """The tensors that a call writes to."""
        return _tensors([args[place] if place < len(args) else kwargs.get(name) for place, name in self.writes])

    def draws(self, args: Sequence[Any], kwargs: Any) -> bool:
        """Whether a call of a random operator draws."""
        return self.dropout is None or bool(
            (args[self.dropout] if self.dropout < len(args) else kwargs.get("dropout_p", 0.0)) != 0
        )


@cache
def _operator_of(func: Any) -> _TracedOperator:
    schema = schema_of(func)
    private, arguments = schema.name.partition("::")[2], list(enumerate(schema.arguments))
    name = private.removeprefix("_foreach_").strip("_")
    return _TracedOperator(
        name,
        private.startswith("_foreach_"),
        name in UNLIKE,
        tuple((place, x.name) for place, x in arguments if x.alias_info and x.alias_info.is_write),
        torch.Tag.nondeterministic_seeded in func.tags,
        next((place for place, x in arguments if x.name == "dropout_p"), None),
    )


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
        shapes: the sizes of each value, by its number.
        bits: a checksum of each value's bytes; None if not computed.
        zero: whether all bytes of a value are zero.
        scalars: numbers that operators got as operands.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[TracedEvent] = []
        self.shapes: list[tuple[int, ...]] = []
        self.bits: list[int | None] = []
        self.zero: list[bool] = []
        self.scalars: list[float] = []
        self._memory: dict[int, _TracedStorage] = {}
        self._room = _SWEEP
        self._quiet = False

    @property
    def index(self) -> int:
        """The index of the last event."""
        return len(self.events) - 1

    def same_program(self, other: "OpTrace") -> bool:
        """Whether the traces differ in checksums, zeros and scalars alone."""
        return self.events == other.events and self.shapes == other.shapes

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Records nothing inside the block."""
        with mode_left(self) as left, setting(self, _quiet=not left):
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._quiet:
            return func(*args, **kwargs)
        operator = _operator_of(func)
        values = (*args, *kwargs.values())
        if operator.unlike or operator.by_tensor:
            operands = tuple(map(self._operand, values))
        else:
            operands = (Values(map(self.number, _tensors(values))),)
        out = func(*args, **kwargs)
        written, made = operator.written(args, kwargs) if operator.writes else [], _tensors((out,))
        if written:
            made = [tensor for tensor in made if not any(tensor is other for other in written)]
        if operator.by_tensor and isinstance(operands[0], Values):
            for place in range(len(operands[0])):
                sliced = tuple(Values(x[place : place + 1]) if isinstance(x, Values) else x for x in operands)
                self._operation("operator", operator, sliced, written[place : place + 1], made[place : place + 1])
        elif written or made:
            kind: Kind = "draw" if operator.random and operator.draws(args, kwargs) else "operator"
            self._operation(kind, operator, operands, written, made)
        return out

    def _operation(
        self, kind: Kind, operator: _TracedOperator, operands: Any, written: list[Tensor], made: list[Tensor]
    ) -> None:
        inputs = tuple([number for operand in operands if type(operand) is Values for number in operand])
        event = self._event(kind, operator.name, inputs, operands if operator.unlike else ())
        self._define(event, [*written, *made], writes=len(written))

    # -- collectives and declarations ----------------------------------------------------------------------------------

    def call(self, call: Call, leaves: Sequence[Tensor], group: Group, transposed: str | None) -> TracedEvent:
        """Records the start of a collective; ``give`` records its results."""
        forward = None if transposed is None else call.collective.adjoint(call.options)
        return self._event(
            "call",
            call.title(group.rank)[0],
            tuple(map(self.number, leaves)),
            group=TracedGroup(group.name, group.ranks),
            takes=call.takes(),
            gives=call.collective.gives,
            transpose_of="" if forward is None else f"{forward.collective.name} at {transposed}",
        )

    def give(self, event: TracedEvent, results: Sequence[Tensor]) -> None:
        """Records the results of an event as new values."""
        with self.paused():
            self._define(event, results, writes=0)

    def declare(self, variance: Variance, leaves: Sequence[Tensor], group: Group, *, gradient: bool, site: str) -> None:
        """Records a declaration of leaves or gradients."""
        kind: Kind = "gradient" if gradient else "declaration"
        with self.paused():
            inputs, traced = tuple(map(self.number, leaves)), TracedGroup(group.name, group.ranks)
            event = self._event(kind, variance.value, inputs, site=site, group=traced, takes=variance)
            self._define(event, leaves, writes=0)

    # -- values --------------------------------------------------------------------------------------------------------

    def number(self, tensor: Tensor) -> int:
        """The number of a tensor's value, which may be new."""
        memory = self._memory.get(storage_id(tensor)) if _is_plain(tensor) else None
        number = None if memory is None else memory.tensors.get(_layout(tensor))
        if number is not None:
            return number
        with self.paused():
            # A tensor of a known storage is a view that was made before the last write.
            event = self._event("operator", "view", (memory.whole,)) if memory else self._event("first use", "", ())
            self._define(event, [tensor], writes=0)
            return event.outputs[0]

    def _operand(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return Values((self.number(value),))
        if isinstance(value, (list, tuple)):
            return Values([self.number(item) for item in value if isinstance(item, Tensor)]) or None
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return None
        self.scalars.append(value)
        return Scalar(len(self.scalars) - 1)

    def _event(
        self, kind: Kind, name: str, inputs: tuple[int, ...], operands: tuple[Any, ...] = (), *, site: str = "", **fields: Any
    ) -> TracedEvent:
        event = TracedEvent(kind, name, site or call_site(), backward_pass() != -1, inputs, [], operands, **fields)
        self.events.append(event)
        return event

    def _define(self, event: TracedEvent, tensors: Sequence[Tensor], *, writes: int) -> None:
        """New values for the tensors, of which the first ``writes`` were written into."""
        content = "empty" not in event.name  # else the results are not initialized
        for place, tensor in enumerate(tensors):
            plain = _is_plain(tensor)
            bits, zero = _checksum(tensor) if plain and content else (None, False)
            number = self._value(event, tensor.shape, bits, zero)
            if plain:
                self._place(tensor, number, written=place < writes)

    def _value(self, event: TracedEvent, shape: tuple[int, ...], bits: int | None, zero: bool) -> int:
        self.shapes.append(shape)
        self.bits.append(bits)
        self.zero.append(zero)
        event.outputs.append(len(self.bits) - 1)
        return len(self.bits) - 1

    def _place(self, tensor: Tensor, number: int, *, written: bool) -> None:
        storage = storage_id(tensor)
        memory = self._memory.get(storage)
        if memory is None:
            self._memory[storage] = memory = _TracedStorage(StorageWeakRef(tensor.untyped_storage()), number)
            if len(self._memory) > self._room:
                self._forget()
        elif written:
            memory.tensors.clear()
            covers = tensor.nbytes == tensor.untyped_storage().nbytes()
            memory.whole = number if covers else self._joined(memory.whole, number)
        memory.tensors[_layout(tensor)] = number

    def _joined(self, whole: int, part: int) -> int:
        """The value of a storage after a write to a part of it."""
        return self._value(self._event("write", "write", (whole, part)), (), None, zero=False)

    def _forget(self) -> None:
        self._memory = {number: memory for number, memory in self._memory.items() if not memory.reference.expired()}
        self._room = len(self._memory) + _SWEEP


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.layout is _STRIDED


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)


def _checksum(tensor: Tensor) -> tuple[int | None, bool]:
    """A checksum of the bytes, and whether all elements are zero; (None, False) for tensors without values."""
    n_bytes = tensor.nbytes
    if not n_bytes and not tensor.is_meta:
        return 0, True
    if not tensor.is_cpu or tensor.is_conj() or tensor.is_neg():
        if tensor.is_meta:
            return None, False
        tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    data = (ctypes.c_char * n_bytes).from_address(tensor.data_ptr())  # NumPy lacks some dtypes
    bits = zlib.crc32(data)
    if ctypes.string_at(data, tensor.itemsize).rstrip(b"\x80").strip(b"\0"):
        return bits, False
    if data.raw == bytes(n_bytes):
        return bits, True
    countable = tensor.is_floating_point() or tensor.is_complex()  # -0.0 is zero
    return bits, countable and tensor.itemsize > 1 and not tensor.detach().count_nonzero()  # torch cannot count float8


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, Tensor)]
    return found
