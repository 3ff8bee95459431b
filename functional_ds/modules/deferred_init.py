"""Deferred (meta-device) initialization: modules built without memory, materialised one leaf at a time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from functional_ds.base.torch_private import FakeTensor, FakeTensorConverter, FakeTensorMode, buffers_of, parameters_of
from functional_ds.sharding.sources import from_source

from .functional import Apply, as_function
from .init_recorder import Initialisation, Place
from .shared_memory import SharedMemory


@attrs.frozen(eq=False)
class _Built:
    """A source of what building the module would have given."""

    recording: Initialisation
    places: dict[str, Place]

    at_once = True

    def read(self, path: str, start: int, stop: int) -> Tensor:
        """A range of one parameter, computed on demand."""
        return self.recording.compute(self.places[path]).reshape(-1)[start:stop].clone()


class _Unremembered(FakeTensorConverter):
    """Makes fake tensors without weak references to them, which would keep torch's modules from being cast or moved."""

    def set_tensor_memo(self, t: Tensor, v: FakeTensor) -> None:
        """Does nothing: a tensor made from no real tensor is never looked up."""


class _Copies(TorchFunctionMode):
    """Deep copies of fake tensors by values; torch's own would also copy the mode that made them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.numpy, Tensor.__array__) and isinstance(args[0], FakeTensor):
            raise RuntimeError(
                f"build: .numpy() of a tensor of shape {list(args[0].shape)}, whose values are computed later; use torch's "
                "operations, which are recorded: .tolist() to look at values, .copy_(torch.from_numpy(...)) to set them"
            )
        if func is not Tensor.__deepcopy__ or not isinstance(args[0], FakeTensor):
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            copied = tensor.detach().clone()
            wanted = tensor.requires_grad
            memo[id(tensor)] = (
                nn.Parameter(copied, wanted) if isinstance(tensor, nn.Parameter) else copied.requires_grad_(wanted)
            )
        return memo[id(tensor)]


class _Mode(FakeTensorMode):
    """A mode whose tensors are recorded outside of its block, too."""

    def __init__(self, deferral: "Deferral") -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.fake_tensor_converter = _Unremembered()
        self.deferral, self.depth = deferral, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.depth:
            return super().__torch_dispatch__(func, types, args, kwargs)
        self.depth += 1
        try:
            with self, self.deferral.recording:
                return func(*args, **(kwargs or {}))
        finally:
            self.depth -= 1

    def __deepcopy__(self, memo: Any) -> "_Mode":
        return self  # copies of its tensors are recorded as well


class Deferral:
    """Contexts in which modules are built without memory, and their later materialisation; ``deferred`` is one such context.

    Operations on their parameters and buffers outside of a context are recorded too.
    """

    def __init__(self) -> None:
        self.recording = Initialisation()
        self._mode = _Mode(self)

    @contextmanager
    def block(self) -> Iterator[None]:
        """A context in which this thread's new tensors have no memory."""
        self._mode.depth += 1
        try:
            with self._mode, _Copies(), self.recording:
                yield
        finally:
            self._mode.depth -= 1

    def has(self, value: Any) -> bool:
        """Whether a tensor was made here."""
        return isinstance(value, FakeTensor) and value.fake_mode is self._mode

    def compute(self, value: Tensor) -> Tensor:
        """The present values of one of its tensors."""
        with torch.no_grad():
            return self.recording.compute(self.recording.place(value)).clone()

    def functional(self, module: nn.Module, device: str | torch.device) -> tuple[Apply, dict[str, Tensor]]:
        """``functional(module)`` with deferred parameters; the module's own move to the meta device, its buffers get values.

        Args:
            module: with parameters made in such a context.
            device: of parameters and buffers.
        """
        recording = self.recording
        SharedMemory.of(module, dict(module.named_parameters()), {})  # shared memory would be lost
        places = _bare(module, recording)
        for owner in module.modules():
            for tensors in (buffers_of(owner), owner.__dict__):
                fake = {name: x for name, x in tensors.items() if isinstance(x, FakeTensor)}
                tensors.update({name: recording.compute(recording.place(x)).to(device) for name, x in fake.items()})
        apply, params = as_function(module)
        leaves = from_source({name: params[name] for name in places}, _Built(recording, places), device=device)
        return apply, {name: leaves.get(name, x) for name, x in params.items()}


def deferred(build: Callable[[], nn.Module], *, device: str | torch.device = "cpu") -> tuple[Apply, dict[str, Tensor]]:
    """Deferred initialization: ``functional(build())`` whose parameters get values only when ``step.init`` stores them.

    ``build`` runs on torch's fake tensors, and its operations are recorded. Later each rank computes the leaves that it has a
    part of, one at a time, and keeps its part; so a model larger than one rank's memory can start under ``zero(3)``.

    Law: the values, and the final state of the generators, are bitwise those of a normal initialization, for everything that
    ``build`` does to its parameters (overwritten defaults, ties, scaling by depth, rejection sampling).

    Cost: each random operation runs once on scratch memory while the module is built, and what a leaf depends on once more for
    that leaf. Nothing is sent. Memory: the largest leaf, with what it is made of; buffers, which are whole.

    Args:
        build: makes the module on the CPU; it must not name another device.
        device: of parameters and buffers. Their values are the CPU's.

    Raises:
        RuntimeError: ``build`` names another device, or takes a parameter's memory out of torch (``.numpy()``).

    >>> import functional_ds as fds
    >>> apply, params = deferred(lambda: nn.Linear(2, 3))
    >>> params["weight"].is_meta
    True
    >>> state = fds.train_step(lambda p, x: apply(p, x).sum(), fds.sgd(0.1)).init(params)
    >>> state.params["weight"].shape
    torch.Size([3, 2])
    """
    deferral = Deferral()
    with deferral.block():
        module = build()
    return deferral.functional(module, device)


def _bare(module: nn.Module, recording: Initialisation) -> dict[str, Place]:
    """Replaces fake parameters by meta tensors; returns the places of the fake ones, by their first names."""
    new: dict[int, nn.Parameter] = {}
    places: dict[str, Place] = {}
    for path, owner in module.named_modules():
        for key, fake in parameters_of(owner).items():
            if isinstance(fake, FakeTensor):
                if id(fake) not in new:
                    new[id(fake)] = nn.Parameter(torch.empty(fake.shape, dtype=fake.dtype, device="meta"), fake.requires_grad)
                    places[f"{path}.{key}" if path else key] = recording.place(fake)
                parameters_of(owner)[key] = new[id(fake)]
    return places
