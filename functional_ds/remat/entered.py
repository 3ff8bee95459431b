"""The stack of remat regions of a thread."""

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from functional_ds.base.torch_private import disable_dispatch_modes

if TYPE_CHECKING:
    from .policy import RematPolicy
    from .rerun import ModuleCalls


class Entered(Protocol):
    """A region, as seen by the code inside of it."""

    policy: "RematPolicy"
    modules: "ModuleCalls"
    replaying: bool

    @property
    def recomputed(self) -> bool: ...

    def name(self, tensor: Tensor, name: str) -> None: ...

    def unseen(self, known: Sequence[Tensor]) -> AbstractContextManager[None]: ...


class _Thread(threading.local):
    def __init__(self) -> None:
        self.regions: list[Entered] = []


_THREAD = _Thread()


@contextmanager
def entered(region: Entered) -> Iterator[None]:
    """A context in which the region is this thread's innermost one."""
    _THREAD.regions.append(region)
    try:
        yield
    finally:
        _THREAD.regions.pop()


def current_region() -> Entered | None:
    """The innermost region that this thread runs."""
    return next(reversed(_THREAD.regions), None)


@contextmanager
def one_operation(known: Iterable[Tensor]) -> Iterator[None]:
    """A context in which enclosing regions see no operations: a compiled function is one, and what it saves is "inside".

    Args:
        known: what it is given and does not make: its inputs, params and buffers.
    """
    held = [*known]
    with ExitStack() as stack:
        for region in _THREAD.regions:
            stack.enter_context(region.unseen(held))
        stack.enter_context(disable_dispatch_modes())
        yield


def refuse_exceptions() -> None:
    """Raises an error for compiled code in a region whose policy has exceptions for single operations, which it would hide.

    Raises:
        ValueError: there is such a region.
    """
    for region in _THREAD.regions:
        if region.policy.by_operation:
            raise ValueError(
                f"policy='{region.policy}' keeps the results of single operations, and compiled code has none: give remat a "
                "policy without names and matmuls, such as 'recompute' or 'offload', or compile other blocks"
            )


def called(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` as a call of the module that changes its buffers and plain attributes once, however often it runs."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for region in _THREAD.regions:
                stack.enter_context(region.modules.calling(module))
            return forward(*args, **kwargs)

    return call


def owner_of(forward: Any) -> nn.Module | None:
    """The module that a forward belongs to, perhaps through wrappers of its calls; None if it is no module's method."""
    while isinstance(forward, functools.partial):
        forward = forward.args[-1]
    owner = getattr(forward, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None
