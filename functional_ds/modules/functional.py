"""Modules as pure functions of their parameters and buffers."""

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from functional_ds.base import tree
from functional_ds.base.marks import ModuleRef, mark_module
from functional_ds.base.torch_private import buffers_of, non_persistent_buffers_of, outside_functorch, unset_fake_temporarily
from functional_ds.comm.worlds.current import is_trial, recorder
from functional_ds.remat.entered import called, current_region
from functional_ds.step.pass_scope import Pass, current_pass
from functional_ds.step.state.buffer_scope import ModuleValues
from functional_ds.step.state.buffers import parts_of

from .attributes import HiddenAttributes
from .deep_copy import Put, deep_copy, reached
from .module_changes import BareParameter, ModuleChanges
from .module_places import OF_EVERY_MODULE, Place, buffer_names, joined, mutable_attributes, parameter_places
from .parameter_marks import ParameterMarks, attributes_on
from .refusals import (
    check_elsewhere,
    check_module,
    refuse_compiled,
    refuse_flags,
    refuse_loading,
    refuse_lost_writes,
    refuse_placeholders,
    refuse_reruns,
)
from .shared_memory import SharedMemory
from .skeleton import Skeleton
from .write_watch import refuse_aliases, refuse_new_versions, versions, watched


class Apply:
    """A module as a function: ``apply(params, *args, **kwargs)`` is ``module(*args, **kwargs)`` with these parameters.

    ``params`` may include the module's buffers by name; otherwise they come from the state within a step, and from the module
    as it was built outside of one. A call changes neither: buffers that it writes go into the state that the step returns
    (``step.module_buffers(state)``), or are returned by ``with_buffers``.

    The parameters must stay in place until the backward pass is over, because a recomputation reads them again. So within a
    pass (a step's forward and backward) every parameter tree is put into its own copy of the module without memory; one module
    may be applied to two trees, also with recomputation.

    Attributes:
        module: the module without parameters. Changes of it or its submodules apply from the next call on: modes (``train()``,
            ``eval()``), attributes and their contents, hooks, modules without parameters. Changes of parameters, and of what a
            state stores (buffers, and attributes that forward passes have set), raise an error.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places, params = parameter_places(module)
        check_module(module, params)
        self._bare = {name: BareParameter(torch.empty_like(p, device="meta"), p.requires_grad) for name, p in params.items()}
        memo: dict[int, Any] = {id(p): self._bare[name] for name, p in params.items()}
        memory = SharedMemory.of(module, params, buffer_names(module))
        memo.update(memory.stale)
        self.module = deep_copy(module, memo)
        self._pool: list[Skeleton] = []
        self._marks = ParameterMarks(params)
        self._written: dict[tuple[int, ...], frozenset[str]] = {}  # by modes: the buffers that calls write
        self._changes = ModuleChanges(self.module)
        self._hidden = HiddenAttributes(self.module, self._changes.overlook)
        self._find_buffers(memory)

    def _find_buffers(self, memory: SharedMemory) -> None:
        """The module's present buffers."""
        self._names = buffer_names(self.module)
        owners = dict(self.module.named_modules()) if self._names else {}
        self._homes = [(name, owners[path], key) for (path, key), name in self._names.items() if name == joined(path, key)]
        self._by_name: dict[str, list[Place]] = {}
        for place, name in self._names.items():
            self._by_name.setdefault(name, []).append(place)
        self._shared, self._aliases = memory.buffers, memory.attributes
        names = {id(buffer): name for name, buffer in self.module.named_buffers()}
        self._elsewhere = {names[key] for key, _ in reached(self.module, names)}  # buffers that are also attributes

    @property
    def bare(self) -> Mapping[str, nn.Parameter]:
        """The parameters as meta tensors, by name."""
        return self._bare

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers in the module's ``state_dict``, by name, as it was built."""
        passing = {joined(path, key) for path, owner in self.module.named_modules() for key in non_persistent_buffers_of(owner)}
        return {name: buffer for name, buffer in self.module.named_buffers() if name not in passing}

    @property
    def modes(self) -> tuple[int, ...]:
        """What its calls depend on besides tensors, as far as noticed: which modules train, and the number of edits."""
        return self._changes.modes

    @property
    def version(self) -> int:
        """The number of noticed changes of ``module``."""
        return len(self._changes)

    def notice(self) -> tuple[int, ...]:
        """Checks for changes of ``module`` since the last call; returns the modes.

        Raises:
            RuntimeError: a parameter was replaced, added, removed, frozen or written.
        """
        if self._changes.notice():
            self._pool.clear()
            self._find_buffers(SharedMemory.of(self.module, self._bare, buffer_names(self.module)))
        return self.modes

    def changed(self, version: int) -> set[str]:
        """The names of the attributes and buffers that were changed since that version."""
        return self._changes.since(version)

    def container(self, name: str) -> tuple[str, Any] | None:
        """The name and value of the list, tuple or dict that contains the attribute of this name; None if there is none."""
        parts = name.split(".")
        for cut in range(len(parts) - 1):
            owner = dict(self.module.named_modules()).get(".".join(parts[:cut]))
            value = None if owner is None else vars(owner).get(parts[cut])
            if parts[cut] not in OF_EVERY_MODULE and isinstance(value, (list, tuple, dict, deque)):
                return ".".join(parts[: cut + 1]), value
        return None

    def __call__(self, params: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        missing = self._bare.keys() - params.keys()
        if missing or len(params) > len(self._bare):
            extra = params.keys() - self._bare.keys() - self._by_name.keys()
            if missing or extra:
                raise ValueError(f"params do not fit the module: missing {sorted(missing)}, extra {sorted(extra)}")
        return self.within(params, lambda module: module(*args, **kwargs))

    def with_buffers(self, variables: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Tensor]]:
        """The module's result, and its buffers after the call.

        Args:
            variables: parameters, and buffers, by name; other buffers are as the module was built.
            args: the module's.
            kwargs: the module's.

        >>> apply, params = functional(nn.BatchNorm1d(1, momentum=1.0))
        >>> _, buffers = apply.with_buffers(params, torch.tensor([[1.0], [3.0]]))
        >>> buffers["running_mean"], apply.buffers["running_mean"]
        (tensor([2.]), tensor([0.]))
        """
        self.notice()
        held = self._fresh({name: x for name, x in variables.items() if name not in self._bare})
        params = {name: variables[name] for name in self._bare if name in variables}
        output = self._run(held, params, lambda module: module(*args, **kwargs), None, trial=is_trial())
        return output, {name: buffer for name, buffer in held.values.items() if buffer is not None}

    def within(self, params: Mapping[str, Tensor], function: Callable[[nn.Module], Any]) -> Any:
        """``function(module)``, where the module has these parameters in place; others may be missing.

        >>> apply, params = functional(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
        >>> first = {name: p for name, p in params.items() if name.startswith("0.")}
        >>> apply.within(first, lambda module: module[0](torch.ones(4, 2))).shape
        torch.Size([4, 3])
        """
        given: dict[str, Tensor] = {}
        if not params.keys() <= self._bare.keys():
            given = {name: x for name, x in params.items() if name not in self._bare}
            params = {name: x for name, x in params.items() if name in self._bare}
        self.notice()
        pass_, trial = current_pass(), is_trial()
        if given or pass_ is None or trial:
            return self._run(self._fresh(given), params, function, pass_, trial=trial)
        held, known = self._held(pass_)
        output = self._run(held, params, function, pass_, trial=False)
        if not known and pass_.buffers is not None and pass_.buffers.keeps:
            buffers = pass_.buffers.buffers
            refuse_lost_writes(type(self.module).__name__, held.written(), buffers is not None and buffers.known.pickled)
        return output

    def dressed(self, params: Mapping[str, Tensor], dress: Callable[[Tensor], Tensor]) -> nn.Module:
        """A new copy of the module, with all parameters given and ``dress(buffer)`` for each of its buffers."""
        memo: dict[int, Any] = {id(bare): params[name] for name, bare in self._bare.items()}
        memo.update((id(buffer), dress(buffer)) for _, buffer in self.module.named_buffers())
        self._hidden.undo(memo)
        return deep_copy(self.module, memo)

    def __repr__(self) -> str:
        return f"Apply({type(self.module).__name__}, {len(self._bare)} parameters, {len(self.buffers)} buffers)"

    # -- buffers -------------------------------------------------------------------------------------------------------

    def _fresh(self, given: Mapping[str, Tensor]) -> ModuleValues:
        """Copies of the module's own buffers, and of those given."""
        with unset_fake_temporarily():
            return ModuleValues.of({**dict(self.module.named_buffers()), **given}, {}, self._written.get(self.modes))

    def _held(self, pass_: Pass) -> tuple[ModuleValues, bool]:
        """The module's buffers in this pass, from the state if it has the module, and whether it does."""
        held = None if pass_.buffers is None else pass_.buffers.of(self)
        if held is None:
            unknown = pass_.slots.setdefault("unknown modules", {})
            if self not in unknown:
                unknown[self] = self._fresh({})
            return unknown[self], False
        if not held.complete:
            for name, owner, key in self._homes:  # what ``state_dict`` leaves out
                if (buffer := buffers_of(owner)[key]) is not None:
                    held.add(name, recorder().buffer(self, name, buffer))
            held.complete = True
        return held, True

    def _learn(self, held: ModuleValues) -> None:
        """Records buffers that calls do not write: large ones then need no copies."""
        if held.looks or self._shared:
            for name in held.written() & self._shared.keys():
                raise RuntimeError(
                    f"the module {type(self.module).__name__} wrote the buffer {name!r}, which shares memory with its "
                    f"{self._shared[name]!r}: what is written to one would not be in the other; let each have memory of its own"
                )
        if held.looks:
            self._written[self.modes] = self._written.get(self.modes, frozenset()) | held.written()

    # -- copies of the module ------------------------------------------------------------------------------------------

    def _run(
        self,
        held: ModuleValues,
        params: Mapping[str, Tensor],
        function: Callable[[nn.Module], Any],
        pass_: Pass | None,
        *,
        trial: bool,
    ) -> Any:
        recorder().ran(self)
        skeleton, temporary = self._lease(params, held, pass_, trial)
        skeleton.put(held)
        class_name = type(self.module).__name__
        plain = pass_ is not None and not pass_.placeholders
        try:
            before = versions(params) if plain else []
            marked: AbstractContextManager[None] = self._marks.on(params) if pass_ is None else nullcontext()
            with watched(class_name, params, pass_) if held.looks and pass_ is not None and not trial else marked:
                output = called(skeleton.module, function)(skeleton.module)
            if plain:
                refuse_new_versions(class_name, params, before)
            if held.looks:
                self._hidden.hide(skeleton.passing())
            return output
        except RuntimeError as error:
            refuse_flags(class_name, error)
            refuse_loading(class_name, error)
            if pass_ is not None and pass_.placeholders:
                refuse_placeholders(class_name, error)
            raise
        finally:
            if not trial:
                assigned = skeleton.note(held)
                if self._elsewhere or skeleton.references:
                    reruns = bool(skeleton.calls) or current_region() is not None
                    check_elsewhere(class_name, self._elsewhere, assigned, held.written() if reruns else ())
                    refuse_reruns(class_name, "attribute", skeleton.written_references() if reruns else ())
                self._learn(held)
            if temporary:
                self._release(skeleton, held)

    def _lease(
        self, params: Mapping[str, Tensor], held: ModuleValues, pass_: Pass | None, trial: bool
    ) -> tuple[Skeleton, bool]:
        """A skeleton with these parameters in place, and whether to return it after the call."""
        if pass_ is not None:
            return self._of_pass(pass_, params, held, trial), False
        # Outside a step the end of the backward is unknown: such a skeleton lives as long as the graph needs it.
        wants_grad = torch.is_grad_enabled() and any(p.requires_grad for p in params.values())
        skeleton = self._ready(self._new() if wants_grad else self._free(), params, (), held)
        skeleton.tried |= trial
        return skeleton, not wants_grad

    def _of_pass(self, pass_: Pass, params: Mapping[str, Tensor], held: ModuleValues, trial: bool) -> Skeleton:
        if self not in pass_.modules:
            pass_.modules[self] = []
            pass_.at_end(lambda: self._release_all(pass_))
            pass_.at_forward_end(lambda: self._check_forward(pass_))
        identity = tuple(map(id, params.values()))
        skeleton: Skeleton
        for skeleton, _ in pass_.modules[self]:
            if skeleton.identity == identity and skeleton.calls == pass_.calls and skeleton.version == len(self._changes):
                break
        else:
            skeleton = self._ready(self._free(), params, pass_.calls, held)
            skeleton.marked = self._marks.put(params)
            skeleton.flags = [] if pass_.placeholders else [p.requires_grad for p in params.values()]
            pass_.modules[self].append((skeleton, held))
        skeleton.tried |= trial
        return skeleton

    def _ready(self, skeleton: Skeleton, params: Mapping[str, Tensor], calls: tuple[Any, ...], held: ModuleValues) -> Skeleton:
        skeleton.bind(params)
        skeleton.divert(calls)
        with unset_fake_temporarily():
            skeleton.lease(held)
        return skeleton

    def _check_forward(self, pass_: Pass) -> None:
        """Raises an error for changes of the parameters themselves in a forward pass."""
        class_name = type(self.module).__name__
        for skeleton, held in pass_.modules.get(self, ()):
            if not skeleton.tried:
                skeleton.check(class_name, self._aliases, held)
                refuse_aliases(class_name, skeleton.assigned(held), skeleton.bound, pass_)

    def _release_all(self, pass_: Pass) -> None:
        for skeleton, held in reversed(pass_.modules.pop(self)):
            self._release(skeleton, held)

    def _release(self, skeleton: Skeleton, held: ModuleValues) -> None:
        self._marks.take(skeleton.marked)
        skeleton.settle(None if skeleton.tried else held)
        if held.others:
            self._hidden.hide([name for name, other in held.others.items() if other.passing])
        skeleton.bind({name: self._bare[name] for name in skeleton.bound})
        if not skeleton.tried:
            self._pool.append(skeleton)

    def _free(self) -> Skeleton:
        """An unused copy, with ``module``'s present attributes."""
        while self._pool:
            skeleton = self._pool.pop()
            version = self._changes.bring([*skeleton.owners.values()], skeleton.version)
            if version is not None:
                skeleton.version = version
                return skeleton
        return self._new()

    def _new(self) -> Skeleton:
        """A new copy, which shares the module's buffers until it gets others."""
        buffers = dict(self.module.named_buffers())
        leaves = tree.leaves([value for _, value in mutable_attributes(self.module)])
        with unset_fake_temporarily(), torch.inference_mode(False), outside_functorch():
            memo: dict[int, Any] = {id(x): x.detach() for x in leaves if isinstance(x, Tensor)}  # leases copy them
            memo.update((id(x), x.detach() if name in self._elsewhere else x) for name, x in buffers.items())
            self._hidden.undo(memo)
            module = deep_copy(self.module, memo)
        owners = dict(module.named_modules())
        slots: dict[str, list[Put]] = {
            name: [partial(owners[path].__dict__["_parameters"].__setitem__, key) for path, key in places]
            for name, places in self._places.items()
        }
        names = {id(memo[id(x)]): name for name, x in (*self._bare.items(), *buffers.items()) if id(x) in memo}
        elsewhere: dict[str, list[Put]] = {name: [] for name in self._elsewhere}
        for tensor_id, put in reached(module, names):
            (slots if names[tensor_id] in slots else elsewhere)[names[tensor_id]].append(put)
        rnns = [owner for owner in owners.values() if isinstance(owner, nn.RNNBase)]
        mutable = {joined(*place): value for place, value in mutable_attributes(module)}
        tensors = [name for name, value in mutable.items() if not any(id(x) in names for x in tree.leaves(value))]
        parts = {id(part): (path, part) for name in tensors for path, part in parts_of((name,), mutable[name])}
        return Skeleton(
            module,
            owners,
            owned=self._places,
            names=self._names,
            places=self._by_name,
            slots=slots,
            elsewhere=elsewhere,
            rnns=rnns,
            version=len(self._changes),
            changes=self._changes,
            tensors=tensors,
            placeholders={name: memo[id(x)] for name, x in self._bare.items() if id(x) in memo},
            references=[(*parts[part_id], put) for part_id, put in reached(module, parts, mutable)] if parts else [],
        )


def functional(module: nn.Module) -> tuple[Apply, dict[str, Tensor]]:
    """Turns a module into a pure function and its parameters, by name; a tied parameter appears once, under its first name.

    The parameters share the module's memory (``step.init`` copies them); those that do not require grad stay frozen in a step.
    The module is not changed, and ``apply`` does not need it any more. ``step.init(params)`` copies its buffers into the state.

    Raises:
        TypeError: the module is compiled by ``torch.compile``.
        ValueError: the module has features that its copies cannot keep, such as parameters in one memory that are not tied.

    >>> apply, params = functional(nn.Linear(2, 1))
    >>> sorted(params), apply(params, torch.ones(3, 2)).shape
    (['bias', 'weight'], torch.Size([3, 1]))
    """
    refuse_compiled(module)
    return as_function(module)


def as_function(module: nn.Module) -> tuple[Apply, dict[str, Tensor]]:
    """``functional(module)`` of any module, also a compiled one, as a DeepSpeed engine takes."""
    apply = Apply(module)
    ref = ModuleRef(apply)
    originals = parameter_places(module)[1]
    params = {name: nn.Parameter(p.detach(), requires_grad=p.requires_grad) for name, p in originals.items()}
    for name, parameter in params.items():
        vars(parameter).update(attributes_on(originals[name]))
    return apply, {name: mark_module(parameter, ref, name) for name, parameter in params.items()}
