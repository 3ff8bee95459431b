"""Pipeline stages from any module: traces it, once for each shape of its batches, and splits the trace."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from functional_ds.base.containers import register_containers
from functional_ds.base.device import forked_rng, synchronize
from functional_ds.base.prng import Key
from functional_ds.base.torch_private import FakeTensorMode, disable_dispatch_modes, disable_torch_function_subclass
from functional_ds.modules.functional import Apply, functional
from functional_ds.pipelining.stages.from_functions import call_with, first_input, takes_key
from functional_ds.pipelining.stages.stages import Params, Stage, Stages
from functional_ds.step.axes import for_shapes

from .program import Arguments, ModuleCall, Program, StageProgram, tensors_in, torch_modes
from .split import balanced_split, candidates, modules_around, named_split, split_program
from .tracer import ForwardTracer

_CAPACITY = 256  # programs; the cache is emptied when a run's batches have more shapes than this


@attrs.define(eq=False, repr=False)
class ProgramCache:
    """A module, where it is split, and the stages' programs for all arguments so far.

    Attributes:
        apply: the module.
        inputs: from a batch to the module's arguments.
        opened: the modules whose forward is traced call by call.
        split_points: the calls that begin stages, without the first stage's.
    """

    apply: Apply
    inputs: Callable[..., Any] | None
    opened: frozenset[str]
    split_points: tuple[ModuleCall, ...] = ()
    _programs: dict[Any, tuple[StageProgram, ...]] = attrs.field(factory=dict, init=False)

    def __repr__(self) -> str:
        return f"<ProgramCache: {len(self.split_points) + 1} stages, {len(self._programs)} programs>"

    def arguments(self, batch: Any, key: Key | None) -> Arguments:
        """The module's arguments."""
        given = first_input(batch) if self.inputs is None else call_with(self.inputs, batch, key=key)
        if isinstance(given, tuple):
            return Arguments.of(given, {})
        return Arguments.of((), given) if isinstance(given, Mapping) else Arguments.of((given,), {})

    def stages(self, params: Params, arguments: Arguments) -> tuple[StageProgram, ...]:
        """The stages' programs for these arguments; traces the module if their shapes are new.

        Raises:
            ValueError: with these arguments a module that begins a stage is not called.
        """
        programs = self._programs.get(self._signature(params, arguments))
        return self.put(params, arguments, self.trace(params, arguments)) if programs is None else programs

    def put(self, params: Params, arguments: Arguments, program: Program) -> tuple[StageProgram, ...]:
        """Splits a program, and caches the result for such arguments."""
        if len(self._programs) >= _CAPACITY:
            self._programs.clear()
        stages = self._programs[self._signature(params, arguments)] = self.split(program, self.split_points)
        return stages

    def split(self, program: Program, split_points: Sequence[ModuleCall]) -> tuple[StageProgram, ...]:
        """The stages of a program that begin with these calls."""
        for path, times in split_points:
            if (path, times) not in program.calls:
                raise ValueError(f"{path!r} begins a stage, but is not called {times + 1} times with this batch")
        return split_program(program, [program.calls[call] for call in split_points])

    def trace(self, params: Params, arguments: Arguments) -> Program:
        """Traces the module's forward, hidden from surrounding modes; with values for constants if possible.

        Its leaves are whole, so the trace sees no axes of the running step.
        """
        with disable_dispatch_modes(), forked_rng(), for_shapes():
            try:
                return self._trace(params, arguments, constants=True)
            except Exception:  # an error that has nothing to do with constants comes again
                return self._trace(params, arguments, constants=False)

    def _trace(self, params: Params, arguments: Arguments, *, constants: bool) -> Program:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        device = arguments.device(params)
        with mode:
            parameters = _without_values(self.apply.bare, params, device)
            tensors = [
                torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
                for tensor in arguments.tensors
            ]

        def empty(buffer: Tensor) -> Tensor:
            with mode:
                return torch.empty_like(buffer, device=device)

        module = self.apply.dressed(parameters, empty)
        args, kwargs = arguments.replaced(tensors)
        return ForwardTracer(module, mode, self.opened, constants).run(args, kwargs)

    def _signature(self, params: Params, arguments: Arguments) -> Any:
        """Everything that a program depends on."""
        shapes = tuple([(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in arguments.tensors])
        with disable_torch_function_subclass():
            dtypes = tuple([leaf.dtype for leaf in params.values()])
        device = arguments.device(params)
        return arguments.structure, shapes, dtypes, device, self.apply.notice(), torch_modes(device.type)


def _without_values(bare: Mapping[str, nn.Parameter], params: Params, device: torch.device) -> dict[str, Tensor]:
    """All parameters without values. Those of other ranks are assumed to be cast like most of this rank's."""
    with disable_torch_function_subclass():
        known = {path: leaf.dtype for path, leaf in params.items()}
    casts = Counter((bare[path].dtype, dtype) for path, dtype in known.items() if path in bare)
    most = {before: after for (before, after), _ in reversed(casts.most_common())}
    made: dict[str, Tensor] = {}
    for path, parameter in bare.items():
        dtype = known.get(path, most.get(parameter.dtype, parameter.dtype))
        empty = torch.empty_strided(parameter.shape, parameter.stride(), dtype=dtype, device=device)
        made[path] = nn.Parameter(empty, parameter.requires_grad)
    return made


def cut(
    module: nn.Module,
    at: int | Sequence[str | ModuleCall],
    *,
    example: Any,
    loss: Callable[..., Any] | None = None,
    inputs: Callable[..., Any] | None = None,
    by: Any = "blocks",
    blocks: str | None = None,
) -> tuple[Stages, dict[str, Tensor]]:
    """Splits a module into pipeline stages; returns the stages and its parameters by name.

    The module's forward runs once on tensors without values, and its calls are recorded: modules as a whole, and operations
    between them. Batches of other shapes are traced again. A stage runs the calls between two splits, and sends what later
    stages use, also over several stages; what depends only on the inputs is recomputed instead.

    Law: the stages, one after another, are bitwise equal to the module, in values and gradients.

    Args:
        module: not changed, and not needed any more.
        at: the paths of modules, or the number of stages. The first call of each module begins a stage; ``(path, n)`` means the
            call after n others. A pattern with ``*`` stands for all modules that match.
        example: a batch. Its values are not used, unless ``by="measured"``.
        loss: ``loss(output, batch)``, if the module does not return the loss itself.
        inputs: ``inputs(batch)``: a tuple of arguments, a dict of keyword arguments, or the only one. By default a dict itself,
            the first entry of a tuple or list, else the batch.
        by: what a number of stages share equally: ``"blocks"``, ``"parameters"``, ``"measured"`` seconds of forward and
            backward, a list with a cost for each block, or a function of a block's (path, module) that gives its cost.
        blocks: a pattern of the blocks' paths; by default the entries of the largest ModuleList or Sequential.

    Raises:
        ValueError: an entry of ``at`` names no module, or one that is not called, or is out of order; the forward's calls
            depend on values.
        TypeError: ``module`` is not a module, or ``at`` is neither a number nor a list.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))
    >>> split, params = cut(net, ["2"], loss=lambda y, batch: (y - batch[1]).square().mean(), example=(torch.ones(3, 4), 1.0))
    >>> print(split)
    2 stages
    0: 0: 2 leaves, 40 parameters
    1: 2 to 4: 4 leaves, 41 parameters
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module={module!r} is not an nn.Module; stages(functions, params) makes stages of functions")
    apply, params = functional(module)
    starts = candidates(module, at, blocks)
    cache = ProgramCache(apply, inputs, modules_around(starts))
    register_containers(example)
    arguments = cache.arguments(example, None)
    program = cache.trace(params, arguments)
    if isinstance(at, int):

        def timed(calls: Sequence[ModuleCall]) -> list[float]:
            return seconds(Apply(module), params, cache.split(program, calls[1:]), arguments.tensors)

        cache.split_points = balanced_split(program, module, starts[0], stages=at, by=by, timed=timed)
    else:
        cache.split_points = named_split(program, starts)
    programs = cache.put(params, arguments, program)
    paths = [
        tuple(dict.fromkeys(path for instruction in part.instructions for path in program.params(instruction)))
        for part in programs
    ]
    used = {path for stage_paths in paths for path in stage_paths}
    paths[0] = (*paths[0], *(path for path in params if path not in used))
    runs = [_StageRun(cache, index, loss if index == len(programs) - 1 else None) for index in range(len(programs))]
    stages = tuple(Stage(*fields) for fields in zip(paths, runs, (_name(part, program) for part in programs), strict=True))
    return Stages(stages, {path: parameter.numel() for path, parameter in params.items()}, apply), params


@attrs.frozen
class _StageRun:
    """A stage's ``run``."""

    cache: ProgramCache
    index: int
    loss: Callable[..., Any] | None

    @property
    def draws(self) -> bool:
        """Whether it may draw random numbers."""
        return takes_key(self.cache.inputs, self.loss)

    def __call__(self, params: Params, x: Any, batch: Any, key: Key | None) -> Any:
        arguments = self.cache.arguments(batch, key)
        part = self.cache.stages(params, arguments)[self.index]
        device = arguments.device(params)
        output = self.cache.apply.within(params, lambda module: part.run(module, params, arguments.tensors, x or (), device))
        return output if self.loss is None else call_with(self.loss, output, batch, key=key)


def _name(part: StageProgram, program: Program) -> str:
    """The first and the last module that a stage calls; modules with parameters, if it calls any."""
    called = [instruction.target for instruction in part.instructions if isinstance(instruction.target, str)]
    called = [path for path in called if program.leaves[path]] or called
    if not called:
        return "no module"
    return called[0] if called[0] == called[-1] else f"{called[0]} to {called[-1]}"


def seconds(
    apply: Apply, params: Mapping[str, Tensor], parts: Sequence[StageProgram], inputs: Sequence[Tensor], *, rounds: int = 5
) -> list[float]:
    """Seconds of each stage's forward and backward, the median of some rounds after a warmup.

    Args:
        apply: the module; its buffers change, so pass a separate copy.
        params: all parameters by path.
        parts: the stages' programs.
        inputs: the tensors of the module's arguments.
        rounds: how many rounds are timed.
    """
    device = next((leaf.device for leaf in params.values()), torch.device("cpu"))
    trained = [leaf for leaf in params.values() if leaf.requires_grad]
    times: list[list[float]] = [[] for _ in parts]
    with torch.enable_grad(), forked_rng():
        for _ in range(rounds + 1):
            x: list[Tensor] = []
            for part, taken in zip(parts, times, strict=True):
                begin = _now(device)
                output = apply.within(params, lambda module: part.run(module, params, inputs, x, device))  # noqa: B023
                outputs = [tensor for _, tensor in tensors_in(output)]
                _backward(outputs, [*x, *trained])
                taken.append(_now(device) - begin)
                x = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in outputs]
    return [statistics.median(taken[1:]) for taken in times]


def _backward(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    roots = [tensor for tensor in outputs if tensor.requires_grad]
    ends = [leaf for leaf in leaves if leaf.requires_grad]
    if roots and ends:
        torch.autograd.grad(roots, ends, [torch.ones_like(root) for root in roots], allow_unused=True)


def _now(device: torch.device) -> float:
    synchronize([device])
    return time.perf_counter()
