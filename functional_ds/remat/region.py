"""A call of a function under a policy: what autograd saves in it is kept as the policy says."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.torch_private import detect_fake_mode
from functional_ds.step.tape import Tape, current_tape

from .buffer_snapshot import Rewind
from .op_cache import Recorder, Replayer
from .policy import Keep, Saving
from .report import RematReport, open_report
from .saved_tensors import Away, Here, Hooks, Keeper

__all__ = ["Region", "called", "current_region", "run"]

_HERE = threading.local()  # the regions that this thread is in


def current_region() -> "Region | None":
    """The innermost region that this thread runs."""
    regions = getattr(_HERE, "regions", None)
    return regions[-1] if regions else None


def called(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A module's call: what it writes into its buffers and plain attributes is written once, however often it runs again."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for region in getattr(_HERE, "regions", ()):
                stack.enter_context(region.rewinding(module))
            return forward(*args, **kwargs)

    return call


def run(
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    *,
    saving: Saving,
    group: comm.Group | None,
    part: str,
    seen: Callable[[set[str]], None],
) -> Any:
    """``function(*args, **kwargs)``; its backward pass finds what it needs as the policy says. ``seen`` gets its names."""
    parent, report = current_region(), open_report()
    plain = saving.rest is Keep.SAVE and saving.inputs is None and not saving.by_operation
    if not torch.is_grad_enabled() or (plain and (report is None or parent is not None)) or detect_fake_mode() is not None:
        return function(*args, **kwargs)  # nothing is to be kept; least of all where shapes alone are asked for
    replaying = parent is not None and parent.replaying
    keeper = None if replaying else Keeper.current(group)
    region = Region(saving, part, keeper, None if replaying else report, parent)
    way = region.recompute if saving.rest is Keep.RECOMPUTE else region.keep
    found = way(function, args, kwargs)
    if not replaying:
        seen(region.seen)
    return found


@attrs.frozen(eq=False)
class _Left:
    """What other hooks keep instead of a tensor."""

    kept: Any


@attrs.define(eq=False)
class Region:
    """One call.

    Hooks and checkpoints nest by torch's rule: what is saved inside an inner region is the inner one's, and an inner one's
    inputs are saved in the outer one. A region inside of one that is just run again keeps nothing: its twin of the first run
    did.

    Attributes:
        keeper: None in a region that keeps nothing.
        report: where bytes are noted; None for nowhere.
        replaying: whether the function is just run again.
    """

    saving: Saving
    part: str
    keeper: Keeper | None
    report: RematReport | None
    parent: "Region | None"
    replaying: bool = False
    seen: set[str] = attrs.field(factory=set)
    _outer: Hooks = attrs.field(factory=Hooks.in_force)
    _tape: Tape | None = attrs.field(factory=current_tape)
    _calls: tuple[Any, ...] = attrs.field(init=False)
    _recorder: Recorder | None = None
    _rewinds: list[Rewind] = attrs.field(factory=list)  # of the calls of modules
    _left: Iterator[Rewind] = attrs.field(factory=lambda: iter(()))  # of them, those that this run has not come to yet
    _rewound: frozenset[nn.Module] = frozenset()  # those that are being called, and what is in them
    _inputs: set[int] = attrs.field(factory=set)  # addresses of what may be kept elsewhere
    _runs: int = 0

    @_calls.default
    def _calls_now(self) -> tuple[Any, ...]:
        return () if self._tape is None else self._tape.calls

    def recompute(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The function's value; its backward pass runs it again."""
        leaves, spec = tree.flatten((args, kwargs))
        values = list({id(leaf): leaf for leaf in leaves if _is_value(leaf)}.values())
        number = {id(value): i for i, value in enumerate(values)}
        places = [(place, number[id(leaf)]) for place, leaf in enumerate(leaves) if _is_value(leaf)]  # one may be given twice
        rest = [None if _is_value(leaf) else leaf for leaf in leaves]  # the checkpoint alone holds the values
        first = [(args, kwargs)]  # the caller's own containers, which the function may write into, once

        def body(*given: Tensor) -> Any:
            if first:
                args, kwargs = first.pop()
                with self._running():
                    return function(*args, **kwargs)
            found = list(rest)
            for place, which in places:
                found[place] = given[which]
            again, more = tree.unflatten(spec, found)
            with self._running():
                return function(*again, **more)

        self._recorder = self._watch(self.saving.by_operation)
        self._note_inputs(values)
        with self._input_hooks(values):
            return checkpoint(body, *values, use_reentrant=False, context_fn=self._contexts)

    def keep(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The function's value; what its operations save is kept as the policy says."""
        self._recorder = recorder = Recorder(self.saving, None)
        self._inputs = {_address(leaf) for leaf in tree.leaves((args, kwargs)) if _is_movable(leaf)}
        with saved_tensors_hooks(self._pack, self._unpack), recorder, self._entered():
            found = function(*args, **kwargs)
        recorder.end()
        return found

    def name(self, tensor: Tensor, name: str) -> None:
        """``checkpoint_name`` was called inside."""
        self.seen.add(name)
        if self._recorder is not None and not self.replaying:
            self._recorder.name(tensor, name)

    # -- running again -------------------------------------------------------------------------------------------------

    def _watch(self, by_operation: bool) -> Recorder | None:
        if self.keeper is None or not (by_operation or self.report is not None):
            return None
        return Recorder(self.saving, self.keeper)

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        if self._recorder is None:
            return nullcontext(), nullcontext()
        return self._recorder, Replayer(self._recorder) if self.saving.by_operation else nullcontext()

    @contextmanager
    def _running(self) -> Iterator[None]:
        """The first run, or a further one, in which the tape and the region are as they were."""
        self._runs += 1
        self._left = iter(self._rewinds)
        if self._runs > 1:
            with self._as_before(), self._entered(again=True):
                yield
            return
        with self._counting(), self._entered():
            yield
        if self._recorder is not None:
            self._recorder.end()
            for what, kept in self._recorder.kept() if self.report is not None else ():
                self.report.note_kept(self.part, what, kept)  # type: ignore[union-attr]

    @contextmanager
    def rewinding(self, module: nn.Module) -> Iterator[None]:
        """A call of a module inside of the function: a further run finds in it what the first one found."""
        if self.saving.rest is not Keep.RECOMPUTE or module in self._rewound:
            yield
            return
        before, self._rewound = self._rewound, self._rewound.union(module.modules())
        try:
            with self._rewinding(module):
                yield
        finally:
            self._rewound = before

    def _rewinding(self, module: nn.Module) -> AbstractContextManager[None]:
        if self._runs == 1:
            self._rewinds.append(Rewind())
            return self._rewinds[-1].once(module)
        found = next(self._left, None)
        return nullcontext() if found is None else found.again(module)

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        tape = self._tape
        if tape is None:
            yield
            return
        now, tape.calls = tape.calls, self._calls
        try:
            with nullcontext() if current_tape() is tape else tape.resumed():  # a device's backward has its own thread
                yield
        finally:
            tape.calls = now

    @contextmanager
    def _entered(self, *, again: bool = False) -> Iterator[None]:
        regions = _HERE.__dict__.setdefault("regions", [])
        before, self.replaying = self.replaying, again or (self.parent is not None and self.parent.replaying)
        regions.append(self)
        try:
            yield
        finally:
            regions.pop()
            self.replaying = before

    def _counting(self) -> AbstractContextManager[Any]:
        """Notes what torch's checkpoint is given to drop."""
        report, recorder, inner = self.report, self._recorder, Hooks.in_force()
        if report is None or recorder is None:
            return nullcontext()

        def pack(tensor: Tensor) -> Any:
            what = None if self._is_param(tensor) else recorder.origin(tensor)
            if what is not None:
                report.note(self.part, what, tensor, saved=False)
            return inner.pack(tensor)

        return saved_tensors_hooks(pack, inner.unpack)

    # -- inputs --------------------------------------------------------------------------------------------------------

    def _note_inputs(self, values: list[Tensor]) -> None:
        if self.report is None or self.saving.of_inputs is not Keep.SAVE or self._recomputed_by_another():
            return
        for value in values:
            self.report.note(self.part, "inputs", value, saved=True)

    def _recomputed_by_another(self) -> bool:
        region = self.parent
        while region is not None:
            if region.saving.rest is Keep.RECOMPUTE:
                return True
            region = region.parent
        return False

    def _input_hooks(self, values: list[Tensor]) -> AbstractContextManager[Any]:
        """While the checkpoint takes its inputs; inside of it its own hooks are in force."""
        if self.saving.of_inputs is Keep.SAVE:
            return nullcontext()
        self._inputs = {_address(value) for value in values if _is_movable(value)}
        return saved_tensors_hooks(self._pack, self._unpack)

    # -- what autograd saves -------------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> "Here | Away | _Left":
        what = self._what(tensor)
        how = Keep.SAVE if what is None else self._how(what)
        if how is Keep.SAVE or what is None:
            if what is not None and self.report is not None and not self._recomputed_by_another():
                self.report.note(self.part, what, tensor, saved=True)
            return _Left(self._outer.pack(tensor))
        if self.keeper is None:
            return Here(tensor)
        kept = self.keeper.keep(tensor, how)
        if self.report is not None:
            self.report.note_kept(self.part, what, kept)
        return kept

    def _unpack(self, kept: "Here | Away | _Left") -> Tensor:
        return self._outer.unpack(kept.kept) if isinstance(kept, _Left) else kept.get()

    def _what(self, tensor: Tensor) -> str | None:
        """What a saved tensor is; None for params and whatever else is from elsewhere."""
        if type(tensor) is not Tensor or tensor.layout != torch.strided or self._is_param(tensor):
            return None
        found = None if self.saving.rest is Keep.RECOMPUTE or self._recorder is None else self._recorder.origin(tensor)
        return found or ("inputs" if _address(tensor) in self._inputs else None)

    def _how(self, what: str) -> Keep:
        if what == "inputs":
            return self.saving.of_inputs
        if what == "matmuls":
            return self.saving.matmuls or self.saving.rest
        return self.saving.names.get(what, self.saving.rest)

    def _is_param(self, tensor: Tensor) -> bool:
        return self._tape is not None and any(claim(tensor) for claim in self._tape.claims)


def _is_value(leaf: Any) -> bool:
    """A tensor that a computation gave: no parameter, which is there anyway, and nothing that stands for one."""
    return type(leaf) is Tensor and not (leaf.is_leaf and leaf.requires_grad)


def _is_movable(leaf: Any) -> bool:
    return _is_value(leaf) and bool(leaf.requires_grad) and leaf.layout == torch.strided


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
