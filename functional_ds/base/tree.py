"""Pytrees: thin wrappers of optree, in the library's namespace."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, dataclass_transform

import attrs
import optree
import optree.integrations.attrs
from torch import Tensor

__all__ = [
    "NAMESPACE",
    "as_written",
    "check_paths",
    "flatten",
    "has_rows",
    "is_leaf",
    "leaves",
    "map",
    "named",
    "on_meta",
    "record",
    "replace",
    "rows_of",
    "static",
    "structure",
    "summary",
    "tensors",
    "unflatten",
]

NAMESPACE = "functional_ds"  # optree's namespace of the library's records

_SUMMARY = 100  # characters of a field that a record prints

C = TypeVar("C", bound=type)
R = TypeVar("R")


class Uncompared:
    """A part of a pytree's structure in which two structures may differ: equal to every other of its class."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self))

    __hash__ = None  # type: ignore[assignment]


def replace(record: R, **changes: Any) -> R:
    """The record with some fields changed.

    >>> @record
    ... class Point:
    ...     x: int
    ...     y: int = 0
    >>> replace(Point(1), y=2)
    Point(x=1, y=2)
    """
    return attrs.evolve(record, **changes)  # type: ignore[misc]  # mypy does not see that ``record`` makes attrs classes


@contextmanager
def setting(owner: Any, **values: Any) -> Iterator[None]:
    """A context in which some attributes of an object have other values.

    >>> from types import SimpleNamespace
    >>> point = SimpleNamespace(x=1)
    >>> with setting(point, x=2):
    ...     point
    namespace(x=2)
    >>> point
    namespace(x=1)
    """
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def static(*, default: Any = attrs.NOTHING) -> Any:
    """A static field of a record: part of the pytree's structure, not a child.

    >>> @record
    ... class Point:
    ...     x: int
    ...     name: str = static(default="p")
    >>> leaves(Point(1)), structure(Point(1)) == structure(Point(1, "q"))
    ([1], False)
    """
    return optree.integrations.attrs.field(pytree_node=False, default=default)


@dataclass_transform(frozen_default=True, field_specifiers=(attrs.field, static))
def record(cls: C) -> C:
    """Makes a class a frozen attrs class and a pytree, whose fields are children, except those made by ``static``.

    It prints on one line, with dtypes and shapes instead of tensors.

    >>> @record
    ... class Point:
    ...     x: int
    ...     name: str = static(default="p")
    >>> map(lambda v: v + 1, Point(1))
    Point(x=2, name='p')
    """
    made = attrs.frozen(slots=False, field_transformer=_summarised)(cls)
    return optree.integrations.attrs.register_node(made, namespace=NAMESPACE)


def _summarised(cls: type, fields: list[Any]) -> list[Any]:
    return [field.evolve(repr=summary) if field.repr is True else field for field in fields]


def summary(value: Any) -> str:
    """A short text for a value, without the elements of its tensors.

    >>> summary(torch.ones(2, 3)), summary([torch.ones(2, 3), torch.ones(1)]), summary(0.5)
    ('float32[2, 3]', '<2 tensors, 7 elements>', '0.5')
    """
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (list, tuple, dict)):
        tensors = [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]
        if tensors:
            count = f"{len(tensors)} tensor{'s' * (len(tensors) > 1)}"
            return f"<{count}, {sum(leaf.numel() for leaf in tensors):,} elements>"
    text = repr(value)
    return text if len(text) <= _SUMMARY else f"{text[:_SUMMARY]}..."


def map(function: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Applies ``function`` to the leaves of one or several trees of the same structure (``jax.tree.map``).

    ``is_leaf`` says where not to look inside.

    >>> map(lambda x, y: x + y, {"a": 1, "b": [2]}, {"a": 10, "b": [20]})
    {'a': 11, 'b': [22]}
    """
    return optree.tree_map(function, tree, *rest, is_leaf=is_leaf, namespace=NAMESPACE)


def flatten(tree: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """The leaves and the structure of a tree.

    >>> found, spec = flatten({"a": 1, "b": (2, [3])})
    >>> found, unflatten(spec, [10, 20, 30])
    ([1, 2, 3], {'a': 10, 'b': (20, [30])})
    """
    return optree.tree_flatten(tree, namespace=NAMESPACE)


def unflatten(spec: optree.PyTreeSpec, leaves: Any) -> Any:
    """The inverse of ``flatten``.

    >>> unflatten(structure((1, [2])), "xy")
    ('x', ['y'])
    """
    return optree.tree_unflatten(spec, leaves)


def leaves(tree: Any) -> list[Any]:
    """The leaves, in order.

    >>> leaves({"a": 1, "b": (2, [3])})
    [1, 2, 3]
    """
    return optree.tree_leaves(tree, namespace=NAMESPACE)


def is_leaf(value: Any) -> bool:
    """Whether a value is a leaf.

    >>> is_leaf(1), is_leaf([1])
    (True, False)
    """
    return bool(optree.tree_is_leaf(value, namespace=NAMESPACE))


def structure(tree: Any) -> optree.PyTreeSpec:
    """The structure of a tree.

    >>> structure((1, [2])) == structure(("x", ["y"]))
    True
    """
    return optree.tree_structure(tree, namespace=NAMESPACE)


def named(tree: Any) -> list[tuple[str, Any]]:
    """The leaves with their paths, as in ``blocks.0.weight``.

    >>> named({"blocks": [{"weight": 1}, {"weight": 2}]})
    [('blocks.0.weight', 1), ('blocks.1.weight', 2)]
    """
    paths, values, _ = optree.tree_flatten_with_path(tree, namespace=NAMESPACE)
    return [(".".join(str(part) for part in path), leaf) for path, leaf in zip(paths, values, strict=True)]


def on_meta(tree: Any) -> bool:
    """Whether a leaf is a tensor on the device "meta", without values.

    >>> on_meta({"a": torch.ones(1), "b": torch.empty(1, device="meta")}), on_meta([1, torch.ones(1)])
    (True, False)
    """
    return any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves(tree))


def map_named(function: Callable[[str, Any], Any], tree: Any) -> Any:
    """Applies ``function`` to the path and the value of each leaf (``jax.tree.map_with_path``).

    >>> map_named(lambda path, x: f"{path}={x}", {"a": 1, "b": [2]})
    {'a': 'a=1', 'b': ['b.0=2']}
    """
    return unflatten(structure(tree), [function(path, leaf) for path, leaf in named(tree)])


def check_paths(tree: Any, what: str) -> None:
    """Checks that the leaves of a tree have different paths; ``what`` is the argument's name in the error.

    Raises:
        ValueError: two leaves have the same path; names the path and the keys of both.

    >>> check_paths({"a.b": 1, "a": {"b": 2}}, "params")
    Traceback (most recent call last):
        ...
    ValueError: params: the leaves at ['a']['b'] and ['a.b'] have one path, 'a.b', by which ...; rename one of the keys
    """
    seen: dict[str, tuple[Any, ...]] = {}
    for keys in optree.tree_paths(tree, namespace=NAMESPACE):
        path = ".".join(map(str, keys))
        other = seen.setdefault(path, keys)
        if other is not keys:
            first, second = ("".join(f"[{key!r}]" for key in path_keys) for path_keys in (other, keys))
            raise ValueError(
                f"{what}: the leaves at {first} and {second} have one path, {path!r}, by which units, optimizers and "
                "checkpoints name leaves; rename one of the keys"
            )


def as_written(tree: Any) -> list[str]:
    """The leaves' paths in the insertion order of dicts; flattening sorts their keys.

    >>> as_written({"b": 1, "a": 2}), [path for path, _ in named({"b": 1, "a": 2})]
    (['b', 'a'], ['a', 'b'])
    """
    with optree.dict_insertion_ordered(True, namespace=NAMESPACE):
        return [path for path, _ in named(tree)]


def tensors(tree: Any, what: str) -> list[Tensor]:
    """The leaves of a tree of tensors; raises TypeError for others. ``what`` is the argument's name in the error.

    >>> tensors({"w": torch.ones(1), "rate": 0.1}, "params")
    Traceback (most recent call last):
        ...
    TypeError: params: the leaf at 'rate' is float 0.1, not a tensor; wrap it in torch.tensor, or keep it out of the tree
    """
    for path, leaf in named(tree):
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"{what}: the leaf at {path or 'the top'!r} is {type(leaf).__name__} {leaf!r}, not a tensor; "
                "wrap it in torch.tensor, or keep it out of the tree"
            )
    return leaves(tree)


def rows_of(batch: Any) -> int:
    """The number of rows of a batch: the smallest among its leaves that is greater than 1, if any.

    >>> rows_of({"x": torch.ones(4, 2), "scale": torch.tensor(1.0), "mask": torch.ones(1, 2)})
    4
    """
    counts = [leaf.shape[0] for leaf in leaves(batch) if has_rows(leaf)]
    return min((count for count in counts if count > 1), default=min(counts, default=1))


def has_rows(leaf: Any) -> bool:
    """Whether a leaf of a batch is a tensor with at least one dim.

    >>> has_rows(torch.ones(2, 3)), has_rows(torch.tensor(1.0)), has_rows("text")
    (True, False, False)
    """
    return isinstance(leaf, Tensor) and leaf.dim() > 0
