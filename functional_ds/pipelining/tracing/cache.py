"""``ProgramCache``: a module's programs split into stages, one for each shape of its batches."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from functional_ds.base.device import forked_rng
from functional_ds.base.prng import Key
from functional_ds.base.torch_private import FakeTensorMode, disable_dispatch_modes, disable_torch_function_subclass
from functional_ds.modules.functional import Apply
from functional_ds.pipelining.stages.from_functions import call_with, first_input
from functional_ds.pipelining.stages.stages import Params
from functional_ds.step.axes import for_shapes

from .program import ModuleCall, Program, StageProgram, torch_modes
from .split import split_program
from .templates import Arguments
from .tracer import trace_forward

__all__ = ["ProgramCache"]

_CAPACITY = 256  # programs; the cache is emptied when a run's batches have more shapes than this


@attrs.define(eq=False, repr=False)
class ProgramCache:
    """A module, where it is split, and the stages' programs for all arguments so far.

    Attributes:
        apply: the module.
        inputs: what it is called with, from a batch.
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
        """What the module is called with."""
        given = first_input(batch) if self.inputs is None else call_with(self.inputs, batch, key=key)
        if isinstance(given, tuple):
            return Arguments.of(given, {})
        return Arguments.of((), given) if isinstance(given, Mapping) else Arguments.of((given,), {})

    def stages(self, params: Params, arguments: Arguments) -> tuple[StageProgram, ...]:
        """The stages' programs for these arguments; traces the module where such arguments are new.

        Raises:
            ValueError: with these arguments a module that begins a stage is not called.
        """
        found = self._programs.get(self._signature(params, arguments))
        return self.put(params, arguments, self.trace(params, arguments)) if found is None else found

    def put(self, params: Params, arguments: Arguments, program: Program) -> tuple[StageProgram, ...]:
        """Splits a program, and keeps the result for the next time that such arguments come."""
        if len(self._programs) >= _CAPACITY:
            self._programs.clear()
        stages = self._programs[self._signature(params, arguments)] = self.split(program, self.split_points)
        return stages

    def split(self, program: Program, split_points: Sequence[ModuleCall]) -> tuple[StageProgram, ...]:
        """The stages of a program that begin with these calls."""
        for path, times in split_points:
            if (path, times) not in program.calls:
                raise ValueError(f"{path!r} begins a stage, but is not called {times + 1} times with this batch")
        return split_program(program, [program.calls[each] for each in split_points])

    def trace(self, params: Params, arguments: Arguments) -> Program:
        """Traces the module's forward, unseen by modes around it; with values for constants if that can be done.

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
            own = _without_values(self.apply.bare, params, device)
            tensors = [
                torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=each.device)
                for each in arguments.tensors
            ]

        def empty(buffer: Tensor) -> Tensor:
            with mode:
                return torch.empty_like(buffer, device=device)

        module = self.apply.dressed(own, empty)
        args, kwargs = arguments.replaced(tensors)
        return trace_forward(module, args, kwargs, mode=mode, opened=self.opened, constants=constants)

    def _signature(self, params: Params, arguments: Arguments) -> Any:
        """All that a program depends on."""
        shapes = tuple([(each.shape, each.stride(), each.dtype, each.device) for each in arguments.tensors])
        with disable_torch_function_subclass():
            dtypes = tuple([leaf.dtype for leaf in params.values()])
        device = arguments.device(params)
        return arguments.structure, shapes, dtypes, device, self.apply.notice(), torch_modes(device.type)


def _without_values(bare: Mapping[str, nn.Parameter], params: Params, device: torch.device) -> dict[str, Tensor]:
    """All parameters without values. Those of other ranks are assumed to be cast as most of this rank's are."""
    with disable_torch_function_subclass():
        known = {path: leaf.dtype for path, leaf in params.items()}
    casts = Counter((bare[path].dtype, dtype) for path, dtype in known.items() if path in bare)
    most: dict[torch.dtype, torch.dtype] = {}
    for (before, after), _ in reversed(casts.most_common()):
        most[before] = after
    return {
        path: nn.Parameter(
            torch.empty_strided(
                each.shape, each.stride(), dtype=known.get(path, most.get(each.dtype, each.dtype)), device=device
            ),
            each.requires_grad,
        )
        for path, each in bare.items()
    }
