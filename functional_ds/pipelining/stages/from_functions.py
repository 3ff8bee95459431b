"""``stages``: makes pipeline stages from a list of functions."""

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


def _several(names: str | Iterable[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


@attrs.frozen(repr=False)
class Piece:
    """A stage's function, and what it shares with other stages.

    Attributes:
        function: ``function(params, x)``; it also gets ``batch`` and ``key`` if it has parameters of these names.
        uses: its part of the params: a path (``"blocks.0"``: that subtree), a pattern (``"blocks.0.*"``: a dict of leaves by
            path), a tuple of such (it gets a tuple), or a function of the whole tree that picks a part. A leaf that several
            stages use, such as a tied weight, gets the sum of their gradients. By default the stage's own entry of a list.
        keeps: names of values for later stages, or one name: the function then returns ``(y, {name: value})``.
        takes: names of values that earlier stages kept, or one name: passed as keyword arguments.
        name: for reports; by default the function's.

    >>> Piece(lambda p, x: x @ p, uses="embed", name="head")
    <Piece 'head', uses 'embed'>
    """

    function: Callable[..., Any]
    uses: Any = None
    keeps: tuple[str, ...] = attrs.field(default=(), converter=_several)
    takes: tuple[str, ...] = attrs.field(default=(), converter=_several)
    name: str | None = None

    def __repr__(self) -> str:
        title = self.name or getattr(self.function, "__name__", "?")
        given = [(name, getattr(self, name)) for name in ("uses", "keeps", "takes")]
        return f"<Piece {title!r}{''.join(f', {name} {value!r}' for name, value in given if value)}>"

    @staticmethod
    def of(function: Any) -> "Piece":
        """From a plain function, which shares nothing."""
        if isinstance(function, Piece):
            return function
        if not callable(function):
            raise TypeError(f"functions: {function!r} is neither a function of (params, x) nor a Piece")
        return Piece(function)


def stages(
    functions: Sequence[Callable[..., Any] | Piece],
    params: Any,
    *,
    inputs: Callable[..., Any] | None = None,
    loss: Callable[..., Any] | None = None,
) -> Stages:
    """Makes pipeline stages from functions ``f(params, x) -> x``, each with its part of the params.

    The first stage holds the leaves that no stage uses.

    Args:
        functions: one for each stage; a ``Piece`` if a stage shares leaves, or keeps values for later ones.
        params: the whole tree: a list or tuple with an entry for each stage, unless pieces have ``uses``.
        inputs: ``inputs(batch)``, the first stage's x; by default the first entry of a tuple or list, else the batch.
        loss: ``loss(y, batch)`` of the last function's result; by default that function returns the loss.

    Raises:
        ValueError: the params do not match the functions; a piece uses a path that the params do not have, or takes a value
            that no earlier piece keeps.

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
    names = tree.unflatten(tree.structure(params), list(sizes))  # the tree with paths for leaves
    chosen = [_chosen(names, piece, index, len(pieces)) for index, piece in enumerate(pieces)]
    paths = [tuple(dict.fromkeys(tree.leaves(part))) for part in chosen]
    used = {path for part in paths for path in part}
    paths[0] = (*paths[0], *(path for path in sizes if path not in used))
    kept = _kept_values(pieces)
    flattened = map(tree.flatten, chosen)
    runs = [
        _StageFunction(piece, part, kept[i], kept[i + 1]) for i, (piece, part) in enumerate(zip(pieces, flattened, strict=True))
    ]
    runs[0] = attrs.evolve(runs[0], inputs=inputs or first_input)
    runs[-1] = attrs.evolve(runs[-1], loss=loss)
    titles = [piece.name or getattr(piece.function, "__name__", f"stage {i}") for i, piece in enumerate(pieces)]
    return Stages(tuple(Stage(*fields) for fields in zip(paths, runs, titles, strict=True)), sizes)


@attrs.frozen
class _StageFunction:
    """A stage's ``run``.

    Attributes:
        piece: the stage's function.
        part: the function's part of the params: paths, and their structure.
        arriving, leaving: names of the kept values that are received with x, and sent with y.
        inputs: the first stage's.
        loss: the last stage's.
    """

    piece: Piece
    part: tuple[list[str], optree.PyTreeSpec]
    arriving: tuple[str, ...]
    leaving: tuple[str, ...]
    inputs: Callable[..., Any] | None = None
    loss: Callable[..., Any] | None = None

    @property
    def draws(self) -> bool:
        """Whether it may draw random numbers."""
        return takes_key(self.piece.function, self.inputs, self.loss)

    def __call__(self, params: Params, x: Any, batch: Any, key: Key | None) -> Any:
        kept: dict[str, Any] = {}
        if self.inputs is not None:
            x = call_with(self.inputs, batch, key=key)
        elif self.arriving:
            x, kept = x
        paths, spec = self.part
        piece_params = tree.unflatten(spec, [params[path] for path in paths])
        y = call_with(
            self.piece.function, piece_params, x, batch=batch, key=key, **{name: kept[name] for name in self.piece.takes}
        )
        if self.piece.keeps:
            y, new = self._unpacked(y)
            kept = {**kept, **new}
        if self.loss is not None:
            return call_with(self.loss, y, batch, key=key)
        return (y, {name: kept[name] for name in self.leaving}) if self.leaving else y

    def _unpacked(self, y: Any) -> tuple[Any, Mapping[str, Any]]:
        wanted = set(self.piece.keeps)
        if isinstance(y, tuple) and len(y) == 2 and isinstance(y[1], Mapping) and y[1].keys() == wanted:
            return y
        returned = f"{type(y).__name__}" if not isinstance(y, tuple) else f"{len(y)} values"
        raise ValueError(
            f"a stage that keeps {sorted(wanted)} returns (y, {{name: value}}) with just these names, not {returned}"
        )


def first_input(batch: Any) -> Any:
    """The first entry of a tuple or list, else the batch itself."""
    return batch[0] if isinstance(batch, (tuple, list)) else batch


def call_with(function: Callable[..., Any], *args: Any, **offered: Any) -> Any:
    """``function(*args, **offered)``, without ``batch`` and ``key`` if the function has no such parameter."""
    wanted = _wanted(function, len(args))
    return function(*args, **{name: value for name, value in offered.items() if name in wanted or name not in _OPTIONAL})


def takes_key(*functions: Callable[..., Any] | None) -> bool:
    """Whether one of the functions has a parameter ``key``, for random draws."""
    return any(function is not None and "key" in _wanted(function, 0) for function in functions)


_OPTIONAL = ("batch", "key")


@lru_cache(maxsize=1024)  # reading a signature can take longer than the function
def _wanted(function: Callable[..., Any], given: int) -> frozenset[str]:
    """Which of the optional arguments a function has parameters for, after the ``given`` positional ones."""
    try:
        return frozenset(list(inspect.signature(function).parameters)[given:]) & frozenset(_OPTIONAL)
    except (TypeError, ValueError):  # builtins have no signature
        return frozenset()


def _chosen(names: Any, piece: Piece, index: int, count: int) -> Any:
    """A piece's part of the params, with paths for leaves."""
    if piece.uses is not None:
        return _used(names, piece.uses)
    if not isinstance(names, (list, tuple)) or len(names) != count:
        given = f"{len(names)} entries" if isinstance(names, (list, tuple)) else f"a {type(names).__name__}"
        raise ValueError(
            f"params: {given} for {count} functions; give a list with one entry for each, or name what each stage uses: "
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
        return tuple(_used(names, use) for use in uses)
    subtree = _subtree(names, uses)
    if subtree is None:
        subtree = {path: path for path in tree.leaves(names) if fnmatch.fnmatchcase(path, uses)} or None
    if subtree is None:
        raise ValueError(f"uses={uses!r} names nothing; the paths are {', '.join(tree.leaves(names))}")
    return subtree


def _subtree(names: Any, path: str) -> Any:
    """The subtree at a path; None where there is none."""
    if isinstance(names, str):
        return None
    children, _, entries, _ = optree.tree_flatten_one_level(names, namespace=NAMESPACE)
    for entry, child in zip(entries, children, strict=True):
        if str(entry) == path:
            return child
        if path.startswith(f"{entry}."):
            subtree = _subtree(child, path[len(f"{entry}.") :])
            if subtree is not None:
                return subtree
    return None


def _kept_values(pieces: Sequence[Piece]) -> list[tuple[str, ...]]:
    """The names of the kept values that are sent along before each stage, and after the last."""
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
