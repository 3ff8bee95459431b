"""Private functions of torch that the library uses, except those of its compiler, of process groups and in ``torch_replaced``.

Tested with torch 2.13.0.

They have no public equivalent, and torch may change them in any release. tests/base/test_torch_private.py has a test for each,
and one that no other file uses private functions of torch.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any, TypeVar, cast

import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor, nn
from torch._C._dynamo import eval_frame as dynamo
from torch._functorch.eager_transforms import enable_inplace_requires_grad, grad_increment_nesting
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._guards import TracingContext
from torch._guards import detect_fake_mode as detect_any_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorConverter,
    UnsupportedFakeTensorException,
    unset_fake_temporarily,
)
from torch._subclasses.fake_tensor import FakeTensorMode as TorchFakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode as AnyDispatchMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

__all__ = [
    "CPU_ATTENTION",
    "CPU_ATTENTION_BACKWARD",
    "CUDA_ATTENTION",
    "CUDA_ATTENTION_BACKWARD",
    "GROUPED_PRODUCT",
    "READ_NUMBER",
    "UNDECLARED_VIEWS",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorConverter",
    "FakeTensorMode",
    "TorchDispatchMode",
    "UnsupportedFakeTensorException",
    "at_backward_end",
    "backward_pass",
    "below_autograd",
    "below_level",
    "buffers_of",
    "constant_when_compiled",
    "detect_fake_mode",
    "disable_dispatch_modes",
    "disable_torch_function",
    "disable_torch_function_subclass",
    "dispatch_modes",
    "foreach_add_",
    "foreach_copy_",
    "grad_level",
    "gradients",
    "graph_number",
    "has_late_hooks",
    "has_tangent",
    "has_values",
    "held_elsewhere",
    "hooks_of",
    "hooks_of_optimizer",
    "in_dual_level",
    "in_torch_func",
    "is_fake",
    "is_transformed",
    "leaf_at_level",
    "make_wrapper_subclass",
    "mark_parameter",
    "node_number",
    "non_persistent_buffers_of",
    "outside_functorch",
    "parameters_of",
    "pytree_node_of",
    "quick_call_of",
    "refresh_flat_weights",
    "run_backward",
    "saved_tensors_hooks_in_force",
    "schema_of",
    "storage_id",
    "unscale_",
    "unset_fake_temporarily",
    "version_of",
]

T = TypeVar("T", bound=Tensor)
F = TypeVar("F", bound=Callable[..., Any])
CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
CPU_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
CUDA_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention.default
CUDA_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
UNDECLARED_VIEWS = (  # they return views of their inputs, and their schemas do not declare it
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten._reshape_alias.default,
    torch.ops.aten.lift_fresh.default,
)
GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default
READ_NUMBER = torch.ops.aten._local_scalar_dense.default  # the operator of ``.item()``

# Re-exported names, and what they are used for:
# - FakeTensorConverter: `deferred` disables its memo of weak references, with which modules could not be cast or moved.
# - The three exceptions: raised if an operation on fake tensors needs values; stages and traces report them.
# - CPU_ATTENTION, its backward, GROUPED_PRODUCT: operators for which torch has no operation counts, or no shapes. Ring
#   attention computes its blocks with the former two, and with CUDA_ATTENTION and its backward: the public function does not
#   return the log-sum-exp by which blocks are merged.


class TorchDispatchMode(AnyDispatchMode):
    """torch's class, which keeps the compiler out of modes, without importing the compiler for that, which takes a second."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        uncompiled = cls.__dict__.get("__torch_dispatch__")
        if uncompiled is not None:

            @functools.wraps(uncompiled)
            def run(*args: Any, **kwargs: Any) -> Any:
                return (uncompiled if "torch._dynamo" in sys.modules else uncompiled.__wrapped__)(*args, **kwargs)

            skips = dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT)
            dynamo.set_code_exec_strategy(cast(Any, run).__code__, skips)
            cls.__torch_dispatch__ = run  # type: ignore[method-assign]


class FakeTensorMode(TorchFakeTensorMode):
    """torch's FakeTensorMode, with grouped products of all dtypes: torch computes them, but knows their shape in bf16 only."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is GROUPED_PRODUCT and not any(x.dtype == torch.bfloat16 for x in args[:2]):
            with self:
                return _grouped_product(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def _grouped_product(a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None) -> Tensor:
    """An empty tensor of the result's shape; rows, columns or the inner dim are in groups if an operand has 2 dims."""
    groups = [len(offs)] if a.dim() == b.dim() == 2 and offs is not None else [len(a)] if a.dim() == b.dim() == 3 else []
    return torch.empty(*groups, a.shape[-2], b.shape[-1], dtype=out_dtype or a.dtype, device=a.device)


def detect_fake_mode() -> Any:
    """The active fake mode, or None; faster than torch's function if there is none."""
    if TracingContext.try_get() is None and not torch._C._len_torch_dispatch_stack():
        return None
    return detect_any_fake_mode()


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor is a FakeTensor."""
    return isinstance(tensor, FakeTensor)


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has values: neither on the device "meta" nor fake (of a trial run, which must not change buffers)."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def is_transformed(tensor: Tensor) -> bool:
    """Whether a tensor is wrapped by a transform of ``torch.func``, so that its values cannot be read."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


in_torch_func: Callable[[], bool] = torch._C._are_functorch_transforms_active  # whether a transform of torch.func runs


@contextmanager
def grad_level() -> Iterator[int | None]:
    """A level of ``torch.func`` for a backward pass; None outside of its transforms, where autograd needs none.

    ``torch.func.grad`` would return zeros for unused inputs, which optimizers must skip.
    """
    if not in_torch_func():
        yield None
        return
    with grad_increment_nesting() as level:
        yield level


def leaf_at_level(tensor: Tensor, level: int | None) -> Tensor:
    """A view of the tensor to differentiate by at a level of ``grad_level``; below it is the tensor's graph."""
    leaf = tensor.view_as(tensor) if level is None else torch._C._functorch._wrap_for_grad(tensor, level)
    with enable_inplace_requires_grad(True):
        return leaf if leaf.requires_grad else leaf.requires_grad_()


def below_level(tensor: Tensor, level: int | None) -> Tensor:
    """Unwraps a tensor that was computed at a level."""
    return tensor if level is None else torch._C._functorch._unwrap_for_grad(tensor, level)


def disable_dispatch_modes() -> AbstractContextManager[Any]:
    """Hides the block from active dispatch modes, such as recorders."""
    return _disable_current_modes()


def disable_torch_function() -> AbstractContextManager[Any]:
    """Disables function modes and ``__torch_function__`` inside the block, so that a tracer does not trace itself."""
    return torch._C.DisableTorchFunction()


def disable_torch_function_subclass() -> AbstractContextManager[Any]:
    """Disables ``__torch_function__`` of subclasses inside the block, to read a lazy leaf's metadata without a gather."""
    return torch._C.DisableTorchFunctionSubclass()


def outside_functorch() -> AbstractContextManager[Any]:
    """Disables the transforms of torch.func inside the block, in which params are fetched."""
    return temporarily_clear_interpreter_stack()


def dispatch_modes() -> list[AnyDispatchMode]:
    """The active dispatch modes of this thread."""
    return _get_current_dispatch_mode_stack()


def in_dual_level() -> bool:
    """Whether a ``torch.autograd.forward_ad.dual_level`` is active."""
    return forward_ad._current_level >= 0


def has_tangent(tensor: Tensor) -> bool:
    """Whether forward mode carries a derivative along with the tensor."""
    while (dual := in_dual_level()) and torch._C._functorch.is_batchedtensor(tensor):  # unpack_dual has no batching rule
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return dual and forward_ad.unpack_dual(tensor).tangent is not None


def held_elsewhere(held: list[Any]) -> list[bool]:
    """Which objects are referenced from outside this list; references from C++ to a tensor count as one."""
    return [count > _ALONE for count in _references(held)]


def _references(held: list[Any]) -> list[int]:
    return [sys.getrefcount(held[place]) for place in range(len(held))]


_ALONE = _references([object()])[0]


def saved_tensors_hooks_in_force() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """The innermost ``saved_tensors_hooks`` of this thread, or None. torch applies only those, so ours must call them."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return tuple(hooks) if hooks else None


def run_backward(outputs: Sequence[Any], seeds: Sequence[Tensor], leaves: Sequence[Tensor], *, keep_graph: bool) -> None:
    """``torch.autograd.backward(outputs, seeds, keep_graph, inputs=leaves)`` without checks.

    The checks take as long as the backward pass of a small pipeline stage.
    """
    torch.autograd.Variable._execution_engine.run_backward(
        tuple(outputs), tuple(seeds), keep_graph, False, tuple(leaves), allow_unreachable=True, accumulate_grad=True
    )


def gradients(
    outputs: Sequence[Tensor], seeds: Sequence[Tensor], leaves: Sequence[Tensor], *, retain_graph: bool = False
) -> list[Tensor | None]:
    """``torch.autograd.grad(outputs, leaves, seeds, allow_unused=True)`` without calling ``__torch_function__`` of leaves."""
    engine = torch.autograd.Variable._execution_engine
    grads = engine.run_backward(
        tuple(outputs), tuple(seeds), retain_graph, False, tuple(leaves), allow_unreachable=True, accumulate_grad=False
    )
    return list(grads)


def at_backward_end(work: Callable[[], None]) -> None:
    """Calls ``work`` when this thread's current backward pass has ended, such as a user's ``loss.backward()``."""
    torch.autograd.Variable._execution_engine.queue_callback(work)


def backward_pass() -> int:
    """An id of this thread's current backward pass, -1 for none; nested ones have different ids."""
    return torch._C._current_graph_task_id()


def storage_id(held: Tensor | torch.UntypedStorage) -> int:
    """An id of a tensor's storage, also of one without an address; it may be reused once the storage is freed."""
    storage = held.untyped_storage() if isinstance(held, Tensor) else held
    return int(storage._cdata)


version_of: Callable[[Tensor], int] = attrgetter("_version")  # how often a tensor was written to in place


def graph_number(tensor: Tensor) -> int:
    """The sequence number of a tensor's autograd node in its thread; -1 without one."""
    return -1 if tensor.grad_fn is None else tensor.grad_fn._sequence_nr()


def node_number() -> int | None:
    """The sequence number (``graph_number``) of the node that this thread's backward pass runs; None outside of one.

    It tells which module an operation of the backward pass belongs to.
    """
    node: Any = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def mark_parameter(tensor: Tensor) -> None:
    """Makes ``isinstance(tensor, nn.Parameter)`` true, for losses that search for parameters."""
    tensor._is_param = True


below_autograd: Callable[[], AbstractContextManager[Any]] = torch._C._AutoDispatchBelowADInplaceOrView  # views have no base
has_late_hooks: Callable[[Tensor], Any] = attrgetter("_post_accumulate_grad_hooks")  # those of a leaf, which would never run


def hooks_of_optimizer(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """The hooks of an optimizer's ``step``."""
    return [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]


def hooks_of(tensor: Tensor) -> list[Callable[..., Any]]:
    """A leaf's gradient hooks."""
    return [*(tensor._backward_hooks or {}).values(), *(tensor._post_accumulate_grad_hooks or {}).values()]


def schema_of(operator: Any) -> Any:
    """An operator's schema (``torch.FunctionSchema``): its name, arguments, and which of them it writes to."""
    return operator._schema


def quick_call_of(operator: Any) -> Callable[..., Any]:
    """The operator that an ``OpOverload`` calls, without its Python wrapper."""
    return operator._op  # type: ignore[no-any-return]


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """The dict of a module's direct parameters; assigning to it replaces parameters without registering them."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The dict of a module's direct buffers; assigning to it replaces buffers without registering them."""
    return module._buffers


def non_persistent_buffers_of(module: nn.Module) -> set[str]:
    """The names of a module's direct buffers that are not in its ``state_dict``."""
    return module._non_persistent_buffers_set


def pytree_node_of(cls: type) -> tuple[Callable[[Any], tuple[Sequence[Any], Any]], Callable[[Any, Any], Any]] | None:
    """The flatten and unflatten functions of a class in torch's pytrees; None if it is not registered.

    Other libraries register their containers there (transformers' outputs, tensordict).
    """
    node = torch_pytree.SUPPORTED_NODES.get(cls)
    return None if node is None else (node.flatten_fn, node.unflatten_fn)


def refresh_flat_weights(rnn: nn.RNNBase) -> None:
    """Updates an RNN's second list of parameters, with which it computes."""
    rnn._flat_weights = [getattr(rnn, name) for name in rnn._flat_weights_names]


def make_wrapper_subclass(
    cls: type[T], shape: Sequence[int], *, dtype: torch.dtype, device: torch.device, requires_grad: bool
) -> T:
    """A tensor of a subclass with a shape and no memory, such as a lazy leaf of ZeRO-3, which is gathered on first use."""
    made: T = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, requires_grad=requires_grad)
    return made


def foreach_copy_(into: list[Tensor], values: list[Tensor]) -> None:
    """``into[i].copy_(values[i])`` for all i in a few kernels; on CUDA several times faster than a loop."""
    torch._foreach_copy_(into, values)


def foreach_add_(into: list[Tensor], values: list[Tensor]) -> None:
    """``into[i].add_(values[i])`` for all i in a few kernels; on CUDA several times faster than a loop."""
    torch._foreach_add_(into, values)


def unscale_(grads: list[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """Multiplies gradients in place by a scalar, and sets ``found_inf`` to 1 if one is not finite: GradScaler's kernel."""
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inverse_scale)


# -- for compiled functions --------------------------------------------------------------------------------------------------


def constant_when_compiled(function: F) -> F:
    """``torch.compiler.assume_constant_result`` without importing torch's compiler: torch.compile calls it while it traces."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
