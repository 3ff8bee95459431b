"""``zero.Init``: a context in which a model is built without memory, until ``initialize`` shards it."""

import hashlib
import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.torch_private import FakeTensor, parameters_of
from functional_ds.modules.deferred_init import Deferral
from functional_ds.modules.functional import Apply
from functional_ds.modules.init_recorder import Place

_IDS = itertools.count()
_OPEN: ContextVar["Init | None"] = ContextVar("zero_init", default=None)  # this thread's block


class ZeroParamStatus(Enum):
    """Whether a stage-3 parameter has values now."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def mark_sharded(parameter: nn.Parameter, number: int, shape: torch.Size) -> None:
    """Marks a parameter as DeepSpeed marks those of stage 3."""
    held: Any = parameter
    held.ds_id, held.ds_shape, held.ds_numel, held.ds_status = number, shape, shape.numel(), ZeroParamStatus.NOT_AVAILABLE


class Init:
    """A context in which new parameters have no memory: each rank draws its shards in ``initialize``, a leaf at a time.

    Law: the values are those of the model built normally on rank 0. Changes before ``initialize`` (``load_state_dict``,
    ``half()``, ``nn.init``) are included, and must be the same on all ranks; for values that only one rank has use
    ``GatheredParameters(..., modifier_rank=0)``. Collective. A nested block does nothing.

    Args:
        module: has no effect: an existing module stays whole until ``initialize``.
        enabled: False does nothing.
        others: have no effect; the config is ``initialize``'s.

    Raises:
        RuntimeError: within the block: something is made on another device than the CPU, or by ``.numpy()``.
    """

    def __init__(self, module: nn.Module | None = None, *others: Any, enabled: bool = True, **named: Any) -> None:
        del others, named
        self._enabled = enabled and module is None
        self._stack = ExitStack()
        self._own: Tensor | None = None
        self._deferral = Deferral()

    def __enter__(self) -> "Init":
        if self._enabled and _OPEN.get() is None:
            if not comm.is_initialized():
                comm.init_distributed()
            if comm.world().size > 1:
                generator_state = torch.default_generator.get_state()
                first: Tensor = comm.broadcast(generator_state, 0)
                if not torch.equal(generator_state, first):
                    self._own = generator_state
                    torch.default_generator.set_state(first)
            self.open()
        return self

    def open(self) -> None:
        """New parameters have no memory from now on."""
        self._stack.enter_context(self._deferral.block())
        self._stack.callback(register_module_parameter_registration_hook(self._mark).remove)
        self._stack.callback(_OPEN.reset, _OPEN.set(self))

    def _mark(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        del module, name
        if self._deferral.has(parameter):
            mark_sharded(parameter, next(_IDS), parameter.shape)

    def close(self) -> None:
        """New parameters have memory again."""
        self._stack.close()

    def __exit__(self, *error: Any) -> None:
        self.close()
        if self._own is not None:
            torch.default_generator.set_state(self._own)
            self._own = None


@contextmanager
def suspended() -> Iterator[None]:
    """A context in which this thread's ``Init`` block is closed."""
    block = _OPEN.get()
    if block is None:
        yield
        return
    block.close()
    try:
        yield
    finally:
        block.open()


def deferral_of(module: nn.Module) -> Deferral | None:
    """The block in which a module's parameters were made; None for a module with values.

    Raises:
        ValueError: they are from several blocks.
    """
    modes = {id(p.fake_mode): p.fake_mode for p in module.parameters() if isinstance(p, FakeTensor)}
    if len(modes) > 1:
        raise ValueError("zero.Init: the model's parameters are from several blocks; build it in one")
    return next((getattr(mode, "deferral", None) for mode in modes.values()), None)


def broadcast_deferred(parameter: Tensor, rank: int) -> None:
    """Gives a parameter without memory one rank's values on all ranks, which keep them until ``initialize``. Collective."""
    mode: Any = parameter.fake_mode  # type: ignore[attr-defined]
    with suspended(), torch.no_grad():
        held = mode.deferral.compute(parameter)
        parameter.copy_(comm.broadcast(held, rank))


def taken(deferral: Deferral, module: nn.Module, device: torch.device) -> tuple[Apply, dict[str, Tensor]]:
    """``functional(module)`` with leaves that get values as they are stored; the module keeps its parameter objects.

    These are tensors of one element with their shapes until the engine shows values in them. Collective.

    Raises:
        ValueError: the ranks have built different values.
    """
    _check_agreement(deferral, module)
    places = [(owner, key, p) for owner in module.modules() for key, p in parameters_of(owner).items() if deferral.has(p)]
    apply, params = deferral.functional(module, device)
    fakes: dict[int, nn.Parameter] = {}
    for owner, key, fake in places:
        if id(fake) not in fakes:
            fakes[id(fake)] = fake
            held = torch.empty((), dtype=fake.dtype, device=device).expand(fake.shape)
            real = nn.Parameter(held, fake.requires_grad)
            real.__dict__.update({name: value for name, value in vars(fake).items() if name not in _own_names(fake)})
            torch.utils.swap_tensors(fake, real)
        parameters_of(owner)[key] = fake
    return apply, params


def _own_names(fake: nn.Parameter) -> set[str]:
    """Attributes that torch itself sets on a fake tensor."""
    held: Any = fake
    with held.fake_mode:
        return {*vars(torch.empty(0)), *FakeTensor.__annotations__, "_is_param"}


def _check_agreement(deferral: Deferral, module: nn.Module) -> None:
    if comm.world().size == 1:
        return
    mine = {name: _digest(deferral, x) for name, x in module.named_parameters() if deferral.has(x)}
    everyones = comm.all_gather_object(mine)
    wrong = [name for name in mine if any(theirs.get(name) != everyones[0].get(name) for theirs in everyones)]
    if wrong or any(theirs.keys() != mine.keys() for theirs in everyones):
        raise ValueError(
            f"zero.Init: the ranks have built different values for {', '.join(wrong[:3]) or 'the model'}; do the same on all, "
            "and where one rank alone has the values, do it within deepspeed.zero.GatheredParameters(..., modifier_rank=0)"
        )


def _digest(deferral: Deferral, parameter: Tensor) -> str:
    """Of the operations that make a parameter's values."""
    digest = hashlib.blake2b(digest_size=16)
    for function, arguments, state in deferral.recording.operations(deferral.recording.place(parameter)):
        digest.update(str(function).encode())
        for value in (state, *tree.leaves(arguments)):
            if isinstance(value, Tensor):
                digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            else:  # the number of a storage may differ
                digest.update(repr(attrs.astuple(value)[1:] if isinstance(value, Place) else value).encode())
    return digest.hexdigest()
