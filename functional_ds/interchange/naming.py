"""Names and dtypes of leaves in a file."""

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from functional_ds.modules.functional import Apply
from functional_ds.step.state.buffers import BUFFERS, Buffers
from functional_ds.step.state.state import State

from .format import CODES, TensorSpec
from .gather_stream import LeafInfo

Rename = Callable[[str], str | None]


@attrs.frozen
class NamedLeaf:
    """A leaf and its tensors in a file.

    Attributes:
        leaf: the leaf.
        specs: one for each of its names; all get the leaf's values.
    """

    leaf: LeafInfo
    specs: tuple[TensorSpec, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype in the file."""
        return self.specs[0].dtype


@attrs.frozen(eq=False)
class Naming:
    """A module's own names.

    Attributes:
        ties: from each parameter's first name to all its names; a parameter that is not tied has one.
        dtypes: the parameters', under their first names.
        buffers: the current values of those that are in the module's ``state_dict``.
    """

    ties: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)
    dtypes: Mapping[str, torch.dtype] = attrs.field(factory=dict)
    buffers: Mapping[str, Tensor] = attrs.field(factory=dict)

    @staticmethod
    def of(module: nn.Module | Apply | None, state: Any = None) -> "Naming":
        """The names that ``module.state_dict()`` gives; a tied parameter has several.

        Args:
            module: the module, or its function.
            state: a step's state, whose buffers of the module are used.

        Raises:
            TypeError: neither a module nor an ``apply`` of ``fds.functional``.

        >>> tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
        >>> tied[1].weight = tied[0].weight
        >>> dict(Naming.of(tied).ties)
        {'0.weight': ('0.weight', '1.weight'), '0.bias': ('0.bias',)}
        """
        if module is None:
            return Naming()
        if not isinstance(module, nn.Module | Apply):
            raise TypeError(f"module={module!r} is neither an nn.Module nor the apply of fds.functional")
        skeleton = module.module if isinstance(module, Apply) else module
        held = state.slots.get(BUFFERS) if isinstance(state, State) else None
        values = held.of(module) if isinstance(held, Buffers) and isinstance(module, Apply) else {}
        names: dict[int, list[str]] = {}
        tensors = {name: x for name, x in skeleton.state_dict(keep_vars=True).items() if isinstance(x, Tensor)}
        for name, x in tensors.items():
            names.setdefault(id(x), []).append(name)
        params = {names[id(x)][0]: x for x in tensors.values() if isinstance(x, nn.Parameter)}
        buffers = {name: values.get(names[id(x)][0], x) for name, x in tensors.items() if not isinstance(x, nn.Parameter)}
        ties = {name: tuple(names[id(x)]) for name, x in params.items()}
        return Naming(ties, {name: x.dtype for name, x in params.items()}, buffers)

    def name(
        self, leaves: Iterable[LeafInfo], *, rename: Rename | None, dtype: torch.dtype | None, every: bool
    ) -> list[NamedLeaf]:
        """Each leaf with its names and dtype in the file, in the module's order.

        Args:
            leaves: the leaves.
            rename: from a leaf's path to its name; None leaves the leaf out.
            dtype: for floating leaves; None for the module's, or the leaf's own.
            every: whether a tied parameter is listed under each of its names, or only under its first.

        Raises:
            ValueError: the module has other parameters; two leaves get one name; the format does not have a dtype.
        """
        chosen = [(leaf, leaf.path if rename is None else rename(leaf.path)) for leaf in leaves]
        known = {name: leaf for leaf, name in chosen if name is not None}
        if self.ties:
            refuse_others(self.ties, known, argument="module", what="its parameters and the leaves have not the same names")
            order = {name: place for place, name in enumerate(self.ties)}
            chosen.sort(key=lambda pair: -1 if pair[1] is None else order[pair[1]])
        named = [(leaf, self._specs(leaf, name, dtype, every)) for leaf, name in chosen if name is not None]
        _check_names([spec for _, specs in named for spec in specs] + self.buffer_specs)
        return [NamedLeaf(leaf, specs) for leaf, specs in named]

    def _specs(self, leaf: LeafInfo, name: str, dtype: torch.dtype | None, every: bool) -> tuple[TensorSpec, ...]:
        kept = self.dtypes.get(name, leaf.dtype)
        cast = dtype if dtype is not None and leaf.dtype.is_floating_point else kept
        names = self.ties.get(name, (name,)) if every else (name,)
        return tuple(TensorSpec(alias, leaf.shape, cast) for alias in names)

    @property
    def buffer_specs(self) -> list[TensorSpec]:
        """The buffers' names, shapes and dtypes."""
        return [TensorSpec(name, tuple(x.shape), x.dtype) for name, x in self.buffers.items()]

    def metadata(self, *, every: bool) -> dict[str, str]:
        """The header's metadata: the framework, and which names are aliases of others."""
        aliases = {} if every else {alias: names[0] for names in self.ties.values() for alias in names[1:]}
        return {"format": "pt", **aliases}


def refuse_others(wanted: Collection[str], given: Collection[str], *, argument: str, what: str) -> None:
    """Raises ValueError unless the two have the same names.

    Args:
        wanted: the names that are needed.
        given: the names that there are.
        argument: which argument to name in the message.
        what: the message.
    """
    missing, extra = [n for n in wanted if n not in given], [n for n in given if n not in wanted]
    if missing or extra:
        raise ValueError(
            f"{argument}: {what}{listed('missing', missing, extra or given)}{listed('extra', extra, missing or wanted)}"
        )


def listed(word: str, names: Collection[str], others: Collection[str]) -> str:
    """Up to eight names for a message, each with the most similar of the others.

    Args:
        word: what they are, such as ``missing``.
        names: the names; no text for none.
        others: names to suggest.
    """
    if not names:
        return ""
    shown = [f"{name!r}{nearest(name, others)}" for name in sorted(names)[:8]]
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"; {word}: {', '.join(shown)}{more}"


def nearest(name: str, others: Collection[str]) -> str:
    """The most similar of the others, in brackets, for a message."""
    matches = difflib.get_close_matches(name, list(others), 1, 0.6)
    return f" (nearest: {matches[0]!r})" if matches else ""


def _check_names(specs: Collection[TensorSpec]) -> None:
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen or spec.name in ("", "__metadata__"):
            what = "nothing" if not spec.name else f"{spec.name!r}, which is taken"
            raise ValueError(f"a leaf is to be called {what}; rename= gives leaves other names")
        if spec.dtype not in CODES:
            raise ValueError(f"{spec.name!r} is {spec.dtype}, which safetensors files do not have; dtype= or rename= it away")
        seen.add(spec.name)


def checked_dtype(dtype: Any) -> torch.dtype | None:
    """The dtype, if it is None or a floating dtype of the format.

    Raises:
        ValueError: any other value.
    """
    if dtype is not None and (not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype not in CODES):
        raise ValueError(f"dtype={dtype!r}: floating leaves can be {', '.join(str(d) for d in CODES if d.is_floating_point)}")
    return dtype
