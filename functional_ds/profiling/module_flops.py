"""Floating-point operations by module, forward, backward and recomputed, without hooks on modules."""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import nn

from functional_ds.base.torch_private import graph_number, has_values, node_number
from functional_ds.dry_run.operations import OperationCounter, SizedOperation, tensors_in
from functional_ds.step.pass_scope import current_pass


@attrs.frozen
class Flops:
    """The floating-point operations of one step on one rank.

    Attributes:
        forward: of the forward pass.
        backward: of the backward pass, without recomputation.
        recomputed: of recomputed forward operations.
        others: of what follows the passes, such as an optimizer's matrix products.

    >>> step = Flops(forward=10, backward=20) + Flops(recomputed=10)
    >>> step.model, step.total
    (30, 40)
    """

    forward: int = 0
    backward: int = 0
    recomputed: int = 0
    others: int = 0

    @property
    def model(self) -> int:
        """The model's own: forward and backward."""
        return self.forward + self.backward

    @property
    def total(self) -> int:
        """All that the device computed."""
        return self.model + self.recomputed + self.others

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(*(a + b for a, b in zip(attrs.astuple(self), attrs.astuple(other), strict=True)))


class ModuleFlops(OperationCounter):
    """Counts operations by the path of the module that runs them; "" for code outside of ``fds.functional`` modules.

    In the backward pass an operation belongs to the module that ran when its node was made. If it records a graph there, or
    runs a module, it is recomputation.

    Attributes:
        by_path: of each module, without its submodules.
    """

    def __init__(self, stage: Callable[[], str]) -> None:
        super().__init__()
        self.by_path: dict[str, Flops] = {}
        self._stage = stage
        self._inside: list[tuple[str, bool]] = []  # the modules under way, and whether a backward pass runs them
        self._numbers: list[int] = [-1]  # of nodes, at which another module began or went on
        self._paths: list[str] = [""]

    def add(self, operation: SizedOperation, result: Any) -> None:
        """An operation ran and returned this; runs for shapes do not count."""
        if not operation.flops or not all(map(has_values, tensors_in(result))):
            return
        node, path = node_number(), self._inside[-1][0] if self._inside else ""
        if node is None:
            category = "forward" if self._stage() in ("forward", "backward", "passes") else "others"
        elif torch.is_grad_enabled() or (self._inside and self._inside[-1][1]):
            category = "recomputed"
        else:
            category, path = "backward", self._paths[bisect_right(self._numbers, node) - 1]
        before = self.by_path.get(path, Flops())
        self.by_path[path] = attrs.evolve(before, **{category: getattr(before, category) + operation.flops})

    # -- as ``Pass.calls`` ---------------------------------------------------------------------------------------------

    def around(self, phase: str, function: Callable[..., Any], *args: Any) -> Any:
        """Wraps a base phase of the step: ``forward`` runs with this on the module call stack."""
        pass_ = current_pass()
        if phase != "forward" or pass_ is None:
            return function(*args)
        with pass_.run_by(self, inside=(self,)):  # inside and outside of those that run modules otherwise
            return function(*args)

    def chosen(self, module: nn.Module) -> list[str]:
        """All modules inside."""
        return [path for path, _ in module.named_modules() if path]

    def run(self, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a module."""
        with self._within(path):
            return forward(*args, **kwargs)

    @contextmanager
    def _within(self, path: str) -> Iterator[None]:
        self._inside.append((path, node_number() is not None))
        self._note(path)
        try:
            yield
        finally:
            self._inside.pop()
            self._note(self._inside[-1][0] if self._inside else "")

    def _note(self, path: str) -> None:
        with torch.enable_grad():
            number = graph_number(torch.zeros((), requires_grad=True).view(()))
        self._numbers.append(max(number, self._numbers[-1]))
        self._paths.append(path)
