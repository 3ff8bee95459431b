"""Helpers of the optimizers: arguments of torch's kernels, skipped updates, and checks of hyperparameters."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.torch_private import is_transformed
from functional_ds.base.weighted import Weighted, weight_dtype

_COPIED = 2**22  # elements of gradients that are converted at a time


def reals(tensors: list[Tensor]) -> list[Tensor]:
    """Views complex tensors as pairs of reals; others are unchanged."""
    return [torch.view_as_real(t) if t.is_complex() else t for t in tensors]


def gradients(grads: Weighted, params: list[Tensor]) -> list[Tensor]:
    """The sums of gradients, contiguous and in the parameters' dtype, as the fused kernels require."""
    pairs = zip(grads.sum, params, strict=True)
    return reals([g if g.dtype == p.dtype and g.is_contiguous() else g.to(p.dtype).contiguous() for g, p in pairs])


def _chunks(grads: Sequence[Tensor], params: Sequence[Tensor]) -> Iterator[list[int]]:
    """The indices of all tensors, in chunks that limit the elements of gradients to convert at a time."""
    chunk, copied = list[int](), 0
    for place, (grad, param) in enumerate(zip(grads, params, strict=True)):
        more = 0 if grad.dtype == param.dtype and grad.is_contiguous() else grad.numel()
        if more and copied and copied + more > _COPIED:
            yield chunk
            chunk, copied = [], 0
        chunk.append(place)
        copied += more
    yield chunk


def run_fused(kernel: Callable[..., None], params: list[Tensor], grads: Weighted, *states: Any, lr: float | Tensor) -> None:
    """Runs a fused kernel of torch on params, gradients and lists of states, as reals, in place.

    These kernels divide gradients by a weight in fp32, and on a GPU multiply by the learning rate in fp32. So fp64 params get a
    separate call, with gradients that are already divided and, if ``lr`` is on a GPU, with lr=1, after which the change is
    scaled.

    Args:
        kernel: gets these lists, ``grad_scale``, ``found_inf`` and ``lr``; its change of params must be linear in ``lr``.
        params: the tensors to update.
        grads: their gradients.
        states: lists like the params.
        lr: the learning rate of this update.
    """
    dtypes = {dtype for dtype in {p.dtype for p in params} if weight_dtype(dtype) == torch.float64}
    wide = [i for i, p in enumerate(params) if p.dtype in dtypes] if dtypes else []
    if wide:
        _run_wide(kernel, [params[i] for i in wide], _some(grads, wide), *([row[i] for i in wide] for row in states), lr=lr)
        rest = [i for i in range(len(params)) if i not in wide]
        if not rest:
            return
        params, grads, states = [params[i] for i in rest], _some(grads, rest), tuple([row[i] for i in rest] for row in states)
    scale, lr = grads.weight.to(torch.float32), lr.to(torch.float32) if isinstance(lr, Tensor) else lr
    skips = found_inf(grads)
    for chunk in _chunks(grads.sum, params):
        tensors, rows = [params[i] for i in chunk], ([row[i] for i in chunk] for row in states)
        kernel(reals(tensors), gradients(_some(grads, chunk), tensors), *rows, grad_scale=scale, found_inf=skips, lr=lr)


def _some(grads: Weighted, places: Sequence[int]) -> Weighted:
    return tree.replace(grads, sum=[grads.sum[i] for i in places])


def _run_wide(kernel: Callable[..., None], params: list[Tensor], grads: Weighted, *states: Any, lr: float | Tensor) -> None:
    tensors = reals(params)
    run = functools.partial(kernel, tensors, means(grads, params), *states, grad_scale=None, found_inf=found_inf(grads))
    if not isinstance(lr, Tensor) or lr.device.type == "cpu":
        run(lr=lr)
        return
    before = [p.clone() for p in tensors]
    run(lr=1.0)
    for p, old in zip(tensors, before, strict=True):
        p.copy_(torch.lerp(old, p, lr.to(p.dtype)))


def divided(grads: Weighted, params: list[Tensor]) -> list[Tensor]:
    """The gradients divided by their weight, in the parameters' dtype.

    The division is in at least fp32, because the weight may be out of range in half precision.
    """
    wides = [torch.promote_types(p.dtype, torch.float32) for p in params]
    rows = zip(grads.sum, wides, params, strict=True)
    return [(grad.to(wide) / grads.weight.to(wide)).to(p.dtype) for grad, wide, p in rows]


def means(grads: Weighted, params: list[Tensor]) -> list[Tensor]:
    """The gradients divided by their weight, as reals, for kernels that do not divide."""
    return reals([mean.contiguous() for mean in divided(grads, params)])


def widened(kernel: Callable[..., None], *rows: Sequence[Tensor | None], **numbers: Any) -> None:
    """Runs ``kernel(*rows, **numbers)`` in place; half precision on a CPU is converted to fp32 and back.

    On a CPU, torch's fused SGD leaves vectors in half precision unchanged.
    """
    wide = [[t.float() if t is not None and _half_on_cpu(t) else t for t in row] for row in rows]
    kernel(*wide, **numbers)
    for row, other in zip(rows, wide, strict=True):
        for tensor, moved in zip(row, other, strict=True):
            if tensor is not None and moved is not None and moved is not tensor:
                tensor.copy_(moved)


def _half_on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype in (torch.float16, torch.bfloat16)


def widest(params: Sequence[Tensor]) -> torch.dtype:
    """The dtype for scalars that are used with all params: fp64 if one of them is fp64, else fp32."""
    return functools.reduce(torch.promote_types, (weight_dtype(p.dtype) for p in params), torch.float32)


def zeros(params: list[Tensor]) -> list[Tensor]:
    """Zeros in the shape of each parameter; for complex parameters, pairs of reals."""
    return [torch.zeros_like(p, memory_format=torch.contiguous_format) for p in reals(params)]


def counts(params: list[Tensor]) -> list[Tensor]:
    """A step count for each parameter: an fp32 scalar on its device, as torch's kernels require."""
    return [torch.zeros((), dtype=torch.float32, device=p.device) for p in params]


def check(**numbers: float | Tensor) -> None:
    """Raises ValueError for negative or non-finite numbers and for tensors that are not scalars; not inside ``torch.func``."""
    for name, value in numbers.items():
        if isinstance(value, Tensor) and value.dim():
            raise ValueError(
                f"{name} has shape {list(value.shape)}, and is one number: use torch.func.vmap over a function that makes the "
                "step, or fds.param_groups"
            )
        if not (isinstance(value, Tensor) and is_transformed(value)) and not 0 <= value < math.inf:
            raise ValueError(f"{name}={value} must be finite and not negative")


def check_counts(**numbers: int) -> None:
    """Raises ValueError for counts below 1."""
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name}={number} must be at least 1")


def check_betas(betas: tuple[float | Tensor, float | Tensor]) -> None:
    """Raises ValueError for betas outside [0, 1)."""
    if not all((isinstance(beta, Tensor) and is_transformed(beta)) or 0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas={betas} must be in [0, 1)")


def found_inf(grads: Weighted) -> Tensor | None:
    """``grads.skip`` as ``found_inf`` of torch's fused kernels, which do nothing if it is 1.0."""
    return None if grads.skip is None else grads.skip.float()


def guarded(rule: Any, params: list[Tensor], grads: Weighted, state: Any, rate: float | Tensor) -> tuple[list[Tensor], Any]:
    """``rule.update``, which leaves params and state bitwise unchanged if ``grads.skip`` is true.

    The host does not wait for the device: unless the optimizer has ``skips``, params and state are copied before the update,
    and the old or new values are selected after it.
    """
    if grads.skip is None or getattr(rule, "skips", False):
        return rule.update(params, grads, state, rate)  # type: ignore[no-any-return]
    before = tree.map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (params, state))
    after = tuple(rule.update(params, grads, state, rate))
    chosen: tuple[list[Tensor], Any] = tree.map(lambda old, new: _choose(grads.skip, old, new), before, after)
    return chosen


def _choose(skip: Tensor, old: Any, new: Any) -> Any:
    return torch.where(skip, old, new) if isinstance(new, Tensor) else new
