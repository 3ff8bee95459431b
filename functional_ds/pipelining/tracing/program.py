"""``Program``: what a module's forward did, as data, and running a part of it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import attrs
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .templates import Mould, Place, at

__all__ = ["Ambience", "Instruction", "Part", "Program", "Source", "ambience"]

Numbers = tuple[int, ...]


@attrs.frozen
class Ambience:
    """Whether gradients are recorded, and in which dtype autocast computes (None where it is off)."""

    grad: bool
    autocast: torch.dtype | None


def ambience(device: str) -> Ambience:
    """What holds here, for tensors of this kind of device."""
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return Ambience(torch.is_grad_enabled(), dtype)


@attrs.frozen(eq=False)
class Instruction:
    """A call of a torch function, or of a module as a whole.

    Attributes:
        target: the function, or the module's path.
        args: the mould of (args, kwargs).
        results: the tensors that it makes: number and place in what it returns.
        reads: the numbers of the tensors whose values it uses; ``writes`` of those that it changes in place, or that share
            memory with such.
        pure: whether it can be left out, or done again: it draws no random numbers and changes nothing but ``writes``.
        ambience: what held in the module's forward.
        again: whether it was called under ``torch.utils.checkpoint``.
        site: the line that called it.
    """

    target: Callable[..., Any] | str
    args: Mould
    results: tuple[tuple[int, Place], ...]
    reads: frozenset[int]
    writes: frozenset[int]
    pure: bool
    ambience: Ambience
    again: bool
    site: str

    def __str__(self) -> str:
        name = self.target if isinstance(self.target, str) else getattr(self.target, "__qualname__", str(self.target))
        made = " ".join(f"%{number}" for number, _ in self.results)
        read = " ".join(f"%{number}" for number in sorted(self.reads))
        wrote = "".join(f" writes %{number}" for number in sorted(self.writes))
        return f"{made or '-'} = {name}({read}){wrote}  # {self.site}"


@attrs.frozen
class Source:
    """Where a tensor comes from that no instruction makes.

    Attributes:
        kind: an input (``key`` counts the tensors of the arguments), a parameter or buffer (its path), a constant (itself), or
            a stand-in for a tensor of which only shape, dtype and device are asked (those).
    """

    kind: Literal["input", "param", "buffer", "constant", "shape"]
    key: Any


@attrs.frozen(eq=False)
class Program:
    """A module's forward for arguments of certain shapes.

    Attributes:
        instructions: in order.
        sources: of the tensors that no instruction makes, by number.
        output: the mould of what the module returns.
        memory: for each tensor, a number of what it lies in; views share theirs.
        leaves: for each module path, the parameters that it holds.
        begins: where each call of a module is: (path, how many calls came before) to the instruction's place.
    """

    instructions: tuple[Instruction, ...]
    sources: Mapping[int, Source]
    output: Mould
    outputs: Numbers
    memory: Mapping[int, int]
    leaves: Mapping[str, tuple[str, ...]]
    begins: Mapping[tuple[str, int], int]

    def params(self, instruction: Instruction) -> list[str]:
        """The parameters that an instruction uses, by path."""
        whole = self.leaves[instruction.target] if isinstance(instruction.target, str) else ()
        sources = (self.sources.get(number) for number in sorted(instruction.reads))
        return [*whole, *(source.key for source in sources if source is not None and source.kind == "param")]

    def __str__(self) -> str:
        sources = [f"%{number} = {source.kind} {source.key}" for number, source in self.sources.items()]
        return "\n".join([*sources, *map(str, self.instructions), f"-> {' '.join(f'%{n}' for n in self.outputs)}"])


@attrs.frozen(eq=False)
class Part:
    """What one stage does of a program.

    Attributes:
        arriving, leaving: the numbers of the tensors that the stage before sends, and that the next one gets, in order.
        copied: those that are copied first, because they are somebody else's and are written into.
        sources: of the other tensors.
        instructions: each with its place in the program.
        spent: for each instruction, the tensors that nobody needs after it.
        output: the mould of the module's result; only the last part's.
    """

    arriving: Numbers
    leaving: Numbers
    copied: Numbers
    sources: tuple[tuple[int, Source], ...]
    instructions: tuple[Instruction, ...]
    spent: tuple[Numbers, ...]
    output: Mould | None

    def run(
        self,
        module: nn.Module,
        params: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        x: Sequence[Tensor],
        device: torch.device,
    ) -> Any:
        """The tensors for the next part, or the module's result."""
        tensors = dict(zip(self.arriving, x, strict=True))
        for number, source in self.sources:
            tensors[number] = _fetch(source, module, params, inputs, device)
        for number in self.copied:
            tensors[number] = tensors[number].clone()
        here = ambience(device.type)
        for instruction, spent in zip(self.instructions, self.spent, strict=True):
            found = _execute(instruction, module, tensors, here, device.type)
            for number, place in instruction.results:
                tensors[number] = at(found, place)
            for number in spent:
                del tensors[number]
        return tuple(tensors[number] for number in self.leaving) if self.output is None else self.output.fill(tensors)


def _fetch(
    source: Source, module: nn.Module, params: Mapping[str, Tensor], inputs: Sequence[Tensor], device: torch.device
) -> Any:
    if source.kind == "input":
        return inputs[source.key]
    if source.kind == "param":
        return params[source.key]
    if source.kind == "buffer":
        return module.get_buffer(source.key)
    if source.kind == "shape":
        shape, dtype = source.key
        return torch.zeros((), dtype=dtype, device=device).expand(shape)
    return source.key


def _execute(instruction: Instruction, module: nn.Module, tensors: Mapping[int, Tensor], here: Ambience, device: str) -> Any:
    args, kwargs = instruction.args.fill(tensors)
    target = instruction.target
    function = module.get_submodule(target) if isinstance(target, str) else target
    if instruction.ambience == here:
        return _called(instruction, function, args, kwargs)
    with ExitStack() as stack:
        then = instruction.ambience
        if then.grad != here.grad:
            stack.enter_context(torch.set_grad_enabled(then.grad))
        if then.autocast != here.autocast:
            stack.enter_context(torch.autocast(device, then.autocast, enabled=then.autocast is not None))
        return _called(instruction, function, args, kwargs)


def _called(instruction: Instruction, function: Any, args: Any, kwargs: Any) -> Any:
    if instruction.again:
        return checkpoint(partial(function, **kwargs), *args, use_reentrant=False)
    return function(*args, **kwargs)
