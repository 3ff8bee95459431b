"""A module's forward as data: templates of values, instructions, and the part that one stage runs."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import attrs
import optree
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from functional_ds.base import tree
from functional_ds.base.containers import register_containers
from functional_ds.base.torch_private import disable_torch_function_subclass
from functional_ds.modules.deep_copy import fields_of

_ATOMS = (nn.Module, type, str, bytes, int, float, complex, torch.dtype, torch.device, torch.Size, type(None))


@attrs.frozen
class Placeholder:
    """Represents a tensor, by number."""

    number: int


@attrs.frozen(eq=False)
class Template:
    """A value with its tensors replaced by placeholders.

    Attributes:
        spec: the value's structure.
        leaves: its leaves, a ``Placeholder`` for each tensor.
    """

    spec: optree.PyTreeSpec
    leaves: tuple[Any, ...]

    def fill(self, tensors: Mapping[int, Any]) -> Any:
        """The value with these tensors."""
        return tree.unflatten(self.spec, [tensors[x.number] if type(x) is Placeholder else x for x in self.leaves])


def make_template(value: Any, of: Callable[[Tensor], Placeholder]) -> Template:
    """The template of a value, with each tensor replaced by ``of(tensor)``.

    Objects that are not pytrees, and that ``register_containers`` cannot register, are kept as they are.

    >>> made = make_template((torch.zeros(2), {"n": 3}), lambda tensor: Placeholder(7))
    >>> made.fill({7: "here"})
    ('here', {'n': 3})
    """
    leaves, spec = _flattened(value)
    return Template(spec, tuple([of(x) if isinstance(x, Tensor) else x for x in leaves]))


def tensors_in(value: Any) -> list[tuple[int, Tensor]]:
    """The tensors of a value, and the place of each among its leaves."""
    return [(place, leaf) for place, leaf in enumerate(_flattened(value)[0]) if isinstance(leaf, Tensor)]


def opaque_holder(value: Any) -> type | None:
    """The type of an object within a value that holds tensors that ``make_template`` does not find; None if there is none."""
    return next(map(type, _holders(_flattened(value)[0])), None)


@attrs.frozen(eq=False)
class Arguments:
    """A module's arguments.

    Attributes:
        tensors: those in it, in order.
        template: of (args, kwargs), with a number for each tensor.
    """

    tensors: tuple[Tensor, ...]
    template: Template

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "Arguments":
        """The record of a call's arguments."""
        leaves, spec = _flattened((args, dict(kwargs)))
        tensors = tuple([leaf for leaf in leaves if isinstance(leaf, Tensor)])
        numbers = iter(range(len(tensors)))
        numbered = tuple([Placeholder(next(numbers)) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
        return Arguments(tensors, Template(spec, numbered))

    @property
    def structure(self) -> Any:
        """Everything except the tensors, to compare; ``1`` and ``True`` are different arguments."""
        return self.template.spec, tuple([(type(leaf), leaf) for leaf in self.template.leaves])

    def replaced(self, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
        """(args, kwargs) with other tensors."""
        return self.template.fill(dict(enumerate(tensors)))  # type: ignore[no-any-return]

    def device(self, params: Mapping[str, Tensor]) -> torch.device:
        """The device that the module runs on: the parameters', else the arguments'."""
        with disable_torch_function_subclass():  # a deferred leaf need not be fetched for this
            device = next((leaf.device for leaf in params.values()), None)
            return device or next((tensor.device for tensor in self.tensors), torch.device("cpu"))


def _flattened(value: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """The leaves and the structure of a value, of which all containers are taken apart that can be."""
    leaves, spec = tree.flatten(value)
    holders = _holders(leaves)
    if not holders:
        return leaves, spec
    register_containers(holders)
    return tree.flatten(value)


def _holders(leaves: list[Any]) -> list[Any]:
    return [leaf for leaf in leaves if not isinstance(leaf, Tensor) and _holds_tensors(leaf, set())]


def _holds_tensors(value: Any, seen: set[int]) -> bool:
    """Whether there is a tensor anywhere in an object."""
    if isinstance(value, Tensor):
        return True
    if isinstance(value, _ATOMS) or callable(value) or id(value) in seen:
        return False
    seen.add(id(value))
    inner = tree.leaves(value)
    if tree.is_leaf(value):
        items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
        inner = [*fields_of(value).values(), *items]
    return any(_holds_tensors(x, seen) for x in inner)


Numbers = tuple[int, ...]
ModuleCall = tuple[str, int]  # a module's path, and the number of its earlier calls


@attrs.frozen
class TorchModes:
    """Torch's modes that change what a call computes.

    Attributes:
        grad: whether gradients are recorded.
        autocast: the dtype in which autocast computes; None where it is off.
    """

    grad: bool
    autocast: torch.dtype | None


def torch_modes(device: str) -> TorchModes:
    """The modes that are set here, for tensors of this type of device."""
    autocast = device != "meta" and torch.is_autocast_enabled(device)  # torch knows none there
    dtype = torch.get_autocast_dtype(device) if autocast else None
    return TorchModes(torch.is_grad_enabled(), dtype)


@attrs.frozen(eq=False, repr=False)
class Instruction:
    """A call of a torch function, or of a module as a whole.

    Attributes:
        target: the function, or the module's path.
        args: the template of (args, kwargs).
        results: the tensors that it makes: number, and place among the leaves of what it returns.
        reads: the numbers of the tensors whose values it uses.
        writes: the numbers of the tensors that it changes in place, and of those that share memory with them.
        pure: whether it can be omitted or repeated: it draws no random numbers and changes only ``writes``.
        modes: the modes that were set in the module's forward.
        checkpointed: whether it was called under ``torch.utils.checkpoint``.
        site: the line that called it.
    """

    target: Callable[..., Any] | str
    args: Template
    results: tuple[tuple[int, int], ...]
    reads: frozenset[int]
    writes: frozenset[int]
    pure: bool
    modes: TorchModes
    checkpointed: bool
    site: str

    def __str__(self) -> str:
        name = self.target if isinstance(self.target, str) else getattr(self.target, "__qualname__", str(self.target))
        made = " ".join(f"%{number}" for number, _ in self.results)
        read = " ".join(f"%{number}" for number in sorted(self.reads))
        wrote = "".join(f" writes %{number}" for number in sorted(self.writes))
        return f"{made or '-'} = {name}({read}){wrote}  # {self.site}"

    __repr__ = __str__


@attrs.frozen
class TensorSource:
    """The origin of a tensor that no instruction makes.

    Attributes:
        kind: an input, a parameter or buffer, a constant, or a stand-in for a tensor whose values are not read.
        key: the input's place among the tensors of the arguments; the path; the constant itself; (shape, dtype).
    """

    kind: Literal["input", "param", "buffer", "constant", "shape"]
    key: Any


@attrs.frozen(eq=False, repr=False)
class Program:
    """A module's forward for arguments of certain shapes, with tensors identified by number.

    Attributes:
        instructions: in order.
        sources: of the tensors that no instruction makes, by number.
        output: the template of what the module returns.
        outputs: the numbers of the tensors in it.
        storages: each tensor's storage, as a number; views share theirs.
        leaves: the parameters that each module holds, by paths.
        calls: for each call of a module, the place of its first instruction.
    """

    instructions: tuple[Instruction, ...]
    sources: Mapping[int, TensorSource]
    output: Template
    outputs: Numbers
    storages: Numbers
    leaves: Mapping[str, tuple[str, ...]]
    calls: Mapping[ModuleCall, int]

    def params(self, instruction: Instruction) -> list[str]:
        """The parameters that an instruction uses, by path."""
        whole = self.leaves[instruction.target] if isinstance(instruction.target, str) else ()
        sources = (self.sources.get(number) for number in sorted(instruction.reads))
        return [*whole, *(source.key for source in sources if source is not None and source.kind == "param")]

    def storages_of(self, kinds: tuple[str, ...]) -> set[int]:
        """The storages of all tensors that come from these kinds of sources."""
        return {self.storages[number] for number, source in self.sources.items() if source.kind in kinds}

    def written(self, instruction: Instruction) -> set[int]:
        """The storages that an instruction writes into."""
        return {self.storages[number] for number in instruction.writes}

    def __str__(self) -> str:
        sources = [f"%{number} = {source.kind} {source.key}" for number, source in self.sources.items()]
        return "\n".join([*sources, *map(str, self.instructions), f"-> {' '.join(f'%{n}' for n in self.outputs)}"])

    def __repr__(self) -> str:
        return f"<Program: {len(self.instructions)} instructions, {len(self.sources)} sources>"


@attrs.frozen(eq=False)
class StageProgram:
    """The part of a program that one stage runs.

    Attributes:
        arriving: the numbers of the tensors that the previous stage sends, in order.
        leaving: the numbers of the tensors that the next stage gets, in order.
        copied: the numbers of tensors that are cloned first, because they are written into and belong to the caller.
        sources: of the other tensors, by number.
        instructions: in order.
        spent: for each instruction, the tensors that are not needed after it.
        output: the template of the module's result; only the last stage's.
    """

    arriving: Numbers
    leaving: Numbers
    copied: Numbers
    sources: tuple[tuple[int, TensorSource], ...]
    instructions: tuple[Instruction, ...]
    spent: tuple[Numbers, ...]
    output: Template | None

    def run(
        self,
        module: nn.Module,
        params: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        x: Sequence[Tensor],
        device: torch.device,
    ) -> Any:
        """The tensors for the next stage, or the module's result.

        Args:
            module: the whole module; its submodules are called.
            params: this stage's parameters by path.
            inputs: the tensors of the module's arguments, in order.
            x: the arriving tensors.
            device: of stand-ins.
        """
        tensors = dict(zip(self.arriving, x, strict=True))
        for number, source in self.sources:
            tensors[number] = _fetch(source, module, params, inputs, device)
        for number in self.copied:
            tensors[number] = tensors[number].clone()
        modes = torch_modes(device.type)
        for instruction, spent in zip(self.instructions, self.spent, strict=True):
            made = tree.leaves(_execute(instruction, module, tensors, modes, device.type))
            for number, place in instruction.results:
                tensors[number] = made[place]
            for number in spent:
                del tensors[number]
        return tuple(tensors[number] for number in self.leaving) if self.output is None else self.output.fill(tensors)


def _fetch(
    source: TensorSource, module: nn.Module, params: Mapping[str, Tensor], inputs: Sequence[Tensor], device: torch.device
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


def _execute(instruction: Instruction, module: nn.Module, tensors: Mapping[int, Tensor], here: TorchModes, device: str) -> Any:
    """Runs an instruction under the modes of its forward."""
    args, kwargs = instruction.args.fill(tensors)
    target, then = instruction.target, instruction.modes
    function = module.get_submodule(target) if isinstance(target, str) else target
    if instruction.checkpointed:
        function, kwargs = partial(checkpoint, partial(function, **kwargs), use_reentrant=False), {}
    if then == here:
        return function(*args, **kwargs)
    with ExitStack() as stack:
        if then.grad != here.grad:
            stack.enter_context(torch.set_grad_enabled(then.grad))
        if then.autocast != here.autocast:
            stack.enter_context(torch.autocast(device, then.autocast, enabled=then.autocast is not None))
        return function(*args, **kwargs)
