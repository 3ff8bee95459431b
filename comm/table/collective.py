"""The record of a collective: its denotation, transpose, cost, and how backends run it."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NoReturn, Protocol

import attrs
from torch import Tensor

from functional_ds.comm.backends.primitives import GlooPrimitive, NcclPrimitive, Options

from .variance import Variance

__all__ = ["Call", "Collective", "Handle", "Here", "Traffic"]


class Handle(Protocol):
    """A collective under way."""

    @property
    def ended(self) -> float | None:
        """When it ended (``time.perf_counter``), if that is known without a wait."""
        ...

    def wait(self) -> list[Tensor]:
        """Blocks until this rank's results are there; returns them."""
        ...

    def poll(self, timeout: float) -> bool:
        """Whether a wait would return at once; waits up to ``timeout`` seconds for that."""
        ...


@attrs.define(eq=False)
class WatchedHandle:
    """A call under way, the wait for which is watched.

    Attributes:
        inner: the call.
        waits: waits by the function that it is given.
        apart: what that function, and a poll, run within.
    """

    inner: Handle
    waits: Callable[[Callable[[], list[Tensor]]], list[Tensor]]
    apart: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def ended(self) -> float | None:
        """As the call says."""
        return self.inner.ended

    def wait(self) -> list[Tensor]:
        """The results."""
        return self.waits(self._results)

    def poll(self, timeout: float) -> bool:
        """As the call says."""
        with self.apart():
            return self.inner.poll(timeout)

    def _results(self) -> list[Tensor]:
        with self.apart():
            return self.inner.wait()


@attrs.frozen(eq=False)
class Here:
    """A call's options, this rank's place in the group, and the number of ranks."""

    options: Options
    rank: int
    n: int

    def __getitem__(self, option: str) -> Any:
        return self.options[option]


def _everyone(options: Options, n: int) -> Sequence[int]:
    return range(n)


def _in_one_order(options: Options) -> Hashable:
    return ()


def _flat(leaf: Tensor, here: Here) -> Tensor:
    return leaf if leaf.dim() == 1 else leaf.reshape(-1)


def _same_shape(piece: Tensor, leaf: Tensor, here: Here) -> Tensor:
    return piece if piece.dim() == leaf.dim() else piece.reshape(leaf.shape)


def _own_shape(leaf: Tensor, here: Here) -> Sequence[int]:
    return leaf.shape


def _no_check(leaf: Tensor, here: Here) -> None:
    return None


def _always(here: Here) -> bool:
    return True


def _no_transpose(options: Options) -> "Call | None":
    return None


def _nothing_private(options: Options) -> None:
    return None


def _to_all_alike(here: Here) -> None:
    return None


@attrs.frozen
class Traffic:
    """What the busiest link carries of a collective's value, whatever the algorithm, as nccl-tests defines it.

    Attributes:
        role: "gather" where it makes a value whole on all ranks, "reduction" where it adds up, "message" between two ranks,
            "exchange" otherwise.
        passes: how often the value passes: twice for an all-reduce, once to add and once to hand out.
        keeps_share: whether a rank's own n-th of the value stays where it is.
        of_result: whether the value is the result, n times a rank's input; else it is the input.
    """

    role: Literal["gather", "reduction", "exchange", "message"] = "exchange"
    passes: int = 1
    keeps_share: bool = False
    of_result: bool = False

    def bus(self, n: int) -> float:
        """The value's bytes that the busiest of n ranks' links carries, as a factor."""
        return self.passes * ((n - 1) / n if self.keeps_share and n else 1.0)


_NO_TRAFFIC = Traffic()


def _silent(leaf: Tensor, here: Here) -> int:
    return 0


def _no_exchange(connections: Any, payload: Tensor, options: Options) -> NoReturn:
    raise NotImplementedError("a row that is computed alone exchanges nothing")


def _of_payload(shape: Sequence[int], here: Here) -> Sequence[int]:
    return shape


@attrs.frozen(eq=False)
class Collective:
    """One row of the table: all that the library knows of a collective.

    A row communicates unless it is computed ``alone``. Then it says its ``volume``, ``result`` and ``traffic``, and what
    carries it over ``gloo`` and ``nccl``.

    Attributes:
        name: as in ``comm.<name>``.
        denotation: the meaning; from all members' inputs, in rank order, to all members' outputs.
        adjoint: the call that is the transpose, or None where there is none (max, say).
        volume: elements that this rank sends.
        result: the shape of an exchange's result, from that of this rank's payload.
        traffic: what links carry of it.
        gloo, nccl: the exchange of a payload by that back end.
        joins: whether calls may become one call of all their tensors: no result depends on its place in a message.
        shares: what of its volume this rank sends to which ranks of the group, as weights; None for equal parts to all others.
        by_node: whether its messages go through nodes (``Group.ranks_per_node``), so that links between them carry less.
        pack: a leaf as the payload of an exchange; payloads of several leaves concatenate along the last dim.
        unpack: the leaf's result from its slice of the exchange's result.
        check: raises ValueError where this rank alone can tell that the call is wrong.
        shape: what must be the same on every rank; by default the leaf's shape.
        alone: for a row without communication, this rank's result from its own input.
        members: the group's ranks that take part; by default all.
        order: names the sequence that a call belongs to; calls of one sequence come in one order on all members. Of a
            message it is (source, destination, tag).
        reads: whether this rank's input is read; a receiver's, say, only tells the shape.
        private: options that may differ between ranks; the denotation gets them as a list, an entry a member.
        reconcile: raises MismatchError where the members' private options contradict each other.
        title: the name and the options to show, as this rank wrote them; by default the row's name and all options.
        takes: what its input is along the group, where it sums or moves values.
        gives: what its result is along the group; the transpose takes ``gives.dual`` and gives ``takes.dual``.
    """

    name: str
    denotation: Callable[[Sequence[Tensor], Options], list[Tensor]]
    adjoint: Callable[[Options], "Call | None"] = _no_transpose
    volume: Callable[[Tensor, Here], int] = _silent
    result: Callable[[Sequence[int], Here], Sequence[int]] = _of_payload
    traffic: Traffic = _NO_TRAFFIC
    gloo: GlooPrimitive = _no_exchange
    nccl: NcclPrimitive = _no_exchange
    joins: bool = False
    shares: Callable[[Here], Mapping[int, int] | None] = _to_all_alike
    by_node: bool = False
    pack: Callable[[Tensor, Here], Tensor] = _flat
    unpack: Callable[[Tensor, Tensor, Here], Tensor] = _same_shape
    check: Callable[[Tensor, Here], None] = _no_check
    shape: Callable[[Tensor, Here], Sequence[int | str]] = _own_shape
    alone: Callable[[Tensor, Here], Tensor] | None = None
    members: Callable[[Options, int], Sequence[int]] = _everyone
    order: Callable[[Options], Hashable] = _in_one_order
    reads: Callable[[Here], bool] = _always
    private: tuple[str, ...] = ()
    reconcile: Callable[[Options], None] = _nothing_private
    title: Callable[[Options, int], tuple[str, Options]] | None = None
    takes: Variance = Variance.VARYING
    gives: Variance = Variance.VARYING

    def __attrs_post_init__(self) -> None:
        unsaid = {
            "volume": _silent,
            "result": _of_payload,
            "traffic": _NO_TRAFFIC,
            "gloo": _no_exchange,
            "nccl": _no_exchange,
        }
        lacking = [part for part, default in unsaid.items() if getattr(self, part) is default]
        if self.alone is None and lacking:
            raise TypeError(f"Collective {self.name!r} communicates, so it needs {', '.join(lacking)}")

    def __repr__(self) -> str:
        return f"Collective({self.name!r})"

    @property
    def is_message(self) -> bool:
        """Whether it goes from one rank of the group to another."""
        return self.traffic.role == "message"

    def on_shapes(self, leaf: Tensor, here: Here) -> Tensor:
        """The result for a leaf without values: a tensor of the right shape, without values."""
        payload = self.pack(leaf, here)
        return self.unpack(payload.new_empty(list(self.result(payload.shape, here))), leaf, here)


def _kind(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return dtype if tensor.device.type in ("cpu", "meta") else f"{tensor.device.type} {dtype}"


@attrs.frozen(eq=False)
class Call:
    """A collective with its options: all that must agree between ranks, apart from the tensors.

    Attributes:
        collective: its row of the table.
        options: by name.
        out: memory for the results, a tensor a leaf, which a world may use; see ``options_for``. It may be the leaf itself.
    """

    collective: Collective
    options: Options = attrs.field(factory=dict)
    out: Sequence[Tensor] | None = None

    def on_nodes(self, ranks_per_node: int) -> "Call":
        """The call in a group with so many ranks a node."""
        if ranks_per_node == 1 or not self.collective.by_node:
            return self
        return attrs.evolve(self, options={**self.options, "ranks_per_node": ranks_per_node})

    def options_for(self, places: Sequence[int], payload: Tensor) -> Options:
        """The options of a primitive that carries these leaves; with "out" where its result can lie in the leaf's own."""
        if self.out is None or len(places) > 1 or self.out[places[0]].device != payload.device:
            return self.options
        return {**self.options, "out": self.out[places[0]]}

    def title(self, rank: int) -> tuple[str, Options]:
        """The name and options as the program on this rank wrote them."""
        row = self.collective
        return (row.name, self.options) if row.title is None else row.title(self.options, rank)

    def takes(self) -> Variance:
        """What the call's input is along the group: a partial sum for sums alone, whatever each rank has for a max."""
        row = self.collective
        return row.takes if self.options.get("op", "sum") == "sum" else Variance.VARYING

    def shown(self, rank: int) -> str:
        """The call as text."""
        name, options = self.title(rank)
        return f"{name}({', '.join(f'{k}={v!r}' for k, v in options.items())})"

    def signature(self, tensors: Sequence[Tensor], here: Here) -> str:
        """The call and what it is called on, as text for messages."""
        shapes = (list(self.collective.shape(t, here)) for t in tensors)
        kinds = ", ".join(f"{_kind(t)}{shape}" for t, shape in zip(tensors, shapes, strict=True))
        return f"{self.shown(here.rank)} of [{kinds}]".replace("'*'", "*")

    def agreement(self, tensors: Sequence[Tensor], here: Here) -> tuple[Any, ...]:
        """What must be equal on every member."""
        row = self.collective
        options = tuple((k, v) for k, v in self.options.items() if k not in row.private)
        return (row.name, options, tuple((t.dtype, t.device.type, tuple(row.shape(t, here))) for t in tensors))

    def private(self) -> Options:
        """The options that may differ between ranks."""
        return {name: self.options[name] for name in self.collective.private}

    def merged(self, private: Sequence[Options]) -> Options:
        """The options with every member's private ones, which must not contradict each other."""
        if not self.collective.private:
            return self.options
        merged = {**self.options, **{name: [own[name] for own in private] for name in self.collective.private}}
        self.collective.reconcile(merged)
        return merged
