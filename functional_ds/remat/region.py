"""A call of a function under a policy: its saved tensors are recomputed or stored."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.device import in_use, redrawn, rng_state
from functional_ds.base.tree import setting
from functional_ds.comm.worlds.current import is_trial, recorder
from functional_ds.step.pass_scope import Moment

from .entered import Entered, current_region, entered
from .op_cache import OpRecorder, Replayer
from .policy import Keep, RematPolicy
from .report import Notes, open_report
from .rerun import ModuleCalls, snapshot
from .saved_tensors import Offloaded, Resident, SavedTensorHooks, TensorStore, address_of, is_own


def run(
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    *,
    policy: RematPolicy,
    group: comm.Group | None,
    part: str,
    seen: Callable[[set[str]], None],
) -> Any:
    """``function(*args, **kwargs)`` under a policy.

    ``part`` names the call in reports; ``seen`` is called with the names that ``checkpoint_name`` gave inside.
    """
    parent, report = current_region(), None if recorder().records else open_report()
    plain = policy.saves_everything and (report is None or parent is not None)
    if plain or not torch.is_grad_enabled() or is_trial():
        return function(*args, **kwargs)
    replaying = parent is not None and parent.replaying
    notes = Notes(None if replaying else report, part, parent is not None and parent.recomputed)
    region = Region(policy, None if replaying else TensorStore.current(group), notes, parent)
    output = (region.recompute if policy.recomputes else region.store_saved)(function, args, kwargs)
    if not replaying:
        seen(region.names)
    return output


@attrs.define(eq=False, repr=False)
class Region:
    """One call.

    Hooks and checkpoints nest by torch's rule: what is saved inside an inner region belongs to the inner one, and the inner
    one's inputs are saved in the outer one. When an outer region reruns, its inner regions store nothing, because those of the
    first run did.

    Attributes:
        store: None in a region that stores nothing.
        replaying: whether the function is running again.
        names: that ``checkpoint_name`` gave inside.
        modules: the calls of modules inside.
    """

    policy: RematPolicy
    store: TensorStore | None
    notes: Notes
    parent: Entered | None
    replaying: bool = False
    names: set[str] = attrs.field(factory=set)
    modules: ModuleCalls = attrs.field(init=False)
    _recorder: OpRecorder | None = None
    _drawn: tuple[torch.device, Tensor] | None = None  # the device's generator before the function, where checkpoint loses it
    _outer: SavedTensorHooks = attrs.field(factory=SavedTensorHooks.in_force)
    _moment: Moment = attrs.field(factory=Moment.now)

    def __attrs_post_init__(self) -> None:
        self.modules = ModuleCalls(reruns=self.policy.recomputes)

    @property
    def recomputed(self) -> bool:
        """Whether this region, or an enclosing one, is running again."""
        return self.policy.recomputes or (self.parent is not None and self.parent.recomputed)

    def name(self, tensor: Tensor, name: str) -> None:
        """``checkpoint_name`` was called inside."""
        self.names.add(name)
        if self._recorder is not None and not self.replaying:
            self._recorder.name(tensor, name)

    def unseen(self, known: Sequence[Tensor]) -> AbstractContextManager[None]:
        """A context in which no recorder sees operations; ``known`` is what they are given."""
        return nullcontext() if self._recorder is None or self.replaying else self._recorder.unseen(known)

    # -- the two ways --------------------------------------------------------------------------------------------------

    def recompute(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs the function under torch's checkpoint, which runs it again in the backward pass, without the kept operations."""
        values, rebuilt = _separated(args, kwargs)
        device = in_use()
        if device is not None and all(value.device != device for value in values):  # torch's checkpoint asks its inputs only
            self._drawn = device, rng_state(device)
        first = [(args, kwargs)]  # the caller's own containers, into which the function may write, once

        def body(*given: Tensor) -> Any:
            with self._first_run() if first else self._second_run():
                again, more = first.pop() if first else rebuilt(given)
                return function(*again, **more)

        watched = self.policy.by_operation or self.policy.of("inputs") is Keep.OFFLOAD or self.notes.report is not None
        if self.store is not None and watched:
            self._recorder = OpRecorder(self.policy, self.store)
        if self.policy.of("inputs") is Keep.SAVE:
            for value in values:
                self.notes.saved("inputs", value)
            inputs_hooks: AbstractContextManager[Any] = nullcontext()
        else:  # while the checkpoint takes its inputs; inside of it its own hooks are in force
            inputs_hooks = self._store_hooks(values, lambda tensor: None)
        with _named(), inputs_hooks:
            modes: dict[str, Any] = {} if self._recorder is None else {"context_fn": self._dispatch_modes}
            return checkpoint(body, *values, use_reentrant=False, **modes)

    def store_saved(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs the function under hooks that store what its operations save."""
        self._recorder = recorder = OpRecorder(self.policy, self.store)
        with _named(), self._store_hooks(tree.leaves((args, kwargs)), recorder.origin), recorder, self._entered():
            output = function(*args, **kwargs)
        recorder.end()
        return output

    # -- runs ----------------------------------------------------------------------------------------------------------

    def _dispatch_modes(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """For the first run and for further ones; torch needs two modes if a step is traced."""
        if self._recorder is None:
            return nullcontext(), nullcontext()
        replays = self.policy.by_operation or recorder().records
        return self._recorder, Replayer(self._recorder) if replays else nullcontext()

    @contextmanager
    def _first_run(self) -> Iterator[None]:
        with self._count_dropped(), self._entered():
            yield
        if self._recorder is not None:
            self._recorder.end()
            for result in self._recorder.results.values():
                for kept in result.stored():
                    self.notes.kept(result.what, kept)

    @contextmanager
    def _second_run(self) -> Iterator[None]:
        draws = nullcontext() if self._drawn is None else redrawn(*self._drawn)
        with recorder().recomputing(), self.modules.rewound(), draws, self._moment.restored(), self._entered(again=True):
            yield

    @contextmanager
    def _entered(self, *, again: bool = False) -> Iterator[None]:
        replaying = again or (self.parent is not None and self.parent.replaying)
        try:
            with setting(self, replaying=replaying), entered(self):
                yield
        finally:
            if self.store is not None and not again:
                self.store.hold_device()  # what follows may write into what is being copied

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def _count_dropped(self) -> AbstractContextManager[Any]:
        """Records what torch's checkpoint drops."""
        recorder, report, inner = self._recorder, self.notes.report, SavedTensorHooks.in_force()
        if recorder is None or report is None:
            return nullcontext()

        def pack(tensor: Tensor) -> Any:
            what = None if self._moment.owns(tensor) else recorder.origin(tensor)
            if what is not None:
                report.note(self.notes.part, what, tensor, saved=False)
            return inner.pack(tensor)

        return saved_tensors_hooks(pack, inner.unpack)

    def _store_hooks(self, inputs: Sequence[Any], origin: Callable[[Tensor], str | None]) -> AbstractContextManager[Any]:
        """Stores what autograd saves: the inputs, and tensors that ``origin`` recognises. Outer hooks get the others."""
        values = [value for value in inputs if _is_value(value) and value.layout == torch.strided]
        addresses = set(map(address_of, values))
        movable = {address_of(value) for value in values if value.requires_grad}  # the caller keeps any other anyway

        def pack(tensor: Tensor) -> Resident | Offloaded | _Outer:
            what = None
            if is_own(tensor) and tensor.layout == torch.strided and not self._moment.owns(tensor):
                what = origin(tensor) or ("inputs" if address_of(tensor) in addresses else None)
            stays = what is None or (what == "inputs" and address_of(tensor) not in movable)
            how = Keep.SAVE if what is None or stays else self.policy.of(what)
            if what is None or how is Keep.SAVE:
                if what is not None:
                    self.notes.saved(what, tensor)
                return _Outer(self._outer.pack(tensor))
            if self.store is None:
                return Resident(tensor)
            kept = self.store.keep(tensor, how)
            self.notes.kept(what, kept)
            return kept

        def unpack(kept: Resident | Offloaded | _Outer) -> Tensor:
            return self._outer.unpack(kept.packed) if isinstance(kept, _Outer) else kept.get()

        return saved_tensors_hooks(pack, unpack)


_OF_TRANSFORMS = (
    "don't yet support saved tensor hooks",
    "on an invalid python storage",
    "of TensorWrapper",
    "HigherOrderOperator",
)


@contextmanager
def _named() -> Iterator[None]:
    """A context that explains torch's errors about its own transforms."""
    try:
        yield
    except RuntimeError as error:
        if any(words in str(error) for words in _OF_TRANSFORMS):
            raise RuntimeError(
                "a function under remat uses torch.func or torch.cond, which do not work with hooks on what autograd saves or "
                "with kept outputs: leave the layer out of remat, or use torch.autograd.grad(..., create_graph=True), or an if"
            ) from error
        raise


@attrs.frozen(eq=False)
class _Outer:
    """What the outer hooks save instead of a tensor."""

    packed: Any


def _separated(args: Any, kwargs: Any) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """The tensors among arguments, each once, and a function that puts others in their places, which holds none of them.

    It uses the arguments as they are at each call, also if a run writes into an object among them.
    """
    leaves, spec = tree.flatten((args, kwargs))
    values = list({id(leaf): leaf for leaf in leaves if _is_value(leaf)}.values())
    number = {id(value): i for i, value in enumerate(values)}
    places = [number[id(leaf)] if _is_value(leaf) else None for leaf in leaves]
    others = snapshot([None if _is_value(leaf) else leaf for leaf in leaves])

    def rebuilt(given: Sequence[Tensor]) -> Any:
        pairs = zip(places, snapshot(others), strict=True)
        filled = (other if which is None else given[which] for which, other in pairs)
        return tree.unflatten(spec, filled)

    return values, rebuilt


def _is_value(leaf: Any) -> bool:
    """Whether it is a computed tensor: not a parameter, which stays anyway, nor a placeholder for one."""
    return isinstance(leaf, Tensor) and is_own(leaf) and not (leaf.is_leaf and leaf.requires_grad)
