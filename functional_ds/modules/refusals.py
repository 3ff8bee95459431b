"""What modules are refused for, beside memory that they share and weights that they write."""

from collections.abc import Collection, Mapping

from torch import nn
from torch.nn.parameter import is_lazy

from functional_ds.base.torch_private import hooks_of

__all__ = ["check_elsewhere", "check_module"]


def check_module(module: nn.Module, params: Mapping[str, nn.Parameter]) -> None:
    """Refuses parameters and buffers without a shape, and parameters with hooks, which would not run.

    Raises:
        ValueError: the module has one.
    """
    for name, tensor in [*params.items(), *module.named_buffers()]:
        if is_lazy(tensor):
            raise ValueError(
                f"fds.functional: {name!r} has no shape yet, as its module is lazy; call the module once on an example before"
            )
    for name, parameter in params.items():
        if hooks_of(parameter):
            raise ValueError(
                f"fds.functional: the parameter {name!r} has a hook (register_hook, register_post_accumulate_grad_hook), which "
                "would not run: gradients are values of a step. Register the hook in forward on a view, w = weight.view_as("
                "weight); w.register_hook(hook), which torch.nn.utils.parametrize can do for any module; or change gradients "
                "in a transform: fds.wrap(..., reduce=...)"
            )


def check_elsewhere(kind: str, names: Collection[str], assigned: Collection[str], rerun: Collection[str]) -> None:
    """Refuses calls after which a buffer would be another tensor than what further references to it mean.

    Args:
        kind: the module's class.
        names: the buffers that something else in the module refers to.
        assigned: those that the call has set anew.
        rerun: those that it has written and that a recomputation writes again.

    Raises:
        RuntimeError: there is one.
    """
    where = f"which something else in {kind} refers to, too (an attribute, a list or a function)"
    for name in sorted({*names}.intersection(assigned)):
        raise RuntimeError(f"a call assigned its buffer {name!r}, {where}: write it in place, or refer to it by its name alone")
    for name in sorted({*names}.intersection(rerun)):
        raise RuntimeError(
            f"a call under remat wrote its buffer {name!r}, {where}, where a recomputation cannot put its old value: refer "
            "to it by its name alone"
        )
