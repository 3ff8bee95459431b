"""Recording a module's forward on tensors without values."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from functional_ds.comm.group import call_site

from .moulds import Hole, Mould, hides, mould, tensors_in
from .program import Instruction, Program, Source, ambience
from .rehearsal import NEEDS_VALUES

__all__ = ["record"]

# Operators that ask their first argument for nothing but shape, dtype and device.
_SHAPE_ONLY = frozenset(
    [f"{what}_like" for what in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")]
    + [f"new_{what}" for what in ("empty", "zeros", "ones", "full", "empty_strided")]
    + ["device"]
)


def record(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, mode: FakeTensorMode, opened: frozenset[str]
) -> Program:
    """The program of ``module(*args, **kwargs)``.

    Args:
        module: a copy for this call alone, with tensors of ``mode`` for parameters and buffers; its classes are changed.
        args, kwargs: with tensors of ``mode``.
        mode: of tensors without values.
        opened: paths of modules whose forward is recorded call by call; every other module is one instruction.

    Raises:
        ValueError: the forward does what a stage cannot do again; it names the line.
    """
    return _Recorder(module, mode, opened).run(args, kwargs)


class _Watch(TorchDispatchMode):
    """Sees, operator by operator, what is read and written; whether random numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.clear()

    def clear(self) -> None:
        self.touched: set[int] = set()
        self.written: set[int] = set()
        self.pure = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        self.pure &= torch.Tag.nondeterministic_seeded not in func.tags and "batch_norm" not in name
        for place, (described, value) in enumerate(_arguments(func, args, kwargs)):
            memories = {_memory(tensor) for _, tensor in tensors_in(value)}
            if place or name not in _SHAPE_ONLY:
                self.touched |= memories
            if described.alias_info is not None and described.alias_info.is_write:
                self.written |= memories
        return func(*args, **kwargs)


def _arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    described = func._schema.arguments
    yield from zip(described, args, strict=False)
    yield from ((each, kwargs[each.name]) for each in described[len(args) :] if each.name in kwargs)


def _memory(tensor: Tensor) -> int:
    """A number of the memory that a tensor lies in, which its views share."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a sparse tensor has no one storage
        return id(tensor)


class _Listen(TorchFunctionMode):
    """Hands every call of a torch function over."""

    def __init__(self, called: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self.called = called

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.called(func, args, kwargs or {})


class _Recorder:
    def __init__(self, module: nn.Module, mode: FakeTensorMode, opened: frozenset[str]) -> None:
        self.module, self.mode, self.opened = module, mode, opened
        self.watch = _Watch()
        self.numbers: dict[int, int] = {}
        self.tensors: list[Tensor] = []  # by number; all of them live on, so that no two share an id
        self.memory: list[int] = []
        self.graph: list[bool] = []  # whether each requires grad, as far as the recorder has seen
        self.sources: dict[int, Source] = {}
        self.instructions: list[Instruction] = []
        self.begins: dict[tuple[str, int], int] = {}
        self.calls: Counter[str] = Counter()
        self.inside = False
        self.shapes: dict[tuple[tuple[int, ...], torch.dtype], int] = {}
        for name, parameter in module.named_parameters():
            self._number(parameter, Source("param", name))
        for name, buffer in module.named_buffers():
            self._number(buffer, Source("buffer", name))
        self.outer = {self.memory[number] for number in self.sources}  # what lasts beyond the forward

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Program:
        inputs = list(dict.fromkeys(tensor for _, tensor in tensors_in((args, kwargs))))
        for place, tensor in enumerate(inputs):
            self._number(tensor, Source("input", place))
        self.device = inputs[0].device.type if inputs else self.tensors[0].device.type if self.tensors else "cpu"
        paths = {path: {name for name, _ in part.named_parameters(prefix=path)} for path, part in self.module.named_modules()}
        for path, part in self.module.named_modules():
            _intercept(part, lambda function, a, k, path=path: self.module_called(path, function, a, k))  # type: ignore[misc]
        with self.mode, self.watch, saved_tensors_hooks(_same, _same), _Listen(self.torch_called):
            found = self.module(*args, **kwargs)
        outputs: list[int] = []
        hidden = hides(found)
        if hidden is not None:
            raise ValueError(f"the module returns a {hidden.__name__} with tensors inside, which is not looked into")
        output = mould(found, lambda tensor: self._output(tensor, outputs))
        places = {name: name for name in self._canonical()}
        leaves = {path: tuple(places[name] for name in sorted(self._owned(path))) for path in paths}
        memory = dict(enumerate(self.memory))
        return Program(
            tuple(self.instructions), self.sources, output, tuple(outputs), memory, leaves, self.begins
        )
