"""Checks of a step's init, of params and that all ranks have the same step, and the guards of each call of a step."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from itertools import combinations
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.byte_ranges import overlapping
from functional_ds.base.marks import is_trainable, module_of
from functional_ds.comm.agreement.agree import Entry, differences
from functional_ds.comm.agreement.description import described

from .checks import Strategy, check_batch, check_state, refuse_inference, refuse_torch_func
from .over_ranks.mesh_axes import AxisRole
from .phases import Layer
from .state.state import State


def check_params(step: Strategy, params: Any) -> None:
    """Refuses params that are not a tree of tensors.

    Raises:
        TypeError: a leaf is not a tensor; ``params`` is a module.
        ValueError: two leaves have one path; two parameters of modules share memory, so that the step would untie them (other
            tensors are treated as values).
    """
    if isinstance(params, nn.Module):
        raise TypeError(
            f"params: this is the module {type(params).__name__}; write apply, params = fds.functional(module), let the loss "
            "call apply(params, ...), and pass params"
        )
    tree.tensors(params, "params")
    tree.check_paths(params, "params")
    named = [(path, leaf) for path, leaf in tree.named(params) if is_trainable(leaf)]
    trained = [(path, leaf) for path, leaf in named if isinstance(leaf, nn.Parameter) or module_of(leaf) is not None]
    for one, other in overlapping(trained):
        raise ValueError(
            f"params: the leaves at {one.name!r} and {other.name!r} share memory, and the step would train each alone. If they "
            "are tied, give one leaf alone, and use it twice in the loss; modules that share a part go into one module "
            "(nn.ModuleDict), of which fds.functional takes the parameters once. If not, clone one of them"
        )


def entries(step: Strategy) -> dict[str, Entry]:
    """What must be equal on all ranks of a step, by name.

    Loss and batch are not included: they may differ between ranks, as may the names of groups.

    >>> import functional_ds as fds
    >>> from functional_ds import transforms as T
    >>> step = fds.compose(T.accumulate(2), T.clip(1.0))(fds.train_step(lambda params, x: x.sum(), fds.sgd(0.1)))
    >>> print(entries(step)["transforms"])
    accumulate(2) -> clip(1.0)
    """
    groups = _groups(step)
    layers = [_of_layer(layer, groups) for layer in step.layers]
    return {
        "functional_ds": Entry(version("functional-ds")),
        "torch": Entry(torch.__version__.partition("+")[0]),
        **{name: Entry(str(value), described(value)) for name, value in step.options.items()},
        "buffers": Entry(repr(step.buffers)),
        "unused": Entry(repr("skip" if step.skips_unused else "zeros")),
        "transforms": Entry(" -> ".join(map(str, layers)) or "none", " ".join(layer.exact for layer in layers)),
    }


def _of_layer(layer: Layer, groups: Sequence[comm.Group]) -> Entry:
    if layer.options is None:
        return Entry(_without_names(layer.name, groups))
    name = layer.name.partition("(")[0]
    shown = (f"{option}={getattr(value, '__name__', None) or value}" for option, value in layer.options.items())
    return Entry(f"{name}({', '.join(shown)})", described(layer.options))


def _without_names(text: str, groups: Iterable[comm.Group]) -> str:
    """The text without the groups' names, which may differ between ranks along another axis."""
    for group in groups:
        text = re.sub(rf"{re.escape(repr(group.name))} of (?=\d)", "", text)
    return text


def _groups(step: Strategy) -> list[comm.Group]:
    """The groups of its transforms that contain this rank and others, each once, in the order of the transforms."""
    given = [axis.ranks() for layer in step.layers for axis in layer.axes]
    return list({group.ranks: group for group in given if group.size > 1 and group.rank >= 0}.values())


def check_same_leaves(params: Any, group: comm.Group) -> None:
    """Raises an error for params that differ between the ranks in more than their values.

    Raises:
        ValueError: on all ranks: paths, shapes, dtypes, or which leaves are trained.
    """
    shapes = [(path, tuple(leaf.shape), str(leaf.dtype), is_trainable(leaf)) for path, leaf in tree.named(params)]
    differ, mend = "other leaves, shapes, dtypes or frozen leaves", "build the same model on every rank"
    comm.agree(shapes, group, what="params", differ=differ, mend=mend)


def check_same_step(step: Strategy, *args: Any) -> None:
    """Refuses steps that differ among the ranks that train together: those of the groups of the transforms, along all axes.

    Cost: one all-reduce of 16 bytes a group, on its channel "control"; if they differ, also the texts.

    Raises:
        ValueError: on all ranks: names what differs, and on which ranks.
    """
    groups = _groups(step)
    if not groups:
        return
    mine = entries(step)
    text = differences(mine, groups, what=f"a step of {mine['optimizer']} with {mine['transforms']}")
    if text:
        raise ValueError(
            f"init: ranks that train together have different steps. {text}. Compose the same step on every rank, and choose "
            "by rank only what a batch or a loss is made of"
        )


def refuse_ranks_twice(step: Strategy, *args: Any) -> None:
    """Refuses two transforms that divide a batch over the same ranks, or that train one model and several on them.

    Raises:
        ValueError: their groups share more than this rank.
    """
    owned = [(layer.name, axis) for layer in step.layers for axis in layer.axes if axis.sums or axis.role is AxisRole.APART]
    for (one, first), (other, second) in combinations(owned, 2):
        shared = {*first.ranks().ranks} & {*second.ranks().ranks}
        if len(shared) > 1:
            raise ValueError(
                f"init: {one} and {other} both divide the ranks {sorted(shared)[:8]}; give each its own axis of a mesh, "
                "comm.mesh(outer=2, dp=...), or leave one of the two out"
            )


def refuse_unreduced(step: Strategy, state: State, grads: Sequence[Tensor]) -> None:
    """Refuses a norm, a product or sums by leaf of gradients that are not reduced yet.

    Raises:
        ValueError: they are those of each rank's rows.
    """
    for layer in step.layers:
        if state.reduced is False and any(axis.summed_in == "reduce" for axis in layer.axes):
            raise ValueError(
                f"{layer.name}: step.norm is asked within the phase gradients, where each rank has gradients of its rows "
                "alone; use reduced, grads = step.reduce(state, grads) first, and step.norm(reduced, grads.sum)"
            )


def refuse_parts(step: Strategy, state: State, batch: Any) -> None:
    """Refuses a function of all params on ranks that have other stages, or other positions of a sequence.

    Raises:
        ValueError: an axis has such ranks.
    """
    for layer in step.layers:
        for axis in layer.axes:
            if axis.role in (AxisRole.STAGES, AxisRole.SEQUENCE):
                raise ValueError(
                    f"step.run: the ranks of {layer.name} have parts of the model or of a sequence each, so none runs a "
                    "function of all params; use step.evaluate(state, batch), or the function of step.params(state)"
                )


def refuse_halves(step: Strategy, *args: Any) -> None:
    """Refuses to open a pass of a differentiable step, whose backward pass would keep no graph.

    Raises:
        ValueError: it is such a step.
    """
    if step.keeps_graph:
        raise ValueError("open: a differentiable step cannot be run as separate passes; call step(state, batch)")


Guard = Callable[..., None]

GUARDS: Mapping[str, tuple[Guard, ...]] = MappingProxyType(
    {  # checks before each call of a step; the guards of its transforms are with their phases
        "init": (refuse_inference, refuse_torch_func, check_params, refuse_ranks_twice, check_same_step),
        "step": (refuse_inference, refuse_torch_func, check_state, check_batch),
        "open": (refuse_inference, refuse_torch_func, refuse_halves, check_state, check_batch),
        "finish": (refuse_inference, check_state),
        "evaluate": (refuse_torch_func, check_state, check_batch),
        "params": (refuse_torch_func, check_state),
        "norm": (refuse_unreduced,),
        "run": (refuse_torch_func, check_state, refuse_parts),
    }
)
