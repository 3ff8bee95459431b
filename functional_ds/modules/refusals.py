"""Errors for unsupported modules and calls."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from functional_ds.base.marks import is_compiled, is_dtensor
from functional_ds.base.torch_private import hooks_of, is_fake

_OF_MODULES = ("_parameters", "_buffers", "_modules")


def check_module(module: nn.Module, params: Mapping[str, nn.Parameter]) -> None:
    """Raises an error for parameters and buffers without a shape, and for features that a copy would lose.

    These are hooks, subclasses, tables by ``id``, and parameters that the module does not give its optimizer.

    Raises:
        ValueError: the module has one.
    """
    for name, tensor in [*params.items(), *module.named_buffers()]:
        if is_lazy(tensor):
            raise ValueError(
                f"fds.functional: {name!r} has no shape yet, as its module is lazy; call the module once on an example before"
            )
    class_name = type(module).__name__
    for name, parameter in params.items():
        if type(parameter) is not nn.Parameter and not is_fake(parameter) and not is_dtensor(parameter):
            raise ValueError(
                f"fds.functional: the parameter {name!r} of {class_name} is a {type(parameter).__name__}, and a step has plain "
                "tensors in place of parameters, so what the class does would be lost: use nn.Parameter, and do "
                "that in forward or in torch.nn.utils.parametrize"
            )
    names = {id(parameter): name for name, parameter in params.items()}
    missing = names.keys() - {id(parameter) for _, parameter in module.named_parameters()}
    missing |= names.keys() - {id(parameter) for parameter in module.parameters()}
    for name in sorted(names[parameter_id] for parameter_id in missing if params[names[parameter_id]].requires_grad):
        raise ValueError(
            f"fds.functional: {class_name}.named_parameters() or parameters() leaves out {name!r}, so torch would not train "
            "it: set requires_grad=False on the parameter, which then stays as it is"
        )
    with_dict: dict[int, str] = {}
    for path, owner in module.named_modules():
        if (other := with_dict.setdefault(id(vars(owner)), path)) != path:
            raise ValueError(
                f"fds.functional: the modules {other or class_name!r} and {path!r} have one __dict__, and copies of them would "
                "have one each: put one module in both places, or share parameters and buffers one by one (b.weight = a.weight)"
            )
        for key, value in vars(owner).items():
            parameter_name = None if key in _OF_MODULES else _name_in_keys(value, names)
            if parameter_name is not None:
                raise ValueError(
                    f"fds.functional: the keys of {key!r} in {path or class_name} are parameters or their ids, here that of "
                    f"{parameter_name!r}; a step has other tensors in place of parameters: use their names as keys"
                )
    for name, parameter in params.items():
        if hooks_of(parameter):
            raise ValueError(
                f"fds.functional: the parameter {name!r} has a hook (register_hook, register_post_accumulate_grad_hook), which "
                "would not run: gradients are values of a step. Register the hook in forward on a view, w = weight.view_as("
                "weight); w.register_hook(hook), which torch.nn.utils.parametrize can do for any module; or change gradients "
                "in a transform: fds.wrap(..., reduce=...)"
            )


def refuse_compiled(module: nn.Module) -> None:
    """Raises an error for a module that ``torch.compile`` returned.

    Raises:
        TypeError: with what to do instead.
    """
    if is_compiled(module):
        raise TypeError(
            "fds.functional: the module is compiled by torch.compile, so its parameters would be named _orig_mod.*: pass the "
            "module itself, and compile blocks by T.compiled or the step by fds.jit"
        )


def _name_in_keys(value: Any, names: Mapping[int, str]) -> str | None:
    """The parameter that is, or whose id is, a key of a dict or an item of a set."""
    if not isinstance(value, (dict, set, frozenset)) or not isinstance(next(iter(value), None), (int, Tensor)):
        return None
    return next((names[at] for key in value if (at := key if isinstance(key, int) else id(key)) in names), None)


def refuse_flags(class_name: str, error: RuntimeError | None = None) -> None:
    """Raises an error for ``requires_grad_()`` of a parameter in forward; ``error`` is torch's, if there is one.

    Raises:
        RuntimeError: with what to do instead.
    """
    if error is None or "you can only change requires_grad flags of leaf variables" in str(error):
        raise RuntimeError(
            f"the module {class_name} changed requires_grad of a parameter in forward, and a step trains the same params "
            "throughout; use detached parameters there (torch.func.functional_call), or train the parts by steps of their own "
            "(fds.freeze)"
        ) from error


def refuse_placeholders(class_name: str, error: RuntimeError) -> None:
    """Raises an error for code that torch traces while params are lazy, as under ZeRO; ``error`` is the tracer's.

    Raises:
        RuntimeError: with what to do instead.
    """
    traced = ("torch.compile with fullgraph=True", "HigherOrderOperator")
    if type(error).__module__ == "torch._dynamo.exc" or any(words in str(error) for words in traced):
        raise RuntimeError(
            f"the module {class_name} has torch trace code (torch.cond, torch.compile with fullgraph=True) that uses params, "
            "which are placeholders under zero: choose by a Python if or torch.where, and compile with fullgraph=False"
        ) from error


def refuse_loading(class_name: str, error: RuntimeError) -> None:
    """Raises an error for ``load_state_dict`` in forward, which wraps the errors that it meets.

    Raises:
        RuntimeError: with what to do instead.
    """
    if "loading state_dict" in str(error) and "a forward pass may write only buffers" in str(error):
        raise RuntimeError(
            f"the module {class_name} calls load_state_dict in forward, which writes into its parameters, and a forward pass "
            "may write buffers alone: keep the copy in buffers (register_buffer), or load it between steps, into the params"
        ) from error


def check_elsewhere(class_name: str, names: Collection[str], assigned: Collection[str], rerun: Collection[str]) -> None:
    """Raises an error for calls after which a buffer would differ from what further references to it mean.

    Args:
        class_name: the module's class.
        names: the buffers to which something else in the module refers.
        assigned: those that the call has replaced.
        rerun: those that it has written and that a recomputation writes again.

    Raises:
        RuntimeError: there is one.
    """
    where = f"which something else in {class_name} refers to, too (an attribute, a list or a function)"
    for name in sorted({*names}.intersection(assigned)):
        raise RuntimeError(f"a call assigned its buffer {name!r}, {where}: write it in place, or refer to it by its name alone")
    refuse_reruns(class_name, "buffer", sorted({*names}.intersection(rerun)))


def refuse_reruns(class_name: str, what: str, written: Sequence[str]) -> None:
    """Raises an error for what a call has written, a recomputation writes again, and something else refers to, if any is."""
    for name in written:
        raise RuntimeError(
            f"a call under remat wrote its {what} {name!r}, which something else in {class_name} refers to, too (an attribute, "
            "a list or a function), where a recomputation cannot put its old value: refer to it by its name alone"
        )


def refuse_lost_writes(class_name: str, written: Collection[str], pickled: bool) -> None:
    """Raises an error for writes into buffers that the state does not have.

    Args:
        class_name: the module's class.
        written: the buffers.
        pickled: whether the state lacks them because it was pickled.

    Raises:
        RuntimeError: there is one.
    """
    for name in sorted(written):
        what = f"the module {class_name} wrote {name!r}, which would be lost, because the state "
        if pickled:
            raise RuntimeError(
                f"{what}was pickled, which parts it from its modules: use fds.save(state, folder) and fds.load(folder, "
                "like=step.init(params)), or carry its values over: fds.tree.unflatten(fds.tree.structure(step.init(params)), "
                "fds.tree.leaves(state))"
            )
        raise RuntimeError(
            f"{what}does not have its buffers: call step.init(params, modules=apply) with the apply that fds.functional gave "
            "for it, or apply.module.eval()"
        )
