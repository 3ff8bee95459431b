"""What is private of torch and used here, but for its compiler, process groups, and what ``torch_replaced`` replaces.

Tried with torch 2.13.0.

None of it has a public form there. torch may change any of it in any release, so tests/base/test_torch_private.py has a test
for each entry, and another that no other file uses anything private of torch.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor, nn
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
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack

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
UNDECLARED_VIEWS = (  # they give memory of their input, and their schemas do not say so
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten._reshape_alias.default,
    torch.ops.aten.lift_fresh.default,
)
GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default
READ_NUMBER = torch.ops.aten._local_scalar_dense.default  # what ``.item()`` is

# Re-exported names, and what needs them:
# - FakeTensor, FakeTensorMode: tensors without values, on which modules, stages and memory predictions run. Without them
#   nothing can be built, traced or priced without memory.
# - FakeTensorConverter: `deferred` switches off its memo of weak references, with which modules could not be cast or moved.
# - The three exceptions: how a fake tensor says that an operation needs values; stages and traces report them by name.
# - unset_fake_temporarily: real tensors within a fake mode, for buffers and for recorded initial values.
# - detect_fake_mode: whether a call is such a trial run, which must leave no trace in buffers and reports.
# - CPU_ATTENTION, its backward, GROUPED_PRODUCT: operators for which torch has no count of operations, or no shape. Without
#   them costs leave out attention on the CPU and experts. Ring attention computes its blocks with the former two, and with
#   CUDA_ATTENTION and its backward: the public function does not return the logarithms by which blocks are merged.
# - TorchDispatchMode: sees every operation below autograd. Tracing, rematerialisation policies and peaks rest on it. torch
#   documents the class and keeps it in a private module.


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


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor is a FakeTensor. Collectives answer those from shapes alone."""
    return isinstance(tensor, FakeTensor)


def is_transformed(tensor: Tensor) -> bool:
    """Whether a tensor is one that a transform of ``torch.func`` has wrapped, whose values cannot be read."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def in_torch_func() -> bool:
    """Whether a transform of ``torch.func`` runs this code. Without it, steps would give it zeros, or fail in torch's words."""
    return torch._C._functorch.peek_interpreter_stack() is not None


@contextmanager
def grad_level() -> Iterator[int | None]:
    """A level of ``torch.func`` for one backward pass; None outside of its transforms, where autograd needs none.

    ``torch.func.grad`` is this, and gives zeros for inputs that are unused. Without it, optimizers could not skip those.
    """
    if not in_torch_func():
        yield None
        return
    with grad_increment_nesting() as level:
        yield level


def leaf_at_level(tensor: Tensor, level: int | None) -> Tensor:
    """A view to differentiate by at a level of ``grad_level``, which has the tensor's own graph below it."""
    leaf = tensor.view_as(tensor) if level is None else torch._C._functorch._wrap_for_grad(tensor, level)
    with enable_inplace_requires_grad(True):
        return leaf if leaf.requires_grad else leaf.requires_grad_()


def below_level(tensor: Tensor, level: int | None) -> Tensor:
    """What was computed at a level, as it is outside of it."""
    return tensor if level is None else torch._C._functorch._unwrap_for_grad(tensor, level)


def disable_dispatch_modes() -> AbstractContextManager[Any]:
    """Hides the block from active dispatch modes. Without it, recorders would take our copies of buffers for a model's."""
    return _disable_current_modes()


def disable_torch_function() -> AbstractContextManager[Any]:
    """Switches off function modes and ``__torch_function__`` within the block. Without it, a tracer would trace itself."""
    return torch._C.DisableTorchFunction()


def disable_torch_function_subclass() -> AbstractContextManager[Any]:
    """Switches off ``__torch_function__`` of subclasses within the block, so that a lazy leaf's metadata needs no gather."""
    return torch._C.DisableTorchFunctionSubclass()


def outside_functorch() -> AbstractContextManager[Any]:
    """Switches off torch.func's transforms within the block: a param that one meets first is fetched as outside of it."""
    return temporarily_clear_interpreter_stack()


def dispatch_modes() -> list[TorchDispatchMode]:
    """The modes that see this thread's operations. Without it, nothing says why torch.compile leaves a function as it is."""
    return _get_current_dispatch_mode_stack()


def in_dual_level() -> bool:
    """Whether ``torch.autograd.forward_ad.dual_level`` is open. Without it, gathers would be part of forward-mode passes."""
    return forward_ad._current_level >= 0


def held_elsewhere(held: list[Any]) -> list[bool]:
    """Which objects are referred to from outside this list. torch counts what C++ holds of a tensor as one reference more."""
    return [count > _ALONE for count in _references(held)]


def _references(held: list[Any]) -> list[int]:
    return [sys.getrefcount(held[place]) for place in range(len(held))]


_ALONE = _references([object()])[0]


def saved_tensors_hooks_in_force() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """The innermost ``saved_tensors_hooks`` of this thread, or None. torch applies them alone; ours must call them in turn."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return tuple(hooks) if hooks else None


def run_backward(outputs: Sequence[Any], seeds: Sequence[Tensor], leaves: Sequence[Tensor], *, keep_graph: bool) -> None:
    """``torch.autograd.backward(outputs, seeds, keep_graph, inputs=leaves)`` without its checks.

    The checks take as long as the backward pass of a small pipeline stage.
    """
    torch.autograd.Variable._execution_engine.run_backward(
        tuple(outputs), tuple(seeds), keep_graph, False, tuple(leaves), allow_unreachable=True, accumulate_grad=True
    )


def gradients(
    outputs: Sequence[Tensor], seeds: Sequence[Tensor], leaves: Sequence[Tensor], *, retain_graph: bool = False
) -> list[Tensor | None]:
    """``torch.autograd.grad(outputs, leaves, seeds, allow_unused=True)``, also by leaves with ``__torch_function__``.

    torch would hand the call to that of a lazy leaf, which stands for another tensor.
    """
    engine = torch.autograd.Variable._execution_engine
    found = engine.run_backward(
        tuple(outputs), tuple(seeds), retain_graph, False, tuple(leaves), allow_unreachable=True, accumulate_grad=False
    )
    return list(found)


def at_backward_end(work: Callable[[], None]) -> None:
    """Does ``work`` when the backward pass that this thread runs has ended, unless it fails.

    Without it, the end of a ``loss.backward()`` that a user calls would be unknown.
    """
    torch.autograd.Variable._execution_engine.queue_callback(work)


def backward_pass() -> int:
    """A number for the backward pass that this thread runs, -1 for none; one that it starts inside has another.

    Without it, operations of a backward pass inside a function would be taken for the function's own.
    """
    return torch._C._current_graph_task_id()


def storage_id(held: Tensor | torch.UntypedStorage) -> int:
    """A number for a tensor's storage, the same for all its views. A later storage may get it once this one is freed.

    Addresses will not do: fake and meta tensors and empty storages have none.
    """
    storage = held.untyped_storage() if isinstance(held, Tensor) else held
    return int(storage._cdata)


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to in place. Without it, changed values would be used for gradients without an error."""
    return tensor._version


def graph_number(tensor: Tensor) -> int:
    """How many nodes this thread had put into graphs when it made a tensor. Without it, only first graphs are looked at."""
    return -1 if tensor.grad_fn is None else tensor.grad_fn._sequence_nr()


def node_number() -> int | None:
    """The number of the node that this thread's backward pass runs, by the count of ``graph_number``; None outside of one.

    Without it, nothing would say which module an operation of the backward pass belongs to.
    """
    node: Any = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def mark_parameter(tensor: Tensor) -> None:
    """Makes ``isinstance(tensor, nn.Parameter)`` true. Without it, a loss that looks for parameters finds none."""
    tensor._is_param = True


def has_late_hooks(tensor: Tensor) -> bool:
    """Whether hooks wait for a leaf's ``.grad``. Without it, they would never run, and nothing would say so."""
    return bool(tensor._post_accumulate_grad_hooks)


def hooks_of_optimizer(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """What runs around an optimizer's ``step``. Without it, hooks of one that is read and never called would be dropped."""
    return [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]


def hooks_of(tensor: Tensor) -> list[Callable[..., Any]]:
    """A leaf's gradient hooks. Without it, those of a module's parameters would be dropped silently."""
    return [*(tensor._backward_hooks or {}).values(), *(tensor._post_accumulate_grad_hooks or {}).values()]


def schema_of(operator: Any) -> Any:
    """An operator's name, arguments and which of those it writes to (``torch.FunctionSchema``)."""
    return operator._schema


def quick_call_of(operator: Any) -> Callable[..., Any]:
    """What an ``OpOverload`` calls: the operator itself, without a function of Python around it."""
    return operator._op  # type: ignore[no-any-return]


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """A module's own parameters by name, as the module stores them: assignments replace parameters without registering."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """A module's own buffers by name, as the module stores them: assignments replace buffers without registering."""
    return module._buffers


def non_persistent_buffers_of(module: nn.Module) -> set[str]:
    """The names of a module's own buffers that its ``state_dict`` leaves out; a state has those only if they are written."""
    return module._non_persistent_buffers_set


def pytree_node_of(kind: type) -> tuple[Callable[[Any], tuple[Sequence[Any], Any]], Callable[[Any, Any], Any]] | None:
    """How torch's own pytrees take a class apart and put it together again; None if they do not know it.

    Without it, batches that other libraries have registered there (transformers' outputs, tensordict) would be leaves.
    """
    node = torch_pytree.SUPPORTED_NODES.get(kind)
    return None if node is None else (node.flatten_fn, node.unflatten_fn)


def refresh_flat_weights(rnn: nn.RNNBase) -> None:
    """Makes an RNN use its current parameters: it computes with a second list of them, which assignments to it refresh."""
    rnn._flat_weights = [getattr(rnn, name) for name in rnn._flat_weights_names]


def make_wrapper_subclass(
    cls: type[T], shape: Sequence[int], *, dtype: torch.dtype, device: torch.device, requires_grad: bool
) -> T:
    """A tensor of a subclass that has a shape and no memory: a lazy leaf of ZeRO-3, which is gathered at its first use."""
    made: T = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, requires_grad=requires_grad)
    return made


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


# -- for compiled functions --------------------------------------------------------------------------------------------------


def constant_when_compiled(function: F) -> F:
    """A function of constants that torch.compile calls while it traces, as ``torch.compiler.assume_constant_result`` says.

    That would import torch's compiler; without either, the draws of a ``Key`` could not be compiled.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
