"""Stages from a list of functions."""

import fnmatch
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import attrs
import optree

from functional_ds.base import tree
from functional_ds.base.prng import Key
from functional_ds.base.tree import NAMESPACE

from .stages import Params, Stage, Stages

__all__ = ["Piece", "called", "first_input", "stages"]


def _several(names: str | Iterable[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


@attrs.frozen
class Piece:
    """A stage's function, with what it shares with others.

    Attributes:
        function: ``function(params, x)``; parameters called ``batch`` and ``key`` are given, too.
        uses: what it gets of the params: a path (``"blocks.0"``: that subtree), a pattern (``"blocks.0.*"``: those leaves by
            path), a tuple of such (a tuple of theirs), or a function of the whole tree that picks a part. What several
            stages use, a tied weight say, gets the sum of their gradients. By default the stage's own entry of a list.
        keeps: names of values for later stages, or one name: the function then returns ``(y, {name: value})``.
        takes: names of what earlier stages kept, or one name: given as keyword arguments.
        name: for reports; by default the function's.
    """

    function: Callable[..., Any]
    uses: Any = None
    keeps: tuple[str, ...] = attrs.field(default=(), converter=_several)
    takes: tuple[str, ...] = attrs.field(default=(), converter=_several)
    name: str | None = None

    @staticmethod
    def of(function: Any) -> "Piece":
        """A plain function as a piece that shares nothing."""
        if isinstance(function, Piece):
            return function
        if not callable(function):
            raise TypeError(f"functions: {function!r} is no function of (params, x), and no Piece")
        return Piece(function)


def stages(
    functions: Sequence[Callable[..., Any] | Piece],
    params: Any,
    *,
    inputs: Callable[..., Any] | None = None,
    loss: Callable[..., Any] | None = None,
) -> Stages:
    """Stages from functions ``f(params, x) -> x``, each with its part of the params.

    A leaf that no stage uses is the first one's, so that it is stored.

    Args:
        functions: one for each stage; a ``Piece`` where a stage shares leaves, or keeps values for later ones.
        params: the whole tree; a list or tuple has an entry for each stage, unless pieces say what they use.
        inputs: ``inputs(batch)``, the first stage's x; by default the first entry of a tuple or list, else the batch.
        loss: ``loss(y, batch)`` of the last function's result; by default that function returns the loss.

    Raises:
        ValueError: params do not fit the functions; a piece uses what is not there, or takes what nobody keeps.

    >>> import torch
    >>> params = {"embed": torch.eye(3), "scale": torch.ones(3)}
    >>> tied = stages(
    ...     [
    ...         Piece(lambda table, ids: table[ids], uses="embed", name="embedding"),
    ...         Piece(lambda p, x: x * p[0] @ p[1].T, uses=("scale", "embed"), name="head"),
    ...     ],
    ...     params,
    ...     loss=lambda y, batch: torch.nn.functional.cross_entropy(y, batch[1]),
    ... )
    >>> print(tied)
    2 stages
    0: embedding: 1 leaves, 1 of them shared, 9 parameters
    1: head: 2 leaves, 1 of them shared, 12 parameters
    """
    pieces = [Piece.of(function) for function in functions]
    if not pieces:
        raise ValueError("functions is empty: there is at least one stage")
    sizes = {path: leaf.numel() for (path, _), leaf in zip(tree.named(params), tree.tensors(params, "params"), strict=True)}
    names = tree.unflatten(tree.structure(params), list(sizes))  # the tree with each leaf's path in its place
    chosen = [_chosen(names, piece, index, len(pieces)) for index, piece in enumerate(pieces)]
    paths = [tuple(dict.fromkeys(tree.leaves(part))) for part in chosen]
    used = {path for part in paths for path in part}
    paths[0] = (*paths[0], *(path for path in sizes if path not in used))
    alive = _alive(pieces)
    own = map(tree.flatten, chosen)
    runs = [_Run(piece, part, alive[i], alive[i + 1]) for i, (piece, part) in enumerate(zip(pieces, own, strict=True))]
    runs[0] = attrs.evolve(runs[0], inputs=inputs or first_input)
    runs[-1] = attrs.evolve(runs[-1], loss=loss)
    titles = [piece.name or getattr(piece.function, "__name__", f"stage {i}") for i, piece in enumerate(pieces)]
    return Stages(tuple(Stage(*each) for each in zip(paths, runs, titles, strict=True)), sizes)


@attrs.frozen
class _Run:
    """A stage's ``run``.

    Attributes:
        own: the paths of what the function gets of the params, and their tree.
        arriving, leaving: the kept values that come along with x, and that go on.
        inputs, loss: only the first and the last stage's.
    """

    piece: Piece
    own: tuple[list[str], optree.PyTreeSpec]
    arriving: tuple[str, ...]
    leaving: tuple[str, ...]
    inputs: Callable[..., Any] | None = None
    loss: Callable[..., Any] | None = None

    def __call__(self, params: Params, x: Any, batch: Any, key: Key | None) -> Any:
        kept: dict[str, Any] = {}
        if self.inputs is not None:
            x = called(self.inputs, batch, key=key)
        elif self.arriving:
            x, kept = x
        paths, spec = self.own
        own = tree.unflatten(spec, [params[path] for path in paths])
        y = called(self.piece.function, own, x, batch=batch, key=key, **{name: kept[name] for name in self.piece.takes})
        if self.piece.keeps:
            y, new = self._unpacked(y)
            kept = {**kept, **new}
        if self.loss is not None:
            return called(self.loss, y, batch, key=key)
        return (y, {name: kept[name] for name in self.leaving}) if self.leaving else y

    def _unpacked(self, y: Any) -> tuple[Any, Mapping[str, Any]]:
        wanted = set(self.piece.keeps)
        if isinstance(y, tuple) and len(y) == 2 and isinstance(y[1], Mapping) and y[1].keys() == wanted:
            return y
        found = f"{type(y).__name__}" if not isinstance(y, tuple) else f"{len(y)} values"
        raise ValueError(f"a stage that keeps {sorted(wanted)} returns (y, {{name: value}}) with just these names, not {found}")


def first_input(batch: Any) -> Any:
    """The first entry of a tuple or list, else the batch itself."""
    return batch[0] if isinstance(batch, (tuple, list)) else batch


def called(function: Callable[..., Any], *args: Any, **offered: Any) -> Any:
    """``function(*args)``, with what is offered under the names ``batch`` and ``key`` only if it has such parameters."""
    wanted = _wanted(function, len(args))
    return function(*args, **{name: value for name, value in offered.items() if name in wanted or name not in _OPTIONAL})


_OPTIONAL = ("batch", "key")


@lru_cache(maxsize=1024)  # looking at a signature takes longer than many a function
def _wanted(function: Callable[..., Any], given: int) -> frozenset[str]:
    """Which of the optional arguments a function has parameters for, behind those that are given by place."""
    try:
        return frozenset(list(inspect.signature(function).parameters)[given:]) & frozenset(_OPTIONAL)
    except (TypeError, ValueError):  # builtins have no signature
        return frozenset()


def _chosen(names: Any, piece: Piece, index: int, count: int) -> Any:
    """What a piece gets of the params, with paths for leaves."""
    if piece.uses is not None:
        return _used(names, piece.uses)
    if not isinstance(names, (list, tuple)) or len(names) != count:
        found = f"{len(names)} entries" if isinstance(names, (list, tuple)) else f"a {type(names).__name__}"
        raise ValueError(
            f"params: {found} for {count} functions; give a list with one entry for each, or say what each stage uses: "
            f"Piece(function, uses=...), as stage {index} does not"
        )
    return names[index]


def _used(names: Any, uses: Any) -> Any:
    if callable(uses):
        picked = uses(names)
        known = set(tree.leaves(names))
        for leaf in tree.leaves(picked):
            if not isinstance(leaf, str) or leaf not in known:
                raise ValueError(f"uses={uses!r} gives {leaf!r}; it has to pick leaves and subtrees, and change none")
        return picked
    if isinstance(uses, (tuple, list)):
        return tuple(_used(names, each) for each in uses)
    found = _subtree(names, uses)
    if found is None:
        found = {path: path for path in tree.leaves(names) if fnmatch.fnmatchcase(path, uses)} or None
    if found is None:
        raise ValueError(f"uses={uses!r} names nothing; the paths are {', '.join(tree.leaves(names))}")
    return found


def _subtree(names: Any, path: str) -> Any:
    """The subtree at a path; None where there is none."""
    if isinstance(names, str):
        return None
    children, _, entries, _ = optree.tree_flatten_one_level(names, namespace=NAMESPACE)
    for entry, child in zip(entries, children, strict=True):
        if str(entry) == path:
            return child
        if path.startswith(f"{entry}."):
            found = _subtree(child, path[len(f"{entry}.") :])
            if found is not None:
                return found
    return None


def _alive(pieces: Sequence[Piece]) -> list[tuple[str, ...]]:
    """The kept values that are under way in front of each stage, and behind the last."""
    keeper: dict[str, int] = {}
    until: dict[str, int] = {}
    for index, piece in enumerate(pieces):
        for name in piece.takes:
            if name not in keeper:
                raise ValueError(f"stage {index} takes {name!r}, which no stage before it keeps; they keep {sorted(keeper)}")
            until[name] = index
        for name in piece.keeps:
            if name in keeper:
                raise ValueError(f"stages {keeper[name]} and {index} both keep {name!r}; choose another name for one")
            keeper[name] = index
    if keeper.keys() != until.keys():
        raise ValueError(f"no later stage takes {sorted(keeper.keys() - until.keys())}, which a stage keeps")
    return [tuple(n for n in keeper if keeper[n] < index <= until[n]) for index in range(len(pieces) + 1)]
