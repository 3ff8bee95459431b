"""Watching a function's operations: what they make, and giving it again instead of running them again."""

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from functional_ds.base.torch_private import TorchDispatchMode, schema_of, version_of

from .policy import Keep, Saving
from .saved_tensors import Away, Here, Keeper

__all__ = ["MATMULS", "Recorder", "Replayer"]


def _operations(*names: str) -> frozenset[Any]:
    """Those of them that this torch has."""
    found = [getattr(torch.ops.aten, name, None) for name in names]
    return frozenset(packet.default for packet in found if packet is not None)


MATMULS = _operations(
    *("mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm", "_grouped_mm"),
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
)

_Operation = tuple[Any, int]  # which, and its how manieth call
_Given = tuple[tuple[torch.Size, torch.dtype], ...]


def _tensors(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    found = []
    for value in (*args, *kwargs.values()):
        found += [v for v in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(v, Tensor)]
    return found


def _is_plain(tensor: Tensor) -> bool:
    """No subclass: fake tensors, on which a function may try something out the first time, are none of its own."""
    return type(tensor) in (Tensor, nn.Parameter)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes into."""
    if not schema_of(func).is_mutable:
        return []
    places = enumerate(schema_of(func).arguments)
    given = [(a, args[i] if i < len(args) else kwargs.get(a.name)) for i, a in places if a.alias_info and a.alias_info.is_write]
    return _tensors([value for _, value in given], {})


class _Count:
    """Numbers the operations of a function, alike when it is run again.

    Only what is differentiated counts: gathers of params and the insides of collectives come and go, and are not.
    """

    def __init__(self) -> None:
        self._calls: Counter[Any] = Counter()

    def __call__(self, func: Any, given: Sequence[Tensor]) -> _Operation | None:
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in given if _is_plain(tensor)):
            return None
        self._calls[func] += 1
        return func, self._calls[func]


@attrs.define(eq=False)
class _Made:
    """Memory that an operation has given out.

    Attributes:
        storage: the memory, while it is there.
        operation: which one; None where it cannot be told again.
        shape, stride, offset: of the tensor that came out of it.
        others: what else came out.
        name: what ``checkpoint_name`` called it.
        changed: whether an operation has written into it since.
    """

    storage: "weakref.ref[torch.UntypedStorage]"
    operation: _Operation | None
    given: _Given
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    others: tuple[Any, ...] | None = None
    name: str | None = None
    changed: bool = False


@attrs.frozen(eq=False)
class _Result:
    """What an operation gave, kept.

    Attributes:
        outputs: kept tensors and other values; a list of one that stands alone where ``single``.
    """

    given: _Given
    outputs: tuple[Any, ...]
    single: bool

    def again(self) -> Any:
        """What the operation gave."""
        found = tuple(kept.get() if isinstance(kept, (Here, Away)) else kept for kept in self.outputs)
        return found[0] if self.single else found


class Recorder(TorchDispatchMode):
    """While a function runs: which memory its operations made, and what of that is to be kept.

    Args:
        saving: the policy.
        keeper: where values are kept; None to keep nothing.
    """

    def __init__(self, saving: Saving, keeper: Keeper | None) -> None:
        super().__init__()
        self.results: dict[_Operation, _Result] = {}
        self.names: dict[_Operation, str] = {}  # what the results are of, for reports
        self._saving, self._keeper = saving, keeper
        self._count = _Count()
        self._made: dict[int, _Made] = {}  # by address
        self._outputs: list[tuple[_Operation, _Given, Any]] = []  # to be kept where they are, when the function has ended

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = _tensors(args, kwargs)
        operation = self._count(func, given)
        for tensor in _written(func, args, kwargs):
            if (made := self._maker(tensor)) is not None:
                made.changed = True
        self._note(operation, given, out)
        if operation is not None and func in MATMULS:
            self._keep_all(operation, _signature(given), out)
        return out

    def end(self) -> None:
        """The function has ended: what was changed in place since it was made is let go, and is computed again."""
        for operation, given, out in self._outputs:
            values = out if isinstance(out, (tuple, list)) else (out,)
            if operation not in self.results and all(not isinstance(v, Tensor) or version_of(v) == 0 for v in values):
                self._put(operation, given, [Here(v) if isinstance(v, Tensor) else v for v in values], out, "matmuls")
        self._outputs.clear()
        self.results = {key: result for key, result in self.results.items() if not any(map(self._is_changed, result.outputs))}
        self._made.clear()

    def kept(self) -> "list[tuple[str, Here | Away]]":
        """What is kept, and what of."""
        pairs = ((self.names[operation], result.outputs) for operation, result in self.results.items())
        return [(name, kept) for name, outputs in pairs for kept in outputs if isinstance(kept, (Here, Away))]

    def origin(self, tensor: Tensor) -> str | None:
        """Where a tensor's memory is from: a name, "matmuls", "inside" for any other operation; None from elsewhere."""
        made = self._maker(tensor)
        if made is None:
            return None
        matmul = made.operation is not None and made.operation[0] in MATMULS
        return made.name or ("matmuls" if matmul else "inside")

    def name(self, tensor: Tensor, name: str) -> None:
        """``checkpoint_name`` was called."""
        made, how = self._maker(tensor), self._saving.names.get(name, Keep.RECOMPUTE)
        if made is None:
            return  # it is from elsewhere, and whoever made it keeps it
        made.name = name
        if self._keeper is None or how is Keep.RECOMPUTE or self._saving.rest is not Keep.RECOMPUTE:
            return
        if made.changed or made.operation is None:
            reason = "it was changed in place after it was made" if made.changed else "no differentiated operation made it"
            raise ValueError(
                f"checkpoint_name: {name!r} cannot be kept: {reason}; name the first output of an operation, before anything "
                "writes into it"
            )
        value = tensor.detach().as_strided(made.shape, made.stride, made.offset)
        others = (other.detach() if isinstance(other, Tensor) else other for other in made.others or ())
        outputs = (self._keeper.keep(value, how), *others)
        self.results[made.operation] = _Result(made.given, outputs, made.others is None)
        self.names[made.operation] = name

    def _maker(self, tensor: Tensor) -> _Made | None:
        if not _is_plain(tensor):
            return None
        storage = tensor.untyped_storage()
        made = self._made.get(storage.data_ptr())
        return made if made is not None and made.storage() is storage else None

    def _is_changed(self, kept: Any) -> bool:
        """Whether a value that stays where it is was written into; views such as GRUs cut have versions of their own."""
        tensor = kept.tensor if isinstance(kept, Here) else kept
        made = self._maker(tensor) if isinstance(tensor, Tensor) else None
        return (made is not None and made.changed) or (isinstance(kept, Here) and kept.changed)

    def _note(self, operation: _Operation | None, given: Sequence[Tensor], out: Any) -> None:
        known = {t.untyped_storage().data_ptr() for t in given if _is_plain(t)}
        outputs = out if isinstance(out, (tuple, list)) else (out,)
        for place, value in enumerate(outputs):
            if (
                isinstance(value, Tensor)
                and _is_plain(value)
                and (address := value.untyped_storage().data_ptr())
                and address not in known
            ):
                first = place == 0
                self._made[address] = _Made(
                    weakref.ref(value.untyped_storage()),
                    operation if first else None,
                    _signature(given),
                    tuple(value.shape),
                    value.stride(),
                    int(value.storage_offset()),
                    tuple(out[1:]) if first and isinstance(out, (tuple, list)) else None,
                )

    def _keep_all(self, operation: _Operation, given: _Given, out: Any) -> None:
        how, keeper = self._saving.matmuls, self._keeper
        if keeper is None or how is None or how is Keep.RECOMPUTE:
            return
        if how is Keep.SAVE:
            self._outputs.append((operation, given, out))  # with its graph, which an alias made here would not see
            return
        values = out if isinstance(out, (tuple, list)) else (out,)
        self._put(operation, given, [keeper.keep(v, how) if isinstance(v, Tensor) else v for v in values], out, "matmuls")

    def _put(self, operation: _Operation, given: _Given, outputs: list[Any], out: Any, name: str) -> None:
        self.results[operation] = _Result(given, tuple(outputs), not isinstance(out, (tuple, list)))
        self.names[operation] = name


def _signature(given: Sequence[Tensor]) -> _Given:
    return tuple((tensor.shape, tensor.dtype) for tensor in given)


class Replayer(TorchDispatchMode):
    """While the function runs again: operations whose results were kept are not run."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._count = _Count()

    def __enter__(self) -> Any:
        self._count = _Count()  # each backward pass begins at the first operation
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors(args, kwargs)
        operation = self._count(func, given)
        result = None if operation is None else self._recorder.results.get(operation)
        if result is None:
            return func(*args, **kwargs)
        if result.given != _signature(given):
            raise RuntimeError(
                f"remat: {func} was kept for inputs {result.given} but got {_signature(given)} when the function ran again; "
                "a recomputed function must do the same each time"
            )
        return result.again()
