"""Any module as a pure function of its parameters."""

import copy
import threading
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from .tape import Tape, current_tape

__all__ = ["Apply", "functional"]

_Places = dict[str, list[tuple[str, str]]]  # a parameter's name -> (module path, attribute), more than one where tied


def _places(module: nn.Module) -> tuple[_Places, dict[str, nn.Parameter]]:
    """Where each parameter belongs, and the parameters under the name of their first place."""
    first: dict[int, str] = {}
    places: _Places = {}
    params: dict[str, nn.Parameter] = {}
    for path, owner in module.named_modules():
        for key, parameter in owner._parameters.items():
            if parameter is not None:
                name = first.setdefault(id(parameter), f"{path}.{key}" if path else key)
                places.setdefault(name, []).append((path, key))
                params.setdefault(name, parameter)
    return places, params


@attrs.define(eq=False)
class _Skeleton:
    """A copy of the module that has no parameters of its own."""

    module: nn.Module
    slots: dict[str, list[tuple[dict[str, Any], str]]]
    rnns: list[nn.RNNBase]
    identity: tuple[int, ...] = ()

    def bind(self, params: Mapping[str, Tensor]) -> None:
        """Puts the parameters in place, wherever they belong."""
        for name, slots in self.slots.items():
            for owner, key in slots:
                owner[key] = params[name]
        for rnn in self.rnns:  # these read their weights from a second list
            rnn._flat_weights = [getattr(rnn, name) for name in rnn._flat_weights_names]
        self.identity = _identity(params)


def _identity(params: Mapping[str, Tensor]) -> tuple[int, ...]:
    return tuple(map(id, params.values()))


class Apply:
    """``apply(params, *args, **kwargs)`` is ``module(*args, **kwargs)`` with these parameters.

    The parameters must stay in place until the backward pass is over, because a recomputation reads them again. So within
    a tape (a step's forward and backward) every parameter tree is put into a skeleton of its own, a copy of the module
    without memory for parameters; one module applied to two trees with recomputation is no special case. Skeletons belong
    to a thread, and so do their buffers, which are no parameters: a buffer that the module writes is this rank's.

    Attributes:
        module: the module without parameters; its ``train()`` and ``eval()`` hold for the calls that follow.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places, params = _places(module)
        self._bare = {name: nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for name, p in params.items()}
        memo: dict[int, Any] = {id(p): self._bare[name] for name, p in params.items()}
        self.module = copy.deepcopy(module, memo)
        self._here = threading.local()

    @property
    def buffers(self) -> dict[str, Tensor]:
        """This thread's buffers, as its calls have left them, by name; no part of a step's state."""
        skeleton = self._free()
        self._release(skeleton)
        return dict(skeleton.module.named_buffers())

    def __call__(self, params: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        if params.keys() != self._bare.keys():
            missing, extra = sorted(self._bare.keys() - params.keys()), sorted(params.keys() - self._bare.keys())
            raise ValueError(f"params do not fit the module: missing {missing}, extra {extra}")
        skeleton, temporary = self._lease(params)
        if skeleton.module.training != self.module.training:
            skeleton.module.train(self.module.training)
        try:
            return skeleton.module(*args, **kwargs)
        finally:
            if temporary:
                self._release(skeleton)

    def _lease(self, params: dict[str, Tensor]) -> tuple[_Skeleton, bool]:
        """A skeleton with these parameters in place, and whether it is to be given back after the call."""
        tape = current_tape()
        if tape is not None:
            return self._of_tape(tape, params), False
        # Outside a step nobody says when the backward is over: such a skeleton lives as long as the graph needs it.
        wants_grad = torch.is_grad_enabled() and any(p.requires_grad for p in params.values())
        skeleton = self._new() if wants_grad else self._free()
        skeleton.bind(params)
        return skeleton, not wants_grad

    def _of_tape(self, tape: Tape, params: dict[str, Tensor]) -> _Skeleton:
        leased: dict[int, list[_Skeleton]] = self._here.__dict__.setdefault("leased", {})
        if id(tape) not in leased:
            leased[id(tape)] = []
            tape.at_end(lambda: self._release(*leased.pop(id(tape))))
        for skeleton in leased[id(tape)]:
            if skeleton.identity == _identity(params):
                return skeleton
        skeleton = self._free()
        skeleton.bind(params)
        leased[id(tape)].append(skeleton)
        return skeleton

    def _free(self) -> _Skeleton:
        pool: list[_Skeleton] = self._here.__dict__.setdefault("pool", [])
        return pool.pop() if pool else self._new()

    def _release(self, *skeletons: _Skeleton) -> None:
        for skeleton in skeletons:
            skeleton.bind(self._bare)
        self._here.__dict__.setdefault("pool", []).extend(skeletons)

    def _new(self) -> _Skeleton:
        buffers: dict[str, Tensor] = self._here.__dict__.setdefault("buffers", {})
        memo: dict[int, Any] = {id(b): buffers[name] for name, b in self.module.named_buffers() if name in buffers}
        module = copy.deepcopy(self.module, memo)
        buffers.update(module.named_buffers())
        slots = {
            name: [(module.get_submodule(path).__dict__["_parameters"], key) for path, key in places]
            for name, places in self._places.items()
        }
        return _Skeleton(module, slots, [m for m in module.modules() if isinstance(m, nn.RNNBase)])


def functional(module: nn.Module) -> tuple[Apply, dict[str, Tensor]]:
    """A module as a pure function and its parameters, by name; a tied parameter appears once, under its first name.

    The parameters share the module's memory (``step.init`` copies them); those that do not require grad stay frozen in a
    step. Nothing of the module changes, and ``apply`` does not need it any more.

    >>> apply, params = functional(nn.Linear(2, 1))
    >>> sorted(params), apply(params, torch.ones(3, 2)).shape
    (['bias', 'weight'], torch.Size([3, 1]))
    """
    params = _places(module)[1]
    return Apply(module), {name: nn.Parameter(p.detach(), requires_grad=p.requires_grad) for name, p in params.items()}
