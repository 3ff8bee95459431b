"""The record of a collective: its reference implementation, transpose, cost, and back-end implementations."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any, Literal, NoReturn, Protocol

import attrs
from torch import Tensor

from functional_ds.comm.backends.primitives import GlooPrimitive, NcclPrimitive, Options


class Variance(Enum):
    """How the ranks of a group hold a value, and its gradient.

    | the value | the ranks hold | their gradients of it |
    |---|---|---|
    | replicated | equal bits, used differently by each rank | partial: their sum is the gradient |
    | invariant | equal bits, used in the same way by all ranks | invariant: each rank has the whole gradient |
    | varying | different values | varying: each rank has the gradient of its value |
    | partial | terms whose sum is the value | replicated: all terms have the same gradient |
    """

    REPLICATED = "replicated"
    INVARIANT = "invariant"
    VARYING = "varying"
    PARTIAL = "partial"

    @property
    def dual(self) -> "Variance":
        """The variance of the gradient.

        Law: ``v.dual.dual = v``; a collective from ``a`` to ``b`` has a transpose from ``b.dual`` to ``a.dual``.
        """
        return _DUAL.get(self, self)

    @property
    def equal(self) -> bool:
        """Whether all ranks hold equal bits."""
        return self in (Variance.REPLICATED, Variance.INVARIANT)


_DUAL = {Variance.REPLICATED: Variance.PARTIAL, Variance.PARTIAL: Variance.REPLICATED}


class Handle(Protocol):
    """A collective that has been started."""

    @property
    def ended(self) -> float | None:
        """When it ended (``time.perf_counter``), if that is known without waiting."""
        ...

    def wait(self) -> list[Tensor]:
        """Blocks until this rank's results are available; returns them."""
        ...

    def poll(self, timeout: float) -> bool:
        """Whether the results are available; waits up to ``timeout`` seconds for them."""
        ...


@attrs.define(eq=False)
class WatchedHandle:
    """A started collective with a function around its ``wait``.

    Attributes:
        inner: the collective.
        waits: is called with the function that waits, and returns its results.
        apart: makes a context manager, inside which waits and polls run.
    """

    inner: Handle
    waits: Callable[[Callable[[], list[Tensor]]], list[Tensor]]
    apart: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def ended(self) -> float | None:
        """When the collective ended."""
        return self.inner.ended

    def wait(self) -> list[Tensor]:
        """The results."""
        return self.waits(self._results)

    def poll(self, timeout: float) -> bool:
        """Whether the results are available."""
        with self.apart():
            return self.inner.poll(timeout)

    def _results(self) -> list[Tensor]:
        with self.apart():
            return self.inner.wait()


@attrs.frozen(eq=False)
class CallContext:
    """A call's options, this rank's place in the group, and the number of ranks."""

    options: Options
    rank: int
    n: int

    def __getitem__(self, option: str) -> Any:
        return self.options[option]


def _flat(leaf: Tensor, here: CallContext) -> Tensor:
    return leaf if leaf.dim() == 1 else leaf.reshape(-1)


def _same_shape(piece: Tensor, leaf: Tensor, here: CallContext) -> Tensor:
    return piece if piece.dim() == leaf.dim() else piece.reshape(leaf.shape)


@attrs.frozen
class Traffic:
    """The traffic of a collective on the busiest link for an optimal algorithm: the "bus bandwidth" of nccl-tests.

    Attributes:
        role: "gather" if all ranks get the whole value, "reduction" if values are reduced, "message" for point-to-point
            messages, "exchange" otherwise.
        passes: how many times the value crosses the link; 2 for an all-reduce, which reduces and then gathers.
        keeps_share: whether 1/n of the value stays on its rank.
        of_result: whether the value is the result, n times a rank's input, instead of the input.
    """

    role: Literal["gather", "reduction", "exchange", "message"] = "exchange"
    passes: int = 1
    keeps_share: bool = False
    of_result: bool = False

    def bus(self, n: int) -> float:
        """Bytes on the busiest link of n ranks, as a factor of the value's bytes."""
        return self.passes * ((n - 1) / n if self.keeps_share and n else 1.0)


_NO_TRAFFIC = Traffic()


def _silent(leaf: Tensor, here: CallContext) -> int:
    return 0


def _no_exchange(connections: Any, payload: Tensor, options: Options) -> NoReturn:
    raise NotImplementedError("a row that is computed alone exchanges nothing")


def _of_payload(shape: Sequence[int], here: CallContext) -> Sequence[int]:
    return shape


@attrs.frozen(eq=False)
class Collective:
    """The definition of a collective: one row of ``TABLE``.

    A collective that communicates must define ``volume``, ``result``, ``traffic``, ``gloo`` and ``nccl``; one that does not
    defines ``alone``.

    Attributes:
        name: as in ``comm.<name>``.
        denotation: the reference implementation, from all members' inputs, in rank order, to all members' outputs.
        adjoint: the call that is the transpose, or None if there is none (as for max).
        volume: elements that this rank sends.
        result: the shape of the exchange's result, from the shape of this rank's payload.
        traffic: the load on links.
        gloo, nccl: the exchange of a payload on that back end.
        joins: whether calls may be coalesced into one, which requires that no result depends on its position in a message.
        shares: weights by rank of the group: how this rank's volume divides among receivers. None for equal parts to all
            others.
        by_node: whether it is hierarchical (``Group.ranks_per_node``), so that links between nodes carry less.
        pack: converts a leaf to the payload of an exchange; payloads of several leaves are concatenated along the last dim.
        unpack: converts the leaf's slice of the exchange's result to the leaf's result.
        check: raises ValueError for errors that this rank can detect alone.
        shape: what must be equal on all ranks; by default the leaf's shape.
        alone: for a collective without communication, this rank's result from its input.
        members: the ranks of the group that take part; by default all.
        order: the key of a sequence of calls; all members must make the calls of a sequence in one order. For a message it is
            (source, destination, tag).
        reads: whether this rank's input is read; a receiver's only gives the shape.
        private: options that may differ between ranks; the denotation gets a list of them, with an entry for each member.
        reconcile: raises MismatchError if the members' private options contradict each other.
        title: the name and options to show in messages; by default the row's name and all options.
        takes: the ``Variance`` of the input.
        gives: the ``Variance`` of the result; the transpose takes ``gives.dual`` and gives ``takes.dual``.
    """

    name: str
    denotation: Callable[[Sequence[Tensor], Options], list[Tensor]]
    adjoint: Callable[[Options], "Call | None"] = attrs.field(default=lambda options: None)
    volume: Callable[[Tensor, CallContext], int] = _silent
    result: Callable[[Sequence[int], CallContext], Sequence[int]] = _of_payload
    traffic: Traffic = _NO_TRAFFIC
    gloo: GlooPrimitive = _no_exchange
    nccl: NcclPrimitive = _no_exchange
    joins: bool = False
    shares: Callable[[CallContext], Mapping[int, int] | None] = attrs.field(default=lambda here: None)
    by_node: bool = False
    pack: Callable[[Tensor, CallContext], Tensor] = _flat
    unpack: Callable[[Tensor, Tensor, CallContext], Tensor] = _same_shape
    check: Callable[[Tensor, CallContext], None] = attrs.field(default=lambda leaf, here: None)
    shape: Callable[[Tensor, CallContext], Sequence[int | str]] = attrs.field(default=lambda leaf, here: leaf.shape)
    alone: Callable[[Tensor, CallContext], Tensor] | None = None
    members: Callable[[Options, int], Sequence[int]] = attrs.field(default=lambda options, n: range(n))
    order: Callable[[Options], Hashable] = attrs.field(default=lambda options: ())
    reads: Callable[[CallContext], bool] = attrs.field(default=lambda here: True)
    private: tuple[str, ...] = ()
    reconcile: Callable[[Options], None] = attrs.field(default=lambda options: None)
    title: Callable[[Options, int], tuple[str, Options]] | None = None
    takes: Variance = Variance.VARYING
    gives: Variance = Variance.VARYING

    def __attrs_post_init__(self) -> None:
        unsaid = {"volume": _silent, "result": _of_payload, "traffic": _NO_TRAFFIC, "gloo": _no_exchange, "nccl": _no_exchange}
        lacking = [part for part, default in unsaid.items() if getattr(self, part) is default]
        if self.alone is None and lacking:
            raise TypeError(f"Collective {self.name!r} communicates, so it needs {', '.join(lacking)}")

    def __repr__(self) -> str:
        return f"Collective({self.name!r})"

    @property
    def is_message(self) -> bool:
        """Whether it is a point-to-point message."""
        return self.traffic.role == "message"

    def on_shapes(self, leaf: Tensor, here: CallContext) -> Tensor:
        """The result for a meta tensor: a meta tensor of the result's shape."""
        payload = self.pack(leaf, here)
        return self.unpack(payload.new_empty(list(self.result(payload.shape, here))), leaf, here)


def _kind(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return dtype if tensor.device.type in ("cpu", "meta") else f"{tensor.device.type} {dtype}"


@attrs.frozen(eq=False)
class Call:
    """A collective with its options.

    Attributes:
        collective: its row of the table.
        options: by name.
        out: tensors, one per leaf, that a back end may write the results into; see ``options_for``. They may be the leaves.
    """

    collective: Collective
    options: Options = attrs.field(factory=dict)
    out: Sequence[Tensor] | None = None

    def on_nodes(self, ranks_per_node: int) -> "Call":
        """The call in a group with that number of ranks per node."""
        if ranks_per_node == 1 or not self.collective.by_node:
            return self
        return attrs.evolve(self, options={**self.options, "ranks_per_node": ranks_per_node})

    def options_for(self, places: Sequence[int], payload: Tensor) -> Options:
        """The options for the back end, with "out" if the payload is one leaf that has an output tensor on its device."""
        if self.out is None or len(places) > 1 or self.out[places[0]].device != payload.device:
            return self.options
        return {**self.options, "out": self.out[places[0]]}

    def title(self, rank: int) -> tuple[str, Options]:
        """The name and options as the program on this rank wrote them."""
        row = self.collective
        return (row.name, self.options) if row.title is None else row.title(self.options, rank)

    def takes(self) -> Variance:
        """The ``Variance`` of the call's input: for sums the row's, for other reductions varying."""
        row = self.collective
        return row.takes if self.options.get("op", "sum") == "sum" else Variance.VARYING

    def shown(self, rank: int) -> str:
        """The call as text."""
        name, options = self.title(rank)
        return f"{name}({', '.join(f'{k}={v!r}' for k, v in options.items())})"

    def signature(self, tensors: Sequence[Tensor], here: CallContext) -> str:
        """The call with its dtypes and shapes, as text."""
        shapes = (list(self.collective.shape(t, here)) for t in tensors)
        kinds = ", ".join(f"{_kind(t)}{shape}" for t, shape in zip(tensors, shapes, strict=True))
        return f"{self.shown(here.rank)} of [{kinds}]".replace("'*'", "*")

    def agreement(self, tensors: Sequence[Tensor], here: CallContext) -> tuple[Any, ...]:
        """What must be equal on every member."""
        row = self.collective
        options = tuple([item for item in self.options.items() if item[0] not in row.private])
        return (row.name, options, tuple([(t.dtype, t.device.type, tuple(row.shape(t, here))) for t in tensors]))

    def private(self) -> Options:
        """The options that may differ between ranks."""
        return {name: self.options[name] for name in self.collective.private}

    def merged(self, private: Sequence[Options]) -> Options:
        """The options with every member's private ones, which must not contradict each other."""
        if not self.collective.private:
            return self.options
        merged = {**self.options, **{name: [member[name] for member in private] for name in self.collective.private}}
        self.collective.reconcile(merged)
        return merged
