"""How long parts of a module take."""

import statistics
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from functional_ds.functional import Apply

from .moulds import tensors_in
from .program import Part

__all__ = ["seconds"]


def seconds(
    apply: Apply, params: Mapping[str, Tensor], parts: Sequence[Part], inputs: Sequence[Tensor], *, rounds: int = 5
) -> list[float]:
    """Seconds of each part's forward and backward, the median of some rounds after one that warms up."""
    device = next((leaf.device for leaf in params.values()), torch.device("cpu"))
    trained = [leaf for leaf in params.values() if leaf.requires_grad]
    times: list[list[float]] = [[] for _ in parts]
    with torch.enable_grad(), torch.random.fork_rng():
        for _ in range(rounds + 1):
            x: list[Tensor] = []
            for part, taken in zip(parts, times, strict=True):
                begin = _now(device)
                found = apply.within(params, lambda module: part.run(module, params, inputs, x, device))  # noqa: B023
                outputs = [tensor for _, tensor in tensors_in(found)]
                _backward(outputs, [*x, *trained])
                taken.append(_now(device) - begin)
                x = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in outputs]
    return [statistics.median(taken[1:]) for taken in times]


def _backward(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    roots = [tensor for tensor in outputs if tensor.requires_grad]
    ends = [leaf for leaf in leaves if leaf.requires_grad]
    if roots and ends:
        torch.autograd.grad(roots, ends, [torch.ones_like(root) for root in roots], allow_unused=True)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
