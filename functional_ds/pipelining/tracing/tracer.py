"""Tracing: a module's forward runs on tensors without values, and each call that it makes becomes an instruction.

For each call of a torch function, or of a module that is not opened::

    number the argument tensors; an unknown one is a constant, or comes from code that cannot be seen
    run the call, noting which storages its operators read and write
    if it made a tensor or wrote into one:
        append Instruction(function, arguments with numbers for tensors, numbers of the results, reads, writes)

Torch's own tracers (2.13) do less than a split needs. Proxies of ``torch.fx`` have neither shapes nor values, so they cannot
trace a forward that branches on a shape, sets autocast by a tensor's device or writes ``x[i] = y``, nor transformers' models.
``torch.export`` gives a graph of operators: no module is left for ``remat``, ``compiled`` or ``tensor_parallel`` to run as a
whole, ``torch.utils.checkpoint`` is gone, an ``autograd.Function`` has the derivative of its forward instead of its own
backward (a straight-through estimator gets zero), and branches on constants raise errors.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from functional_ds.base.torch_private import FakeTensor, FakeTensorMode, disable_torch_function
from functional_ds.base.tree import setting
from functional_ds.comm.record.group import call_site
from functional_ds.pipelining.stages.stages import NEEDS_VALUES

from .interception import FunctionCalls, OperatorLog, intercept, no_checkpoint, storage_number, under_checkpoint
from .program import (
    Instruction,
    ModuleCall,
    Placeholder,
    Program,
    Template,
    TensorSource,
    make_template,
    opaque_holder,
    tensors_in,
    torch_modes,
)


class NotConstant(Exception):
    """A tensor that was traced as a constant depends on the arguments or on random numbers."""


@attrs.define(eq=False)
class _TensorTable:
    """The tensors of a forward so far, in order.

    The table keeps every tensor alive, so that no two of them get the same id or storage.

    Attributes:
        tensors: by number.
        storages: each tensor's storage; views share theirs, and a stand-in has its own negative number.
        requires_grad: whether each tensor requires grad, by the recorded calls.
        sources: of the tensors that no instruction makes, by number.
    """

    tensors: list[Tensor] = attrs.field(factory=list)
    storages: list[int] = attrs.field(factory=list)
    requires_grad: list[bool] = attrs.field(factory=list)
    sources: dict[int, TensorSource] = attrs.field(factory=dict)
    _numbers: dict[int, int] = attrs.field(factory=dict)  # by id
    _stand_ins: "dict[TensorSource, int]" = attrs.field(factory=dict)

    def add(self, tensor: Tensor, source: TensorSource | None = None) -> int:
        """Adds a tensor; returns its number."""
        number = self._numbers[id(tensor)] = len(self.tensors)
        return self._append(tensor, storage_number(tensor), source, number)

    def number(self, tensor: Tensor) -> int | None:
        """A tensor's number; None if it is unknown."""
        return self._numbers.get(id(tensor))

    def stand_in(self, tensor: Tensor) -> int:
        """The number of the stand-in for all tensors of this shape and dtype, where a call reads no values."""
        source = TensorSource("shape", (tuple(tensor.shape), tensor.dtype))
        if source not in self._stand_ins:
            number = self._stand_ins[source] = len(self.tensors)
            self._append(tensor, -number, source, number)
        return self._stand_ins[source]

    def in_storages(self, storages: set[int]) -> frozenset[int]:
        """The numbers of all tensors in these storages."""
        return frozenset(number for number, storage in enumerate(self.storages) if storage in storages)

    def _append(self, tensor: Tensor, storage: int, source: TensorSource | None, number: int) -> int:
        self.tensors.append(tensor)
        self.storages.append(storage)
        self.requires_grad.append(tensor.requires_grad)
        if source is not None:
            self.sources[number] = source
        return number


class ForwardTracer:
    """One trace of a module's forward: the program so far.

    With ``constants``, what depends on no input, parameter or buffer has its values (``torch.arange``, and masks made of it),
    and a forward may branch on them.

    Args:
        module: a copy for this call only, with tensors of ``mode`` for parameters and buffers; its classes are changed.
        mode: the mode of the tensors without values.
        opened: paths of modules whose forward is traced call by call; every other module is one instruction.
        constants: whether constants have values.
    """

    def __init__(self, module: nn.Module, mode: FakeTensorMode, opened: frozenset[str], constants: bool) -> None:
        self.module, self.mode, self.opened, self.constants = module, mode, opened, constants
        self.operators = OperatorLog()
        self.table = _TensorTable()
        self.instructions: list[Instruction] = []
        self.calls: dict[ModuleCall, int] = {}
        self.times: Counter[str] = Counter()  # how often each module was called
        self.inside = False  # a recorded call is running; what it calls belongs to it
        for path, parameter in module.named_parameters():
            self.table.add(parameter, TensorSource("param", path))
        for path, buffer in module.named_buffers():
            self.table.add(buffer, TensorSource("buffer", path))
        self.lasting = set(self.table.storages)  # they outlive the forward

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Program:
        """Runs the forward on these arguments, with tensors of ``mode``; returns its program.

        Raises:
            NotConstant: a constant's values depend on arguments or random numbers; trace again without ``constants``.
            ValueError: the forward does what a stage cannot repeat; names the line.
        """
        for place, (_, tensor) in enumerate(tensors_in((tuple(args), dict(kwargs)))):
            self.table.add(tensor, TensorSource("input", place))
        self.device = self.table.tensors[0].device.type if self.table.tensors else "cpu"
        for path, part in list(self.module.named_modules()):
            intercept(part, path, self.module_called)
        fakes = nullcontext() if self.constants else self.mode
        with fakes, self.operators, no_checkpoint(), FunctionCalls(self.function_called):
            result = self.module(*args, **kwargs)
            self.inside = True
        return self._program(result)

    def _program(self, result: Any) -> Program:
        _refuse_opaque(result, "the module returns")
        outputs = tuple(self._number(tensor, "the module's result") for _, tensor in tensors_in(result))
        following = iter(outputs)
        first_path = {id(parameter): path for path, parameter in self.module.named_parameters()}
        return Program(
            instructions=tuple(self.instructions),
            sources=self.table.sources,
            output=make_template(result, lambda tensor: Placeholder(next(following))),
            outputs=outputs,
            storages=tuple(self.table.storages),
            leaves={path: tuple(first_path[id(p)] for p in part.parameters()) for path, part in self.module.named_modules()},
            calls=self.calls,
        )

    # -- calls ---------------------------------------------------------------------------------------------------------

    def function_called(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Runs a torch function, and records it unless it belongs to a recorded call."""
        if self.inside:
            return function(*args, **kwargs)
        if function is Tensor.__iter__:
            return iter(self.function_called(torch.unbind, args, {"dim": 0}))
        try:
            return self._record(function, partial(function, *args, **kwargs), args, kwargs)
        except NEEDS_VALUES as error:
            raise ValueError(
                f"{call_site()}: {_name(function)} reads a tensor's value, outside of the modules that run as a whole, so "
                "what follows depends on the data; move it into a module of its own"
            ) from error

    def module_called(self, path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a module, and records it as one instruction unless it is opened or belongs to a recorded call."""
        if self.inside:
            return forward(*args, **kwargs)
        self.calls[path, self.times[path]] = len(self.instructions)
        self.times[path] += 1
        if path in self.opened:
            return forward(*args, **kwargs)
        _refuse_opaque((args, kwargs), f"{path} is called with")
        try:
            with self.mode:
                result = self._record(path, partial(forward, *args, **kwargs), args, kwargs)
        except NEEDS_VALUES as error:
            raise ValueError(
                f"{path}: its forward reads a tensor's value ({error}), so its results' shapes are unknown; choose a form "
                "without (for experts of transformers experts_implementation='grouped_mm' or 'batched_mm')"
            ) from error
        _refuse_opaque((args, kwargs), f"{path} was called with, and wrote into,")
        _refuse_opaque(result, f"{path} returns")
        return result

    def _record(self, target: Any, call: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """Runs a call; appends an instruction if it made a tensor or wrote into one."""
        with disable_torch_function():
            modes = torch_modes(self.device)
            arguments = [self._number(tensor, f"{_name(target)}'s argument") for _, tensor in tensors_in((args, kwargs))]
        self.operators.clear()
        with setting(self, inside=True):
            result = call()
        with disable_torch_function():
            results = {id(t): (place, t) for place, t in tensors_in(result) if self.table.number(t) is None}
            writes = self.table.in_storages(self.operators.written)
            if results or writes:
                template, reads = self._arguments(target, args, kwargs)
                pure = self.operators.pure and not (self.operators.written & self.lasting)
                if self.constants:
                    self._refuse_not_constant(pure, reads, [*(t for _, t in results.values()), *map(self._tensor, writes)])
                self._refuse_written_constants(writes)
                made = tuple((self.table.add(tensor), place) for place, tensor in results.values())
                checkpointed = under_checkpoint(_name(target))
                self.instructions.append(
                    Instruction(target, template, made, reads, writes, pure, modes, checkpointed, call_site())
                )
            for number in {*arguments, *writes}:
                self.table.requires_grad[number] = self.table.tensors[number].requires_grad
        return result

    def _arguments(self, target: Any, args: Any, kwargs: Any) -> tuple[Template, frozenset[int]]:
        """The arguments with numbers for tensors, and these numbers. A tensor whose values were not read gets a stand-in."""
        reads: set[int] = set()

        def numbered(tensor: Tensor) -> Placeholder:
            number = self.table.number(tensor)
            if number is None:
                raise ValueError(
                    f"{call_site()}: {_name(target)} puts a tensor into a list or dict that it is given; return it"
                )
            if self.table.storages[number] not in self.operators.touched:
                number = self.table.stand_in(tensor)
            reads.add(number)
            return Placeholder(number)

        return make_template((tuple(args), dict(kwargs)), numbered), frozenset(reads)

    # -- tensors -------------------------------------------------------------------------------------------------------

    def _tensor(self, number: int) -> Tensor:
        return self.table.tensors[number]

    def _number(self, tensor: Tensor, what: str) -> int:
        """A tensor's number. An unknown tensor with values is a constant; one without comes from unseen code."""
        number = self.table.number(tensor)
        if number is None and not isinstance(tensor, FakeTensor):
            return self.table.add(tensor, TensorSource("constant", tensor))
        if number is None or self.table.requires_grad[number] != tensor.requires_grad:
            raise ValueError(
                f"{call_site()}: {what} comes from code that is not seen from outside, such as an autograd.Function, "
                "checkpoint(use_reentrant=True) or torch.func; put it into a module of its own, which then runs as a whole. "
                "What a hook takes out of such a module (router logits, by output_router_logits=True) cannot be used outside"
            )
        return number

    def _refuse_not_constant(self, pure: bool, reads: frozenset[int], changed: Sequence[Tensor]) -> None:
        """Raises an error if a tensor with values depends on random numbers or on a tensor without values."""
        if all(isinstance(tensor, FakeTensor) for tensor in changed):
            return
        if not pure or any(isinstance(self._tensor(number), FakeTensor) for number in reads):
            raise NotConstant(call_site())

    def _refuse_written_constants(self, writes: frozenset[int]) -> None:
        for number in writes:
            source = self.table.sources.get(number)
            if source is not None and source.kind == "constant":
                raise ValueError(
                    f"{call_site()}: writes into a tensor {list(source.key.shape)} that is not a buffer; use register_buffer"
                )


def _name(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def _refuse_opaque(value: Any, how: str) -> None:
    holder = opaque_holder(value)
    if holder is not None:
        raise ValueError(
            f"{how} a {holder.__name__} that holds tensors, and only tensors can go from stage to stage; use tuples, dicts "
            "and dataclasses, or turn it off (a cache by use_cache=False)"
        )
