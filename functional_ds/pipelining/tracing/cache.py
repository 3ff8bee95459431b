"""``Plan``: a module's programs, one for each shape of its batches, cut in parts."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from functional_ds.base.prng import Key
from functional_ds.base.torch_private import FakeTensor, FakeTensorMode, disable_torch_function_subclass, unset_fake_temporarily
from functional_ds.modules.functional import Apply
from functional_ds.pipelining.stages.from_functions import called, first_input
from functional_ds.pipelining.stages.stages import Params

from .program import Part, Program, ambience
from .split import cut_program
from .split_points import Begin
from .templates import Hole, Mould, mould
from .tracer import record

__all__ = ["Arguments", "Plan"]

_KEPT = 256  # programs; a run whose batches have more shapes than this records some of them again


@attrs.frozen(eq=False)
class Arguments:
    """What a module is called with.

    Attributes:
        args, kwargs: as given.
        tensors: those in them, in order.
        form: all else about them, to compare: their mould, or, where they are tensors and nothing else, how many and the names.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    tensors: tuple[Tensor, ...]
    form: Any

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "Arguments":
        """Arguments taken apart."""
        values = (*args, *kwargs.values())
        if all(type(each) is Tensor for each in values):  # this is asked for at each action of a pipeline
            return Arguments(args, kwargs, values, (len(args), tuple(kwargs)))
        made, tensors = _taken_apart(args, kwargs)
        return Arguments(args, kwargs, tensors, made)

    def replaced(self, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
        """The same (args, kwargs) with other tensors."""
        return _taken_apart(self.args, self.kwargs)[0].fill(dict(enumerate(tensors)))  # type: ignore[no-any-return]

    def device(self, params: Params) -> torch.device:
        """Where the module runs."""
        with disable_torch_function_subclass():  # a deferred leaf need not be fetched for this
            found = next((leaf.device for leaf in params.values()), None)
            return found or next((tensor.device for tensor in self.tensors), torch.device("cpu"))


def _taken_apart(args: Any, kwargs: Any) -> tuple[Mould, tuple[Tensor, ...]]:
    tensors: list[Tensor] = []

    def take(tensor: Tensor) -> Mould:
        tensors.append(tensor)
        return Hole(len(tensors) - 1)

    return mould((tuple(args), dict(kwargs)), take), tuple(tensors)


@attrs.define(eq=False)
class Plan:
    """How a module is cut.

    Attributes:
        apply: the module.
        inputs: what it is called with, from a batch.
        opened: the modules whose forward is looked into.
        begins: the calls that begin stages, but for the first.
    """

    apply: Apply
    inputs: Callable[..., Any] | None
    opened: frozenset[str]
    begins: tuple[Begin, ...] = ()
    _made: dict[Any, tuple[Part, ...]] = attrs.field(factory=dict, init=False)

    def arguments(self, batch: Any, key: Key | None) -> Arguments:
        """What the module is called with."""
        given = first_input(batch) if self.inputs is None else called(self.inputs, batch, key=key)
        if isinstance(given, tuple):
            return Arguments.of(given, {})
        return Arguments.of((), given) if isinstance(given, Mapping) else Arguments.of((given,), {})

    def parts(self, params: Params, arguments: Arguments) -> tuple[Part, ...]:
        """The program's parts, recorded where such arguments are new.

        Raises:
            ValueError: with these arguments a stage's module is not called.
        """
        found = self._made.get(self._signature(params, arguments))
        return self.keep(params, arguments, self.program(params, arguments)) if found is None else found

    def keep(self, params: Params, arguments: Arguments, program: Program) -> tuple[Part, ...]:
        """The parts of a program, kept for the next time that such arguments come."""
        if len(self._made) >= _KEPT:
            self._made.clear()
        parts = self._made[self._signature(params, arguments)] = self.cut(program, self.begins)
        return parts

    def cut(self, program: Program, begins: Sequence[Begin]) -> tuple[Part, ...]:
        """The parts of a program that begin with these calls."""
        for path, times in begins:
            if (path, times) not in program.begins:
                raise ValueError(f"{path!r} begins a stage, but is not called {times + 1} times with this batch")
        return cut_program(program, [program.begins[begin] for begin in begins])

    def program(self, params: Params, arguments: Arguments) -> Program:
        """Records the module's forward."""
        with unset_fake_temporarily(), torch.random.fork_rng():
            try:
                return self._record(params, arguments, constants=True)
            except Exception:  # whatever it is, it comes again if it has nothing to do with constants
                return self._record(params, arguments, constants=False)

    def _record(self, params: Params, arguments: Arguments, *, constants: bool) -> Program:
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
        return record(module, args, kwargs, mode=mode, opened=self.opened, constants=constants)

    def trial(self, params: Params, arguments: Arguments) -> AbstractContextManager[None]:
        """Leaves buffers as they were, if what runs inside is only tried out, on tensors without values."""
        some = (*arguments.tensors[:1], *islice(params.values(), 1))
        return self._kept() if any(isinstance(each, FakeTensor) for each in some) else nullcontext()

    @contextmanager
    def _kept(self) -> Iterator[None]:
        with unset_fake_temporarily():
            before = {name: (buffer, buffer.clone()) for name, buffer in self.apply.buffers.items()}
        try:
            yield
        finally:
            with unset_fake_temporarily(), torch.no_grad():
                for buffer, kept in before.values():
                    buffer.copy_(kept)

    def _signature(self, params: Params, arguments: Arguments) -> Any:
        """What a program depends on."""
        shapes = tuple([(each.shape, each.stride(), each.dtype, each.device) for each in arguments.tensors])
        with disable_torch_function_subclass():
            dtypes = tuple([leaf.dtype for leaf in params.values()])
        device = arguments.device(params)
        return arguments.form, shapes, dtypes, device, self.apply.module.training, ambience(device.type)


def _without_values(bare: Mapping[str, nn.Parameter], params: Params, device: torch.device) -> dict[str, Tensor]:
    """All parameters without values. Those that live on other ranks are taken to be cast as most of these are."""
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
