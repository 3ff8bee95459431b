"""A state as stretches of global tensors with names that no rank, mesh, stage or unit partition changes."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs
import optree
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.marks import like_marked
from functional_ds.base.tree import NAMESPACE
from functional_ds.optim.by_leaf import Routed
from functional_ds.sharding.leaf_map import LeafMap
from functional_ds.step.state import State

from .leaf_places import Frame, Places, of_runs

__all__ = ["Held", "as_before", "as_tensors", "dense", "describe"]

_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


@attrs.frozen(eq=False)
class Held:
    """A stretch of a global tensor, as this rank has it.

    Attributes:
        name: ``role/leaf`` where the tensor belongs to a leaf of the model, else a path in the state.
        shape: the global tensor's.
        offset: where the stretch begins in the flattened global tensor.
        view: its elements, flat, in the state's own memory.
        shared: whether ``view`` stands for several names: a scalar for each tensor, as Adam's counts are.
        apart: whether each rank has a value of its own, whatever the others' are.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    view: Tensor
    shared: bool = False
    apart: bool = False


def describe(state: State) -> list[Held]:
    """Everything in a state, all of whose leaves are tensors.

    A list in it whose tensors fit those that are stored, or those that are trained, holds for each leaf of the model what
    its place in the list says: so a new optimizer or transform needs no registration. A scalar in such a list counts for
    each leaf of its place. All else is one value, on all ranks alike, named by its path.

    Names leave out the numbers in a path (an optimizer's place in a chain or a route), as every leaf has its own; a second
    one of the same name gets ``#1``.

    >>> import functional_ds as fds
    >>> state = fds.train_step(lambda params, x: params["w"].sum(), fds.adamw(0.1)).init({"w": torch.ones(3)})
    >>> [held.name for held in describe(state)][:4]
    ['params/w', 'optimizer.steps/w', 'optimizer.exp_avg/w', 'optimizer.exp_avg_sq/w']
    """
    places = Places.of(state)
    walk = _Walk(places)
    walk.list(("params",), tree.leaves(state.params), places.stored)
    for name in ("optimizer", "step", "key", "slots", "skip"):
        walk.visit((name,), getattr(state, name), (places.stored, places.trained), places.parts)
    return walk.found


def as_tensors(state: State) -> State:
    """The state with its Python numbers as scalar tensors, and what lies on a disk in memory.

    Raises:
        TypeError: a leaf is neither a number nor a tensor, nor stands for one.
    """
    for path, leaf in tree.named(state):
        if not isinstance(leaf, Tensor) and type(leaf) not in _NUMBERS and not _is_elsewhere(leaf):
            raise TypeError(
                f"state: the leaf at {path!r} is {type(leaf).__name__} {leaf!r}; only tensors and numbers are saved"
            )
    return tree.map(_as_tensor, state)  # type: ignore[no-any-return]


def dense(state: State) -> State:
    """The state with new memory for tensors whose elements lie in another order, so that ``describe`` gives all in place."""
    return tree.map(lambda x: x if x.is_contiguous() else like_marked(x.contiguous(), x), state)  # type: ignore[no-any-return]


def as_before(leaf: Any, value: Tensor) -> Any:
    """A tensor as what stood in the place of ``leaf``: a tensor, a number, or values on the same disk."""
    if isinstance(leaf, Tensor):
        return value
    return leaf.written([value.reshape(-1)]) if _is_elsewhere(leaf) else type(leaf)(value.item())


def _as_tensor(leaf: Any) -> Tensor:
    if isinstance(leaf, Tensor):
        return leaf
    if _is_elsewhere(leaf):
        found: Tensor = leaf.read()
        return found.view(leaf.shape)
    return torch.tensor(leaf, dtype=_NUMBERS[type(leaf)])


def _is_elsewhere(leaf: Any) -> bool:
    """Whether it stands for a tensor whose values are in a file: it can read them, and write others."""
    return callable(getattr(leaf, "read", None)) and callable(getattr(leaf, "written", None))


@attrs.define(eq=False)
class _Walk:
    places: Places
    found: list[Held] = attrs.field(factory=list)
    seen: Counter[str] = attrs.field(factory=Counter)

    def visit(self, path: tuple[str, ...], node: Any, frames: Sequence[Frame], parts: LeafMap) -> None:
        """One node of the state and all below it."""
        if isinstance(node, Tensor):
            self.found.append(Held(".".join(path), tuple(node.shape), 0, node.detach().reshape(-1)))
        elif isinstance(node, comm.Residual):
            self.residual(path, node)
        elif isinstance(node, Routed):
            self.routed(path, node, parts)
        elif (known := self.match(node, frames)) is not None:
            self.list(path, *known)
        else:
            children, _, entries, _ = optree.tree_flatten_one_level(node, namespace=NAMESPACE)
            for entry, child in zip(entries, children, strict=True):
                self.visit((*path, str(entry)), child, frames, parts)

    def match(self, node: Any, frames: Sequence[Frame]) -> tuple[list[Any], Frame] | None:
        """The node's children with the frame that they fit."""
        if type(node) in (list, tuple):
            frame = next((frame for frame in frames if frame.fits(node)), None)
            return None if frame is None else (list(node), frame)
        if node is None or tree.structure(node) != self.places.spec or frames[0] is not self.places.stored:
            return None
        children = tree.leaves(node)
        return (children, frames[0]) if frames[0].fits(children) else None

    def list(self, path: tuple[str, ...], children: Sequence[Any], frame: Frame) -> None:
        """A list whose tensors hold leaves."""
        role = ".".join(part for part in path if not part.isdecimal())
        for child, place in zip(children, frame.places, strict=True):
            if child is None:
                continue
            names = {leaf: self.unique(role, self.places.name(frame.leaves[leaf][0])) for leaf in place.members}
            found = place.form_of(child)
            if found is None:
                self.found += [Held(names[leaf], (), 0, child.detach().view(1), shared=True) for leaf in place.members]
                continue
            form, lanes = found
            flat = child.detach().reshape(-1)
            for cut in form.cuts:
                shape = frame.leaves[cut.leaf][1] + ((2,) if lanes == 2 else ())
                view = flat[cut.start * lanes : (cut.start + cut.numel) * lanes]
                self.found.append(Held(names[cut.leaf], shape, cut.offset * lanes, view))

    def unique(self, role: str, leaf: str) -> str:
        """A name that this rank has not given yet, the same on all ranks that have the leaf."""
        name = f"{role}/{leaf}"
        self.seen[name] += 1
        again = self.seen[name] - 1
        return f"{role}#{again}/{leaf}" if again else name

    def routed(self, path: tuple[str, ...], node: Routed, parts: LeafMap) -> None:
        """Several optimizers, each with runs of the tensors for its leaves."""
        number = {leaf.path: index for index, leaf in enumerate(parts.leaves)}
        for rule, leaves, state in zip(node.rules, node.leaves, node.states, strict=True):
            runs, inner = parts.select(number[leaf] for leaf in leaves)
            self.visit((*path, str(rule)), state, (of_runs(inner, runs),), inner)

    def residual(self, path: tuple[str, ...], node: comm.Residual) -> None:
        """What this rank owes."""
        for where, leaf in tree.named(node):
            self.found.append(Held(f"{'.'.join(path)}.{where}", tuple(leaf.shape), 0, leaf.detach().reshape(-1), apart=True))
