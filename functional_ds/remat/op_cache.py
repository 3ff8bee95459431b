"""Tracks which operation made which memory, and keeps outputs, so that a second run skips their operations.

``torch.utils.checkpoint`` runs the function again; its ``create_selective_checkpoint_contexts`` (torch 2.13) would suffice for
matrix products that stay on the device. This does more:

- An output may be kept by a name that it gets after its operation, also on the host or partitioned over a group's ranks. Torch
  recomputes what its policy ``MUST_CPU_OFFLOAD`` names.
- The second run may have other undifferentiated operations, such as gathers of sharded params, and fewer of them. Torch counts
  all operations, and raises an error.
- What was written in place since it was kept is recomputed. Torch raises an error.
- Reports know what every saved tensor is.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from functional_ds.base.torch_private import TorchDispatchMode, backward_pass, version_of
from functional_ds.base.tree import setting

from .operator_arguments import tensors_given, tensors_written
from .policy import Keep, RematPolicy
from .saved_tensors import Offloaded, Resident, TensorStore, address_of, is_own


def _operations(*names: str) -> frozenset[Any]:
    """Those operators that this torch version has."""
    packets = [getattr(torch.ops.aten, name, None) for name in names]
    return frozenset(packet.default for packet in packets if packet is not None)


MATMULS = _operations(
    *("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm", "_grouped_mm"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
)

_Operation = tuple[Any, int]  # (operator, call index)
_Signature = tuple[tuple[torch.Size, torch.dtype], ...]  # of the tensors that an operation was given


def _is_plain(tensor: Tensor) -> bool:
    """Whether it has one storage and is not a subclass, such as the fake tensors on which a function may try something."""
    return (is_own(tensor) or type(tensor) is nn.Parameter) and tensor.layout == torch.strided


def _signature(given: Sequence[Tensor]) -> _Signature:
    return tuple((tensor.shape, tensor.dtype) for tensor in given)


def _outputs(out: Any) -> tuple[Any, ...]:
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


class _CallIndex:
    """Numbers a function's operations; the second run gets the same numbers.

    Only differentiated operations are numbered, not gathers of params and the inside of collectives, which vary. Nor are those
    of a backward pass that the function starts, which only in the first run recomputes what it needs.
    """

    def __init__(self) -> None:
        self._calls: Counter[Any] = Counter()
        self._backward = backward_pass()  # in which the function runs: none the first time

    def __call__(self, func: Any, given: Sequence[Tensor]) -> _Operation | None:
        if backward_pass() != self._backward or not torch.is_grad_enabled():
            return None
        if not any(tensor.requires_grad for tensor in given if _is_plain(tensor)):
            return None
        self._calls[func] += 1
        return func, self._calls[func]


@attrs.define(eq=False)
class _Allocation:
    """A storage that an operation allocated.

    Attributes:
        storage: alive as long as it is used elsewhere.
        operation: None if the second run could not identify it, as in a nested backward pass.
        signature: of the operation's inputs.
        view: shape, strides and offset of the output in it.
        others: the operation's further outputs, if it has several.
        name: by ``checkpoint_name``.
        changed: whether an operation has written into it since.
    """

    storage: "weakref.ref[torch.UntypedStorage]"
    operation: _Operation | None
    signature: _Signature
    view: tuple[tuple[int, ...], tuple[int, ...], int]
    others: tuple[Any, ...] | None
    name: str | None = None
    changed: bool = False


@attrs.frozen(eq=False)
class _Result:
    """An operation's kept outputs.

    Attributes:
        signature: of the operation's inputs.
        outputs: stored tensors, and other values as they are.
        single: whether the operation returns one output, not in a tuple.
        what: "matmuls", or a name, for reports.
    """

    signature: _Signature
    outputs: tuple[Any, ...]
    single: bool
    what: str

    def stored(self) -> list[Resident | Offloaded]:
        """The stored tensors."""
        return [value for value in self.outputs if isinstance(value, (Resident, Offloaded))]

    def get(self) -> Any:
        """What the operation returned."""
        values = tuple(value.get() if isinstance(value, (Resident, Offloaded)) else value for value in self.outputs)
        return values[0] if self.single else values


class OpRecorder(TorchDispatchMode):
    """Records, in a function's first run, which operation made which memory, and keeps outputs for a second run.

    An operation that writes into a tensor that is being copied to the host waits for the copy.

    Args:
        policy: which outputs are kept where.
        store: of the region; None if the region stores nothing.
    """

    def __init__(self, policy: RematPolicy, store: TensorStore | None) -> None:
        super().__init__()
        self.results: dict[_Operation, _Result] = {}
        self._policy, self._store = policy, store
        self._index = _CallIndex()
        self._memory: dict[int, _Allocation] = {}  # by address
        self._matmuls: list[tuple[_Operation, _Signature, Any]] = []  # outputs that stay; stored when the function has ended
        self._known: set[int] | None = None  # within ``unseen``: the addresses of what no operation in there makes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = tensors_written(func, args, kwargs)
        if written and self._store is not None:
            self._store.hold_device()
        out = func(*args, **kwargs)
        given = tensors_given((*args, *kwargs.values()))
        operation = self._index(func, given)
        for tensor in written:
            if (memory := self._find(tensor)) is not None:
                memory.changed = True
        self._note(operation, given, out)
        if operation is not None and func in MATMULS:
            self._keep_matmul(operation, _signature(given), out)
        return out

    @contextmanager
    def unseen(self, known: Iterable[Tensor]) -> Iterator[None]:
        """A context whose operations are not recorded: what autograd saves, except these tensors, they have made.

        Earlier operations' memory keeps its name.
        """
        if self._store is not None:
            self._store.hold_device()  # anything may be written in there
        with setting(self, _known={address_of(t) for t in known if _is_plain(t)}):
            yield

    def end(self) -> None:
        """Ends the first run. Outputs that were changed in place since they were made are dropped, and recomputed."""
        for operation, signature, out in self._matmuls:
            values = _outputs(out)
            if operation not in self.results and all(not isinstance(v, Tensor) or version_of(v) == 0 for v in values):
                self._put(operation, signature, out, Resident)
        self._matmuls.clear()
        self.results = {key: result for key, result in self.results.items() if not any(map(self._is_changed, result.outputs))}
        self._memory.clear()

    def origin(self, tensor: Tensor) -> str | None:
        """What made a tensor's memory: a name, "matmuls", or "inside" for any other operation; None if nothing here did."""
        memory = self._find(tensor)
        if memory is None:
            made = self._known is not None and _is_plain(tensor) and address_of(tensor) not in self._known
            return "inside" if made else None
        matmul = memory.operation is not None and memory.operation[0] in MATMULS
        return memory.name or ("matmuls" if matmul else "inside")

    def name(self, tensor: Tensor, name: str) -> None:
        """Names the operation that made the tensor's memory, and keeps its output if the policy says so.

        Raises:
            ValueError: the output must be kept and cannot be.
        """
        memory, how = self._find(tensor), self._policy.names.get(name, Keep.RECOMPUTE)
        if memory is None:
            return  # it was made outside, and is kept there
        memory.name = name
        if self._store is None or how is Keep.RECOMPUTE or not self._policy.recomputes:
            return
        if memory.changed or memory.operation is None:
            reason = "it was changed in place after it was made" if memory.changed else "no differentiated operation made it"
            raise ValueError(
                f"checkpoint_name: {name!r} cannot be kept: {reason}; name the first output of an operation, before anything "
                "writes into it"
            )
        output = self._store.keep(tensor.detach().as_strided(*memory.view), how)
        others = (other.detach() if isinstance(other, Tensor) else other for other in memory.others or ())
        self.results[memory.operation] = _Result(memory.signature, (output, *others), memory.others is None, name)

    def _find(self, tensor: Tensor) -> _Allocation | None:
        if not _is_plain(tensor):
            return None
        storage = tensor.untyped_storage()
        memory = self._memory.get(address_of(tensor))
        return memory if memory is not None and memory.storage() is storage else None

    def _is_changed(self, output: Any) -> bool:
        """Whether an output that stays was written into, perhaps through another view, with its own version counter."""
        tensor = output.tensor if isinstance(output, Resident) else output
        memory = self._find(tensor) if isinstance(tensor, Tensor) else None
        return (memory is not None and memory.changed) or (isinstance(output, Resident) and output.changed)

    def _note(self, operation: _Operation | None, given: Sequence[Tensor], out: Any) -> None:
        """Records the memory that an operation allocated."""
        known = {address_of(t) for t in given if _is_plain(t)}
        values = _outputs(out)
        for place, value in enumerate(values):
            if not isinstance(value, Tensor) or not _is_plain(value):
                continue
            storage = value.untyped_storage()
            if (address := address_of(value)) and address not in known:
                view = (tuple(value.shape), value.stride(), int(value.storage_offset()))
                maker, others = (None, None) if place else (operation, None if out is value else values[1:])
                self._memory[address] = _Allocation(weakref.ref(storage), maker, _signature(given), view, others)

    def _keep_matmul(self, operation: _Operation, signature: _Signature, out: Any) -> None:
        how, store = self._policy.matmuls, self._store
        if store is None or how is None or how is Keep.RECOMPUTE or not self._policy.recomputes:
            return
        if how is Keep.SAVE:
            self._matmuls.append((operation, signature, out))  # with its graph, which an alias made here would not see
        else:
            self._put(operation, signature, out, lambda tensor: store.keep(tensor, how))

    def _put(self, operation: _Operation, signature: _Signature, out: Any, keep: Callable[[Tensor], Any]) -> None:
        stored = tuple(keep(value) if isinstance(value, Tensor) else value for value in _outputs(out))
        self.results[operation] = _Result(signature, stored, not isinstance(out, (tuple, list)), "matmuls")


class Replayer(TorchDispatchMode):
    """In a function's second run: skips the operations whose outputs were kept."""

    def __init__(self, recorder: OpRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __enter__(self) -> Any:
        self._index = _CallIndex()  # each backward pass begins at the first operation
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_given((*args, *kwargs.values()))
        operation = self._index(func, given)
        result = None if operation is None else self._recorder.results.get(operation)
        if result is None:
            return func(*args, **kwargs)
        if result.signature != _signature(given):
            raise RuntimeError(
                f"remat: {func} was kept for inputs {result.signature} but got {_signature(given)} when the function ran "
                "again; a recomputed function must do the same each time"
            )
        return result.get()
