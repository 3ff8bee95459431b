"""Recording a module's forward on tensors without values."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from functional_ds.base.torch_private import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    disable_torch_function,
    saved_tensors_hooks_in_force,
    schema_of,
    storage_id,
)
from functional_ds.comm.record.group import call_site
from functional_ds.pipelining.stages.shape_check import NEEDS_VALUES

from .program import Ambience, Instruction, Program, Source, ambience
from .templates import Hole, hides, mould, tensors_in

__all__ = ["Unclear", "record"]

# Operators that ask their first argument for nothing but shape, dtype and device.
_SHAPE_ONLY = frozenset(
    [f"{what}_like" for what in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")]
    + [f"new_{what}" for what in ("empty", "zeros", "ones", "full", "empty_strided")]
    + ["device"]
)


class Unclear(Exception):
    """What looked like a constant is none."""


def record(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    mode: FakeTensorMode,
    opened: frozenset[str],
    constants: bool,
) -> Program:
    """The program of ``module(*args, **kwargs)``.

    With ``constants``, what depends on no input, parameter or buffer has its values (``torch.arange``, and masks made of it),
    and a forward may branch on them.

    Args:
        module: a copy for this call alone, with tensors of ``mode`` for parameters and buffers; its classes are changed.
        args, kwargs: with tensors of ``mode``.
        mode: of tensors without values.
        opened: paths of modules whose forward is recorded call by call; every other module is one instruction.
        constants: whether constants have values.

    Raises:
        Unclear: a tensor with values gets some that depend on arguments or on chance; record again without ``constants``.
        ValueError: the forward does what a stage cannot do again; it names the line.
    """
    return _Recorder(module, mode, opened, constants).run(args, kwargs)


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
        with _unheard():
            self._look(func, args, kwargs)
            return func(*args, **kwargs)

    def _look(self, func: Any, args: Any, kwargs: Any) -> None:
        name = func.overloadpacket.__name__
        self.pure &= torch.Tag.nondeterministic_seeded not in func.tags and "batch_norm" not in name
        for place, (described, value) in enumerate(_arguments(func, args, kwargs)):
            memories = {_memory(tensor) for _, tensor in tensors_in(value)}
            if place or name not in _SHAPE_ONLY:
                self.touched |= memories
            if described.alias_info is not None and described.alias_info.is_write:
                self.written |= memories


def _arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    described = schema_of(func).arguments
    yield from zip(described, args, strict=False)
    yield from ((each, kwargs[each.name]) for each in described[len(args) :] if each.name in kwargs)


def _memory(tensor: Tensor) -> int:
    """A number of the memory that a tensor lies in, which its views share."""
    try:
        return storage_id(tensor)
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
    """What a forward has done so far. Tensors are known by number; all live on, so that no two share an id or memory."""

    def __init__(self, module: nn.Module, mode: FakeTensorMode, opened: frozenset[str], constants: bool) -> None:
        self.module, self.mode, self.opened, self.constants = module, mode, opened, constants
        self.watch = _Watch()
        self.numbers: dict[int, int] = {}
        self.tensors: list[Tensor] = []
        self.memory: list[int] = []
        self.graph: list[bool] = []  # whether each requires grad, as far as recorded calls tell
        self.sources: dict[int, Source] = {}
        self.shapes: dict[Any, int] = {}
        self.instructions: list[Instruction] = []
        self.begins: dict[tuple[str, int], int] = {}
        self.calls: Counter[str] = Counter()
        self.inside = False
        for path, parameter in module.named_parameters():
            self._new(parameter, Source("param", path))
        for path, buffer in module.named_buffers():
            self._new(buffer, Source("buffer", path))
        self.lasting = set(self.memory)  # what outlives the forward

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Program:
        """Runs the forward and gives what it did."""
        inputs = [tensor for _, tensor in tensors_in((tuple(args), dict(kwargs)))]
        for place, tensor in enumerate(inputs):
            self._new(tensor, Source("input", place))
        self.device = self.tensors[0].device.type if self.tensors else "cpu"
        for path, part in list(self.module.named_modules()):
            _intercept(part, path, self.module_called)
        with (
            nullcontext() if self.constants else self.mode,
            self.watch,
            saved_tensors_hooks(_same, _same),
            _Listen(self.torch_called),
        ):
            found = self.module(*args, **kwargs)
            self.inside = True
        self._refuse_hidden(found, "the module returns")
        outputs = [self._known(tensor, "the module's result") for _, tensor in tensors_in(found)]
        following = iter(outputs)
        output = mould(found, lambda tensor: Hole(next(following)))
        canonical = {id(parameter): path for path, parameter in self.module.named_parameters()}
        leaves = {path: tuple(canonical[id(p)] for p in part.parameters()) for path, part in self.module.named_modules()}
        memory = dict(enumerate(self.memory))
        return Program(tuple(self.instructions), self.sources, output, tuple(outputs), memory, leaves, self.begins)

    # -- what is called ------------------------------------------------------------------------------------------------

    def torch_called(self, function: Any, args: Any, kwargs: Any) -> Any:
        """A call of a torch function."""
        if self.inside:
            return function(*args, **kwargs)
        if function is Tensor.__iter__:
            return iter(self.torch_called(torch.unbind, args, {"dim": 0}))
        try:
            return self._done(function, partial(function, *args, **kwargs), args, kwargs)
        except NEEDS_VALUES as error:
            name = getattr(function, "__name__", str(function))
            raise ValueError(
                f"{call_site()}: {name} asks for a tensor's value, outside of the modules that run as a whole, so what follows "
                "depends on the data; move it into a module of its own"
            ) from error

    def module_called(self, path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of a module."""
        if self.inside:
            return forward(*args, **kwargs)
        self.begins[path, self.calls[path]] = len(self.instructions)
        self.calls[path] += 1
        if path in self.opened:
            return forward(*args, **kwargs)
        self._refuse_hidden((args, kwargs), f"{path} is called with")
        try:
            with self.mode:
                found = self._done(path, partial(forward, *args, **kwargs), args, kwargs)
        except NEEDS_VALUES as error:
            raise ValueError(
                f"{path}: its forward asks for a tensor's value ({error}), so its results' shapes are unknown"
            ) from error
        self._refuse_hidden((args, kwargs), f"{path} was called with, and wrote into,")
        self._refuse_hidden(found, f"{path} returns")
        return found

    def _done(self, target: Any, work: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """Carries a call out, and notes it if it made or changed a tensor."""
        what = target if isinstance(target, str) else getattr(target, "__name__", str(target))
        with _unheard():
            before = ambience(self.device)
            for _, tensor in tensors_in((args, kwargs)):
                self._known(tensor, f"{what}'s argument")
        self.watch.clear()
        self.inside = True
        try:
            found = work()
        finally:
            self.inside = False
        with _unheard():
            self._note(target, what, args, kwargs, found, before)
        return found

    def _note(self, target: Any, what: str, args: Any, kwargs: Any, found: Any, before: Ambience) -> None:
        touched, written = self.watch.touched, self.watch.written
        writes = frozenset(number for number, memory in enumerate(self.memory) if memory in written)
        new = {id(tensor): (place, tensor) for place, tensor in tensors_in(found) if id(tensor) not in self.numbers}
        if new or writes:
            reads: set[int] = set()
            moulded = mould((tuple(args), dict(kwargs)), lambda tensor: Hole(self._read(tensor, touched, reads)))
            pure = self.watch.pure and not (written & self.lasting)
            self._refuse_unclear(pure, reads, writes, [tensor for _, tensor in new.values()])
            results = tuple((self._new(tensor), place) for place, tensor in new.values())
            self._refuse_constants(writes)
            again, site = _recomputed(what), call_site()
            self.instructions.append(Instruction(target, moulded, results, frozenset(reads), writes, pure, before, again, site))
        for number in {*writes, *(self.numbers[id(tensor)] for _, tensor in tensors_in((args, kwargs)))}:
            self.graph[number] = self.tensors[number].requires_grad

    # -- tensors -------------------------------------------------------------------------------------------------------

    def _new(self, tensor: Tensor, source: Source | None = None) -> int:
        number = len(self.tensors)
        self.numbers[id(tensor)] = number
        self.tensors.append(tensor)
        self.memory.append(_memory(tensor))
        self.graph.append(tensor.requires_grad)
        if source is not None:
            self.sources[number] = source
        return number

    def _read(self, tensor: Tensor, touched: set[int], reads: set[int]) -> int:
        number = self.numbers[id(tensor)]
        if self.memory[number] in touched:
            reads.add(number)
            return number
        reads.add(self._stand_in(tensor))
        return self._stand_in(tensor)

    def _stand_in(self, tensor: Tensor) -> int:
        """The number of a tensor in the place of one that is only asked for its shape, dtype and device."""
        asked = (tuple(tensor.shape), tensor.dtype)
        if asked not in self.shapes:
            number = self.shapes[asked] = len(self.tensors)
            self.tensors.append(tensor)
            self.memory.append(-number)
            self.graph.append(tensor.requires_grad)
            self.sources[number] = Source("shape", asked)
        return self.shapes[asked]

    def _known(self, tensor: Tensor, what: str) -> int:
        """The number of a tensor; a real one that is met for the first time is a constant."""
        if id(tensor) not in self.numbers and not isinstance(tensor, FakeTensor):
            return self._new(tensor, Source("constant", tensor))
        number = self.numbers.get(id(tensor))
        if number is None or self.graph[number] != tensor.requires_grad:
            raise ValueError(
                f"{call_site()}: {what} comes from code that is not seen from outside, such as an autograd.Function, "
                "checkpoint(use_reentrant=True) or torch.func; put it into a module of its own, which then runs as a whole"
            )
        return number

    def _refuse_unclear(self, pure: bool, reads: set[int], writes: frozenset[int], made: Sequence[Tensor]) -> None:
        """Tensors with values stay constants, or else nobody may have seen them."""
        if not self.constants:
            return
        real = [tensor for tensor in (*made, *(self.tensors[n] for n in writes)) if not isinstance(tensor, FakeTensor)]
        if real and (not pure or any(isinstance(self.tensors[number], FakeTensor) for number in reads)):
            raise Unclear(call_site())

    def _refuse_constants(self, writes: frozenset[int]) -> None:
        for number in writes:
            source = self.sources.get(number)
            if source is not None and source.kind == "constant":
                raise ValueError(
                    f"{call_site()}: writes into a tensor {list(source.key.shape)} that is no buffer; use register_buffer"
                )

    def _refuse_hidden(self, value: Any, how: str) -> None:
        hidden = hides(value)
        if hidden is not None:
            raise ValueError(
                f"{how} a {hidden.__name__} that holds tensors, and only tensors can go from stage to stage; use tuples, dicts "
                "and dataclasses, or turn it off (a cache by use_cache=False)"
            )


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _unheard() -> Any:
    """Torch functions are called as they are, without anybody listening."""
    return disable_torch_function()


def _recomputed(what: str) -> bool:
    """Whether this is called under torch's checkpoint, which then saves nothing and calls it again."""
    hooks = saved_tensors_hooks_in_force()
    if hooks is None or hooks[0] is _same:
        return False
    if hooks[0].__qualname__.startswith("_checkpoint_hook"):
        return True
    raise ValueError(
        f"{call_site()}: {what} is called under saved_tensors_hooks, which do not reach a stage; set them in a module"
    )


def _intercept(module: nn.Module, path: str, called: Callable[..., Any]) -> None:
    """Makes calls of a module go by ``called(path, call, args, kwargs)``; the module is a copy that nobody else has."""
    kind = type(module)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return called(path, partial(kind.__call__, self), args, kwargs)

    members = {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    object.__setattr__(module, "__class__", type(kind.__name__, (kind,), members))
