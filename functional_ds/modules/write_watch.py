"""Detects writes into parameters within a module's call: ``x.data`` leaves no version, so values or operations are checked."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from functional_ds.base import tree
from functional_ds.base.torch_private import TorchDispatchMode, storage_id, version_of
from functional_ds.remat.operator_arguments import tensors_written
from functional_ds.step.pass_scope import Pass
from functional_ds.step.views.graph_checks import bit_sums


def _refuse_write(class_name: str, name: str, parameter: Tensor | None, how: str) -> None:
    """Raises RuntimeError: the module of this class wrote into the parameter of this name."""
    if parameter is not None and not parameter.requires_grad:
        raise RuntimeError(
            f"the module {class_name} wrote into its frozen parameter {name!r} in place; a forward pass may write only "
            "buffers: make it one (register_buffer)"
        )
    raise RuntimeError(
        f"the module {class_name} wrote into its parameter {name!r} in place ({how}), and a forward pass may write only "
        "buffers: compute the weight from the parameter instead (torch.nn.utils.parametrize; not nn.Embedding(max_norm=)), or "
        "change params after the update, in a transform: fds.wrap(..., update=...)"
    )


def refuse_aliases(class_name: str, assigned: list[tuple[str, Tensor]], params: Mapping[str, Tensor], pass_: Pass) -> None:
    """Raises an error for attributes and buffers set to a param's memory, which the update writes and ZeRO frees.

    Args:
        class_name: the module's class.
        assigned: what it has set, by name.
        params: by name.
        pass_: it knows which memory is that of a param.

    Raises:
        RuntimeError: there is one.
    """
    watch = _WriteWatch(class_name, params, pass_) if assigned else None
    for name, tensor in assigned:
        if watch is not None and tensor.layout == torch.strided and (param := watch.name_of(tensor)) is not None:
            raise RuntimeError(
                f"the module {class_name} set {name!r} to the memory of its parameter {param!r} (detach() copies nothing), "
                "which the update changes: set it to .detach().clone() to keep the values, or read the parameter itself"
            )


@contextmanager
def watched(class_name: str, params: Mapping[str, Tensor], pass_: Pass) -> Iterator[None]:
    """A context in which a write into one of the params raises an error; it reads them all, or costs time at each operation.

    Params in memory are compared by their values, which works with compiled functions. For those that are gathered and freed,
    operations are checked.

    Args:
        class_name: the module's class.
        params: by name; they may be placeholders.
        pass_: it knows which memory is that of a param.
    """
    if pass_.placeholders:
        watch = _WriteWatch(class_name, params, pass_)
        with _Assignments(watch), _Operations(watch):
            yield
        return
    before = {name: values for name, param in params.items() if (values := _values(param)) is not None}
    yield
    for name, (storage, sums) in before.items():
        if storage_id(params[name]) != storage:
            _refuse_write(class_name, name, params[name], f"{name.rpartition('.')[2]}.data = ...")
        if not all(map(torch.equal, sums, bit_sums(params[name]))):
            _refuse_write(class_name, name, params[name], "its values have changed")


def refuse_new_versions(class_name: str, params: Mapping[str, Tensor], before: list[tuple[int, int]]) -> None:
    """Raises an error if a param's version or memory is another than ``before``."""
    if before != (after := versions(params)):
        name = next(name for name, old, new in zip(params, before, after, strict=True) if old != new)
        _refuse_write(class_name, name, params[name], "under no_grad, or by .data =")


def versions(params: Mapping[str, Tensor]) -> list[tuple[int, int]]:
    """Values that change with a write in place, or an assignment of ``data``."""
    try:
        return [(version_of(p), p.data_ptr() if type(p) in (Tensor, nn.Parameter) else 0) for p in params.values()]
    except RuntimeError:  # tensors of a torch.func transform have no memory
        return [(version_of(p), 0) for p in params.values()]


def _values(param: Tensor) -> tuple[int, tuple[Tensor, ...]] | None:
    """The storage and sums of its values; None if there are none to compare, as on the meta device or in torch.func."""
    try:
        there = param.layout == torch.strided and not param.is_meta
        return (storage_id(param), bit_sums(param)) if there else None
    except NotImplementedError:
        return None


@attrs.define(eq=False)
class _WriteWatch:
    class_name: str
    params: Mapping[str, Tensor]
    pass_: Pass
    _places: list[tuple[int, int, int, str]] | None = None

    def look(self, written: Any, how: str) -> None:
        """Raises an error for a write into a param's memory."""
        for tensor in tree.leaves(written):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided and (name := self.name_of(tensor)) is not None:
                _refuse_write(self.class_name, name, self.params.get(name), how)

    def assigned(self, tensor: Any) -> None:
        """Raises an error for ``param.data = ...``."""
        name = next((name for name, param in self.params.items() if param is tensor), None)
        if name is not None:
            _refuse_write(self.class_name, name, self.params[name], f"{name.rpartition('.')[2]}.data = ...")

    def name_of(self, tensor: Tensor) -> str | None:
        """The param whose memory holds a tensor."""
        path, paths = self.pass_.owns(tensor), self.pass_.placeholders
        if path is not None:
            return next((name for name, param in self.params.items() if paths.get(id(param)) == path), path)
        if self._places is None:  # placeholders are not fetched where their memory comes and goes: the pass knows it
            known = {} if self.pass_.view is not None and self.pass_.view.owns is not None else self.params
            self._places = [(*_place(param.detach()), name) for name, param in known.items()]
        storage, start, _ = _place(tensor)
        return next((name for its, low, high, name in self._places if its == storage and low <= start < high), None)


def _place(tensor: Tensor) -> tuple[int, int, int]:
    """The storage, and the range in it in bytes."""
    start = int(tensor.storage_offset()) * tensor.element_size()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return storage_id(tensor), start, start + extent * tensor.element_size()


class _Assignments(TorchFunctionMode):
    def __init__(self, watch: _WriteWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _SET_DATA:
            self._watch.assigned(args[0])
        return func(*args, **(kwargs or {}))


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


class _Operations(TorchDispatchMode):
    def __init__(self, watch: _WriteWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten":
            for tensor in tensors_written(func, args, kwargs):
                self._watch.look(tensor, str(func.overloadpacket))
        return func(*args, **kwargs)
