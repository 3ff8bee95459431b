"""``cut``: stages from any module."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from functional_ds.base.containers import register_containers
from functional_ds.base.device import forked_rng, synchronize
from functional_ds.base.prng import Key
from functional_ds.modules.functional import Apply, functional
from functional_ds.pipelining.stages.from_functions import call_with
from functional_ds.pipelining.stages.stages import Params, Stage, Stages

from .cache import ProgramCache
from .program import ModuleCall, Program, StageProgram
from .split_points import balanced_split, candidates, modules_around, named_split
from .templates import tensors_in

__all__ = ["cut", "seconds"]


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
    """Stages from a module, and its parameters by name.

    The module's forward runs once on tensors without values, and its calls are recorded: modules as a whole, and what it
    computes between them. Batches of other shapes are traced again. A stage runs the calls between two cuts. It sends on what
    later stages use, also over several stages; what follows from the inputs alone is recomputed instead.

    Law: the stages, one after the other, compute what the module does, bit for bit, with the same gradients.

    Args:
        module: not changed, and not needed any more.
        at: the paths of modules, or the number of stages. The first call of each module begins a stage; ``(path, n)`` means
            the call after n others. A pattern with ``*`` stands for all modules that match.
        example: a batch. Its values are not used, unless ``by="measured"``.
        loss: ``loss(output, batch)``, where the module does not return the loss itself.
        inputs: ``inputs(batch)``: a tuple of arguments, a dict of keyword arguments, or the only one. By default a dict itself,
            the first entry of a tuple or list, else the batch.
        by: what a number of stages share equally: ``"blocks"``, ``"parameters"``, ``"measured"`` seconds of forward and
            backward, a list with a cost for each block, or a function of a block's (path, module) that gives its cost.
        blocks: a pattern of the blocks' paths; by default the entries of the largest ModuleList or Sequential.

    Raises:
        ValueError: an entry of ``at`` names no module, or one that is not called, or is out of order; the forward's calls
            depend on values.
        TypeError: ``module`` is no module, or ``at`` is neither a number nor a list.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))
    >>> split, params = cut(net, ["2"], loss=lambda y, batch: (y - batch[1]).square().mean(), example=(torch.ones(3, 4), 1.0))
    >>> print(split)
    2 stages
    0: 0: 2 leaves, 40 parameters
    1: 2 to 4: 4 leaves, 41 parameters
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module={module!r} is no nn.Module; stages(functions, params) makes stages of functions")
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
    paths = [tuple(dict.fromkeys(path for each in part.instructions for path in program.params(each))) for part in programs]
    used = {path for each in paths for path in each}
    paths[0] = (*paths[0], *(path for path in params if path not in used))
    runs = [_StageRun(cache, index, loss if index == len(programs) - 1 else None) for index in range(len(programs))]
    stages = tuple(Stage(*each) for each in zip(paths, runs, (_name(part, program) for part in programs), strict=True))
    return Stages(stages, {path: parameter.numel() for path, parameter in params.items()}, apply), params


@attrs.frozen
class _StageRun:
    """A stage's ``run``."""

    cache: ProgramCache
    index: int
    loss: Callable[..., Any] | None

    def __call__(self, params: Params, x: Any, batch: Any, key: Key | None) -> Any:
        arguments = self.cache.arguments(batch, key)
        part = self.cache.stages(params, arguments)[self.index]
        device = arguments.device(params)
        found = self.cache.apply.within(params, lambda module: part.run(module, params, arguments.tensors, x or (), device))
        return found if self.loss is None else call_with(self.loss, found, batch, key=key)


def _name(part: StageProgram, program: Program) -> str:
    """The first and the last module that a stage calls; modules with parameters, if it calls any."""
    called = [each.target for each in part.instructions if isinstance(each.target, str)]
    called = [path for path in called if program.leaves[path]] or called
    if not called:
        return "no module"
    return called[0] if called[0] == called[-1] else f"{called[0]} to {called[-1]}"


def seconds(
    apply: Apply, params: Mapping[str, Tensor], parts: Sequence[StageProgram], inputs: Sequence[Tensor], *, rounds: int = 5
) -> list[float]:
    """Seconds that each stage's forward and backward take, the median of some rounds after a first that warms up.

    Args:
        apply: the module; its buffers change, so give it a copy of its own.
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
                found = apply.within(params, lambda module: part.run(module, params, inputs, x, device))  # noqa: B023
                outputs = [tensor for _, tensor in tensors_in(found)]
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
