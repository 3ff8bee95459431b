"""Any module as a pure function of its parameters."""

import copy
import functools
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from functional_ds.base.torch_private import (
    FakeTensor,
    buffers_of,
    detect_fake_mode,
    parameters_of,
    refresh_flat_weights,
    unset_fake_temporarily,
)
from functional_ds.remat.region import called
from functional_ds.step.tape import Tape, current_tape

__all__ = ["Apply", "alike", "functional", "with_changed_buffers"]

_HERE = threading.local()  # its ``applies`` are those that have had buffers in this thread

_Buffers = dict[tuple[str, str], Tensor | None]  # by a module's path and the attribute
_Places = dict[str, list[tuple[str, str]]]  # a parameter's name -> (module path, attribute), more than one where tied


def _places(module: nn.Module) -> tuple[_Places, dict[str, nn.Parameter]]:
    """Where each parameter belongs, and the parameters under the name of their first place."""
    first: dict[int, str] = {}
    places: _Places = {}
    params: dict[str, nn.Parameter] = {}
    for path, owner in module.named_modules():
        for key, parameter in parameters_of(owner).items():
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
    owners: dict[str, dict[str, Tensor | None]]  # the buffers of each module in it, by its path
    tried: bool = False  # whether it ran without values, which may have left some of what it computed
    identity: tuple[int, ...] = ()
    calls: tuple[Any, ...] = ()
    _plain: list[tuple[nn.Module, Any]] = attrs.field(factory=list)  # the modules that ``calls`` run, and their own forward
    bound: Mapping[str, Tensor] = attrs.field(factory=dict)

    def bind(self, params: Mapping[str, Tensor]) -> None:
        """Puts the parameters in place, wherever they belong."""
        for name, parameter in params.items():
            for owner, key in self.slots[name]:
                owner[key] = parameter
        for rnn in self.rnns:  # these read their weights from a second list
            refresh_flat_weights(rnn)
        self.bound = params
        self.identity = _identity(params)

    def put(self, buffers: "_Buffers") -> None:
        """Lets the modules have these buffers."""
        for (path, key), buffer in buffers.items():
            owner = self.owners.get(path)
            if owner is not None and owner.get(key, self) is not buffer:
                owner[key] = buffer

    def note(self, buffers: "_Buffers") -> None:
        """Takes over what calls have set anew; takes back what they have where there are shapes alone."""
        for path, owner in self.owners.items():
            for key, buffer in [*owner.items()]:
                before = buffers.get((path, key), self)
                if before is buffer:
                    continue
                if not isinstance(buffer, FakeTensor):
                    buffers[path, key] = owner[key] = _usable(buffer)
                elif before is self:
                    del owner[key]
                else:
                    owner[key] = buffers[path, key]

    def divert(self, calls: tuple[Any, ...]) -> None:
        """Lets each of ``calls`` run the modules that it chooses, the last outermost. They are this copy's, not the user's."""
        if calls == self.calls:
            return
        for module, own in reversed(self._plain):
            _set_forward(module, own)
        self._plain, self.calls = [], calls
        for call in calls:
            for path in call.chosen(self.module):
                module = self.module.get_submodule(path)
                self._plain.append((module, module.__dict__.get("forward")))
                _set_forward(module, functools.partial(call.run, path, module.forward))


def _set_forward(module: nn.Module, forward: Any) -> None:
    """None stands for the class's."""
    if forward is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = forward


def _identity(params: Mapping[str, Tensor]) -> tuple[int, ...]:
    return tuple(map(id, params.values()))


@attrs.define(eq=False)
class _Own:
    """What a thread has of a module.

    Attributes:
        pool: skeletons that nobody uses.
        leased: those that a tape uses, by its id.
        buffers: what all of them share, also when a call sets one anew.
    """

    pool: list[_Skeleton] = attrs.field(factory=list)
    leased: dict[int, list[_Skeleton]] = attrs.field(factory=dict)
    buffers: _Buffers = attrs.field(factory=dict)


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
        own = self._own()
        skeleton = self._free(own)
        own.pool.append(skeleton)
        return dict(skeleton.module.named_buffers())

    @property
    def changed_buffers(self) -> dict[str, Tensor]:
        """Those of them that are not as they were in the module: running statistics, not masks and tables.

        Values are compared, as torch's own batch norm writes into tensors without a trace.
        """
        first = dict(self.module.named_buffers())
        return {name: b for name, b in self.buffers.items() if name not in first or not alike(b, first[name])}

    def put_buffers(self, values: Mapping[str, Tensor]) -> None:
        """Gives this thread's buffers values; others stay as they are. One that calls make as they go may be new here.

        Raises:
            ValueError: there is no module that a name says.

        >>> apply, params = functional(nn.BatchNorm1d(1))
        >>> apply.put_buffers({"running_mean": torch.tensor([3.0])})
        >>> apply.changed_buffers
        {'running_mean': tensor([3.])}
        """
        own, there = self._own(), {path for path, _ in self.module.named_modules()}
        for name in values:
            if name.rpartition(".")[0] not in there:
                raise ValueError(f"values: {name!r} is a buffer of no module here; the modules are {sorted(there)}")
        own.pool.append(self._free(own))  # so that all that there are are known
        for name, value in values.items():
            path, _, key = name.rpartition(".")
            now = own.buffers.get((path, key))
            if now is not None and (now.shape, now.dtype) == (value.shape, value.dtype):
                with torch.no_grad():
                    now.copy_(value)
            else:
                like = next((b for b in (now, *own.buffers.values()) if b is not None), value)
                own.buffers[path, key] = value.detach().to(like.device, copy=True)

    def __call__(self, params: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        if params.keys() != self._bare.keys():
            missing, extra = sorted(self._bare.keys() - params.keys()), sorted(params.keys() - self._bare.keys())
            raise ValueError(f"params do not fit the module: missing {missing}, extra {extra}")
        return self.within(params, lambda module: module(*args, **kwargs))

    def within(self, params: Mapping[str, Tensor], function: Callable[[nn.Module], Any]) -> Any:
        """``function(module)``, where the module has these parameters in place; others of it may be missing.

        >>> apply, params = functional(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
        >>> first = {name: p for name, p in params.items() if name.startswith("0.")}
        >>> apply.within(first, lambda module: module[0](torch.ones(4, 2))).shape
        torch.Size([4, 3])
        """
        own = self._own()
        skeleton, temporary = self._lease(own, params)
        if skeleton.module.training != self.module.training:
            skeleton.module.train(self.module.training)
        skeleton.put(own.buffers)  # another one of this thread's may have run
        skeleton.tried |= detect_fake_mode() is not None
        try:
            return called(skeleton.module, function)(skeleton.module)
        finally:
            skeleton.note(own.buffers)
            if temporary:
                self._release(own, skeleton)

    def dressed(self, params: Mapping[str, Tensor], dress: Callable[[Tensor], Tensor]) -> nn.Module:
        """A new copy of the module, with all parameters given and ``dress(buffer)`` for each of its buffers."""
        memo: dict[int, Any] = {id(bare): params[name] for name, bare in self._bare.items()}
        memo.update((id(buffer), dress(buffer)) for _, buffer in self.module.named_buffers())
        return copy.deepcopy(self.module, memo)

    @property
    def bare(self) -> Mapping[str, nn.Parameter]:
        """The parameters without values, by name, on the device "meta"."""
        return self._bare

    def _own(self) -> "_Own":
        """What this thread has; in a backward pass with a thread of its own, what the thread has that opened the tape."""
        home: _Own = self._here.__dict__.setdefault("own", _Own())
        tape = current_tape()
        return home if tape is None else tape.homes.setdefault(self, home)

    def _lease(self, own: "_Own", params: Mapping[str, Tensor]) -> tuple[_Skeleton, bool]:
        """A skeleton with these parameters in place, and whether it is to be given back after the call."""
        tape = current_tape()
        if tape is not None:
            return self._of_tape(tape, own, params), False
        # Outside a step nobody says when the backward is over: such a skeleton lives as long as the graph needs it.
        wants_grad = torch.is_grad_enabled() and any(p.requires_grad for p in params.values())
        skeleton = self._new(own) if wants_grad else self._free(own)
        skeleton.bind(params)
        skeleton.divert(())
        return skeleton, not wants_grad

    def _of_tape(self, tape: Tape, own: "_Own", params: Mapping[str, Tensor]) -> _Skeleton:
        if id(tape) not in own.leased:
            own.leased[id(tape)] = []
            tape.at_end(lambda: self._release(own, *own.leased.pop(id(tape))))
        for skeleton in own.leased[id(tape)]:
            if skeleton.identity == _identity(params) and skeleton.calls == tape.calls:
                return skeleton
        skeleton = self._free(own)
        skeleton.bind(params)
        skeleton.divert(tape.calls)
        own.leased[id(tape)].append(skeleton)
        return skeleton

    def _free(self, own: "_Own") -> _Skeleton:
        skeleton = own.pool.pop() if own.pool else self._new(own)
        skeleton.put(own.buffers)
        return skeleton

    def _release(self, own: "_Own", *skeletons: _Skeleton) -> None:
        for skeleton in skeletons:
            skeleton.bind({name: self._bare[name] for name in skeleton.bound})
        # The next tape's first gets what this one's first had: modules may keep more than their buffers.
        own.pool.extend(skeleton for skeleton in reversed(skeletons) if not skeleton.tried)

    def _new(self, own: "_Own") -> _Skeleton:
        """One more copy, which shares the buffers that there are."""
        given = {f"{path}.{key}" if path else key: buffer for (path, key), buffer in own.buffers.items()}
        memo: dict[int, Any] = {id(b): given[name] for name, b in self.module.named_buffers() if name in given}
        with unset_fake_temporarily(), torch.inference_mode(False):  # buffers are plain tensors, whoever calls first
            module = copy.deepcopy(self.module, memo)
        slots = {
            name: [(module.get_submodule(path).__dict__["_parameters"], key) for path, key in places]
            for name, places in self._places.items()
        }
        owners = {path: buffers_of(each) for path, each in module.named_modules()}
        skeleton = _Skeleton(module, slots, [m for m in module.modules() if isinstance(m, nn.RNNBase)], owners)
        skeleton.put(own.buffers)
        skeleton.note(own.buffers)
        if own.buffers:
            _HERE.__dict__.setdefault("applies", weakref.WeakSet()).add(self)
        return skeleton


def _usable(buffer: Tensor | None) -> Tensor | None:
    """A tensor that training may use, whatever mode it was made in."""
    if buffer is None or not buffer.is_inference():
        return buffer
    with torch.inference_mode(False):
        return buffer.clone()


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bits."""
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    if one.layout != torch.strided or other.layout != torch.strided:
        return one.layout == other.layout and alike(one.to_dense(), other.to_dense())
    return one.is_meta or torch.equal(*(x.contiguous().reshape(-1).view(torch.uint8) for x in (one, other)))


def with_changed_buffers() -> list[Apply]:
    """The modules whose buffers this thread's calls have changed."""
    return [apply for apply in _HERE.__dict__.get("applies", ()) if apply.changed_buffers]


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
