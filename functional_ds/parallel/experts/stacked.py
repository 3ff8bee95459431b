"""Stacks a list of expert modules into leaves with an expert dim, which can be split over ranks."""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from functional_ds.base import tree
from functional_ds.base.torch_private import has_values

from .grouped import RowGroups, even_rows
from .token_exchange import ExpertFunction

_EACH = "each"  # replaces the expert's number in paths of stacked leaves


def each_expert(f: Callable[[Any, Tensor], Tensor], stacked: Any) -> ExpertFunction:
    """An expert function that calls ``f`` for each local expert, with the expert's leaves and rows.

    For experts other than ``gated_mlp`` and ``mlp``, which compute all experts in one product. The host waits for the numbers
    of rows, as ``exchange`` over ranks does anyway. An expert without rows is called with [0, M].

    Args:
        f: from an expert's tree and rows [R, M] to [R, M'].
        stacked: a tree of leaves [experts, ...].

    >>> run = each_expert(lambda p, rows: rows * p["scale"], {"scale": torch.tensor([1.0, 10.0])})
    >>> run(torch.ones(3, 1), RowGroups.of([1, 2])).tolist()
    [[1.0], [10.0], [10.0]]
    """

    def run(rows: Tensor, groups: RowGroups) -> Tensor:
        for path, leaf in tree.named(stacked):
            if not leaf.dim() or len(leaf) != groups.size:
                raise ValueError(
                    f"stacked: the leaf at {path!r} has shape {list(leaf.shape)}, and the rows come in {groups.size} groups, "
                    "one for each local expert: [experts, ...] is needed, with the experts of this rank only"
                )
        counts = groups.read() if has_values(rows) else even_rows(len(rows), groups.size)
        leaves, spec = tree.flatten(stacked)
        experts = zip(*(leaf.unbind() for leaf in leaves), strict=True)
        pieces = zip(experts, rows.split(counts), strict=True)
        return torch.cat([f(tree.unflatten(spec, list(expert)), piece) for expert, piece in pieces])

    return run


class StackedExperts(nn.Module):
    """A list of modules as an expert function for ``exchange``: each parameter once, with all experts along dim 0.

    Law: for ``x`` and a routing, ``exchange(StackedExperts(experts), x, routing=routing)`` is the sum over the list's modules;
    on one device each module gets the same rows in the same order. ``T.experts`` splits its parameters like any stack, and
    checkpoints can be loaded with any number of ranks. The parameter ``e.weight`` of each expert becomes ``each.e.weight``;
    ``unstacked`` restores the list's names.

    Args:
        experts: modules of one class and equal shapes, whose values are copied.

    Raises:
        ValueError: there are none, they differ, or they have buffers.

    >>> stack = StackedExperts(nn.Linear(2, 3) for _ in range(4))
    >>> [(name, list(leaf.shape)) for name, leaf in stack.named_parameters()]
    [('each.weight', [4, 3, 2]), ('each.bias', [4, 3])]
    """

    def __init__(self, experts: Iterable[nn.Module]) -> None:
        super().__init__()
        modules = list(experts)
        if not modules:
            raise ValueError("experts: there is none")
        first = {name: (x.shape, x.dtype, x.requires_grad) for name, x in modules[0].named_parameters()}
        for index, module in enumerate(modules):
            params = {name: (x.shape, x.dtype, x.requires_grad) for name, x in module.named_parameters()}
            if type(module) is not type(modules[0]) or params != first:
                raise ValueError(
                    f"experts: {index} is a {type(module).__name__} with {_listed(params)}, and 0 a "
                    f"{type(modules[0]).__name__} with {_listed(first)}; all must be alike"
                )
            if next(module.buffers(), None) is not None:
                raise ValueError(
                    f"experts: {index} has buffers, which are not part of a stack; make them parameters or numbers"
                )
        self.each = deepcopy(modules[0])
        for name, (_, _, trained) in first.items():
            path, _, key = name.rpartition(".")
            values = torch.stack([module.get_parameter(name).detach() for module in modules])
            setattr(self.each.get_submodule(path), key, nn.Parameter(values, requires_grad=trained))

    def forward(self, rows: Tensor, groups: RowGroups) -> Tensor:
        """Each local expert's module on its rows."""

        def run(params: dict[str, Tensor], piece: Tensor) -> Tensor:
            return torch.func.functional_call(self.each, params, (piece,))  # type: ignore[no-any-return]

        return each_expert(run, dict(self.each.named_parameters()))(rows, groups)


def _listed(params: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {list(shape)} {dtype}" for name, (shape, dtype, _) in params.items())


def unstacked(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The leaves of a model with ``StackedExperts`` under the list's names, as views: ``experts.0.up.weight``, and so on.

    Args:
        params: by path, such as ``step.params(state)``.

    >>> found = unstacked({"gate.weight": torch.ones(2, 4), "experts.each.up.weight": torch.ones(2, 3, 4)})
    >>> [(name, list(leaf.shape)) for name, leaf in found.items()]
    [('gate.weight', [2, 4]), ('experts.0.up.weight', [3, 4]), ('experts.1.up.weight', [3, 4])]
    """
    leaves: dict[str, Tensor] = {}
    for path, leaf in params.items():
        parts = path.split(".")
        if _EACH not in parts:
            leaves[path] = leaf
            continue
        at = parts.index(_EACH)
        for expert, expert_leaf in enumerate(leaf):
            leaves[".".join([*parts[:at], str(expert), *parts[at + 1 :]])] = expert_leaf
    return leaves
