"""Modules whose parameters have no values yet: built without memory, materialised a leaf at a time."""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from functional_ds.base.torch_private import FakeTensor, FakeTensorConverter, FakeTensorMode, buffers_of, parameters_of
from functional_ds.sharding.sources import from_source

from .functional import Apply, functional
from .init_recorder import Initialisation, Place
from .shared_memory import SharedMemory

__all__ = ["deferred"]


@attrs.frozen(eq=False)
class _Built:
    """A source: what building the module would have given."""

    recording: Initialisation
    places: dict[str, Place]

    at_once = True

    def read(self, path: str, start: int, stop: int) -> Tensor:
        """A stretch of one parameter, which is computed for it."""
        return self.recording.compute(self.places[path]).reshape(-1)[start:stop].clone()


class _Unremembered(FakeTensorConverter):
    """Makes fake tensors without a weak reference to them, with which torch's modules could not be cast or moved."""

    def set_tensor_memo(self, t: Tensor, v: FakeTensor) -> None:
        """Nothing: what is made from no real tensor is never asked for again."""


class _Copies(TorchFunctionMode):
    """Deep copies of fake tensors by values; torch's own would copy the mode that made them, too."""

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


def deferred(build: Callable[[], nn.Module], *, device: str | torch.device = "cpu") -> tuple[Apply, dict[str, Tensor]]:
    """``functional(build())`` for a module larger than memory: the parameters get their values when ``step.init`` stores them.

    ``build`` runs on torch's fake tensors, and what it computes is recorded. Later each rank computes the leaves that it has
    a part of, one at a time, and keeps its part: so a model larger than one rank's memory starts under ``zero(3)``.

    Law: the values are those of a whole initialisation, bit for bit, whatever ``build`` does to its parameters (defaults that
    are overwritten, ties, scaling by depth, draws until all is well); and so is the state in which it leaves the generators.

    Cost: each random operation is carried out once on scratch memory while the module is built, and what a leaf depends on
    once more for that leaf. Nothing is sent. Memory: the largest leaf, and what it is made of; buffers, which are whole.

    Args:
        build: makes the module on the CPU; it must not name another device.
        device: where parameters and buffers shall lie. Their values are the CPU's.

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
    recording = Initialisation()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.fake_tensor_converter = _Unremembered()
    with mode, _Copies(), recording:
        module = build()
    SharedMemory.of(module, dict(module.named_parameters()), {})  # refuses what the meta device would part
    places = _bare(module, recording)
    for owner in module.modules():
        for tensors in (buffers_of(owner), owner.__dict__):
            fake = {name: x for name, x in tensors.items() if isinstance(x, FakeTensor)}
            tensors.update({name: recording.compute(recording.place(x)).to(device) for name, x in fake.items()})
    apply, params = functional(module)
    leaves = from_source({name: params[name] for name in places}, _Built(recording, places), device=device)
    return apply, {name: leaves.get(name, x) for name, x in params.items()}


def _bare(module: nn.Module, recording: Initialisation) -> dict[str, Place]:
    """Puts parameters on the meta device into the places of fake ones; where those lie, by their first names."""
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
