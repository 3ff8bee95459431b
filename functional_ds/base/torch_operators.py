"""What is private of torch's operators and used here: some of them, their schemas, and the mode of fake tensors.

- CPU_ATTENTION, its backward, GROUPED_PRODUCT: operators for which torch has no count of operations, or no shape. Without them
  costs leave out attention on the CPU and experts. Ring attention computes its blocks with the former two, and with
  CUDA_ATTENTION and its backward: the public function does not return the logarithms by which blocks are merged.
- FakeTensorMode: in it tensors have no values. Modules, stages and memory predictions run on such; without them nothing can be
  built, traced or priced without memory.
- detect_fake_mode: whether a call is such a trial run, which must leave no trace in buffers and reports.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch._guards import detect_fake_mode as detect_any_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode as TorchFakeTensorMode

__all__ = [
    "CPU_ATTENTION",
    "CPU_ATTENTION_BACKWARD",
    "CUDA_ATTENTION",
    "CUDA_ATTENTION_BACKWARD",
    "GROUPED_PRODUCT",
    "READ_NUMBER",
    "UNDECLARED_VIEWS",
    "FakeTensorMode",
    "detect_fake_mode",
    "foreach_add_",
    "foreach_copy_",
    "quick_call_of",
    "schema_of",
    "unscale_",
]

CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
CUDA_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention.default
CUDA_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
UNDECLARED_VIEWS = (  # they give memory of their input, and their schemas do not say so
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten._reshape_alias.default,
    torch.ops.aten.lift_fresh.default,
)
GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default
READ_NUMBER = torch.ops.aten._local_scalar_dense.default  # what ``.item()`` is


class FakeTensorMode(TorchFakeTensorMode):
    """torch's, for grouped products of every dtype: torch knows their shape in bf16 alone, and computes others, too.

    Without it, mixtures of experts could only be cut, priced and tried without values where they compute in bf16.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is GROUPED_PRODUCT and not any(x.dtype == torch.bfloat16 for x in args[:2]):
            with self:
                return _grouped_product(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def _grouped_product(a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None) -> Tensor:
    """An empty result: rows, columns or the inner dim are in groups, where one of both has 2 dims or both have."""
    groups = [len(offs)] if a.dim() == b.dim() == 2 and offs is not None else [len(a)] if a.dim() == b.dim() == 3 else []
    return torch.empty(*groups, a.shape[-2], b.shape[-1], dtype=out_dtype or a.dtype, device=a.device)


def detect_fake_mode() -> Any:
    """The fake mode that is active here, or None. torch's own function takes microseconds to find that there is no mode."""
    if TracingContext.try_get() is None and not torch._C._len_torch_dispatch_stack():
        return None
    return detect_any_fake_mode()


def schema_of(operator: Any) -> Any:
    """An operator's name, arguments and which of those it writes to (``torch.FunctionSchema``)."""
    return operator._schema


def quick_call_of(operator: Any) -> Callable[..., Any]:
    """What an ``OpOverload`` calls: the operator itself, without a function of Python around it."""
    return operator._op  # type: ignore[no-any-return]


def foreach_copy_(into: list[Tensor], values: list[Tensor]) -> None:
    """``into[i].copy_(values[i])`` for all i in a few kernels. A loop is right, too, and on CUDA several times slower."""
    torch._foreach_copy_(into, values)


def foreach_add_(into: list[Tensor], values: list[Tensor]) -> None:
    """``into[i].add_(values[i])`` for all i in a few kernels. A loop is right, too, and on CUDA several times slower."""
    torch._foreach_add_(into, values)


def unscale_(grads: list[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """Multiplies gradients in place by a scalar, and sets ``found_inf`` to 1 where one is not finite, in one kernel.

    torch's GradScaler does it so. Otherwise each gradient would take a kernel and a temporary tensor of its own.
    """
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inverse_scale)
