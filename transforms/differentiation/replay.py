"""Replays: a function that keeps its input in place of its graph, and runs again in the backward pass."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from functional_ds.base.device import in_use, redrawn, rng_state
from functional_ds.base.torch_private import version_of
from functional_ds.comm.worlds.rng_state import RngState, kept_rng

T = TypeVar("T")
R = TypeVar("R")


def replayed(function: Callable[[T], R], value: T, keep: Callable[[T], Callable[[], T]]) -> R:
    """``function(value)``, of which autograd keeps ``keep(value)`` until a backward pass computes the rest again.

    Law: value and all derivatives are the function's, also where it differentiates inside. Random draws are repeated. The graph
    itself stays, so gradients reach what the function takes by closure.

    Cost: another run of the function in the first backward pass through it, which then holds what one run saves.

    Args:
        function: computes the same again from the same value.
        value: a pytree.
        keep: stores a value, and returns a function that restores it without its graph; collective calls in it are matched if
            all ranks differentiate alike.

    Raises:
        RuntimeError: in the backward pass: the function saved other tensors when it ran again, or one was written to since.
    """
    return _Replay(function, keep(value)).first(value) if torch.is_grad_enabled() else function(value)


@attrs.define(eq=False)
class _Saved:
    """What one operation saved; without the tensor between the function's runs."""

    tensor: Tensor | None
    version: int
    form: tuple[torch.Size, torch.dtype]

    @staticmethod
    def of(tensor: Tensor) -> "_Saved":
        return _Saved(tensor.detach(), version_of(tensor), (tensor.shape, tensor.dtype))

    def get(self) -> Tensor:
        if self.tensor is None or version_of(self.tensor) != self.version:
            raise RuntimeError("differentiable: a tensor that a derivative needs was written to in place: return a new tensor")
        return self.tensor


@attrs.define(eq=False)
class _Replay:
    function: Callable[[Any], Any]
    restored: Callable[[], Any]
    _saved: list["weakref.ref[_Saved]"] = attrs.field(factory=list)  # in order; those that autograd has freed are dead
    _rng: RngState = attrs.field(factory=lambda: RngState.now().copies(1)[0])
    _drawn: tuple[torch.device, Tensor] | None = attrs.field(init=False)  # the device's generator

    def __attrs_post_init__(self) -> None:
        device = in_use()
        self._drawn = None if device is None else (device, rng_state(device))

    def first(self, value: Any) -> Any:
        """The first run, at whose end the saved tensors are dropped."""
        saved = []

        def pack(tensor: Tensor) -> _Saved:
            saved.append(_Saved.of(tensor))
            return saved[-1]

        try:
            with saved_tensors_hooks(pack, self._unpack):
                return self.function(value)
        finally:
            for one in saved:
                one.tensor = None
            self._saved = [weakref.ref(one) for one in saved]

    def _unpack(self, saved: _Saved) -> Tensor:
        if saved.tensor is None:
            self._again()
        return saved.get()

    def _again(self) -> None:
        """A run that fills what the first run has saved, and drops its results."""
        left = iter(self._saved)

        def pack(tensor: Tensor) -> _Saved:
            own, known = _Saved.of(tensor), next(left, lambda: None)()
            if known is not None:
                if known.form != own.form:
                    raise _differs(known.form, own.form)
                known.tensor, known.version = own.tensor, own.version
            return own

        with self._as_before(), torch.enable_grad(), saved_tensors_hooks(pack, _Saved.get):
            self.function(self.restored())
        if (missing := next((one() for one in left if one() is not None), None)) is not None:
            raise _differs(missing.form, "nothing")

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(kept_rng())
            if self._drawn is not None:
                stack.enter_context(redrawn(*self._drawn))
            self._rng.copies(1)[0].restore()
            yield


def _differs(first: Any, second: Any) -> RuntimeError:
    return RuntimeError(
        f"differentiable: this step is computed again in the backward pass, and its loss saved {second} where it had saved "
        f"{first}: let it depend on its arguments alone, and differentiate in the autocast context in which it ran"
    )
