"""Plans of tensor parallelism: the words for how a layer is split, and which paths a plan's keys match."""

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from torch import nn


def _sizes(given: int | Sequence[int]) -> int | tuple[int, ...]:
    return given if isinstance(given, int) else tuple(given)


def _blocks(packed: "Packed", field: "attrs.Attribute[Any]", value: int | tuple[int, ...]) -> None:
    if min((value,) if isinstance(value, int) else value, default=0) < 1:
        raise ValueError(f"Packed({value!r}): there is at least one block, and blocks have at least one place each")


@attrs.frozen
class Packed:
    """Several projections packed in one weight, each of which is split, such as fused queries, keys and values.

    A rank's slice is its part of each block, in order, so that the model's own split works on it.

    Raises:
        ValueError: a size is less than 1, or there is none.

    Attributes:
        sizes: the blocks' sizes along the dim that is split; or the number of equal blocks.
        word: how the layer is split.

    >>> Packed([64, 32, 32])
    Packed(sizes=(64, 32, 32), word='colwise')
    """

    sizes: int | tuple[int, ...] = attrs.field(converter=_sizes, validator=_blocks)
    word: str = "colwise"

    def blocks(self, size: int) -> tuple[int, ...]:
        """The blocks of a dim of this size.

        Raises:
            ValueError: they do not add up to the size.
        """
        if isinstance(self.sizes, int):
            if size % self.sizes:
                raise ValueError(f"Packed({self.sizes}): {size} does not divide into {self.sizes} equal blocks")
            return (size // self.sizes,) * self.sizes
        if sum(self.sizes) != size:
            raise ValueError(f"Packed({list(self.sizes)}): the blocks are {sum(self.sizes)} long together, and the dim {size}")
        return self.sizes


Plan = Mapping[str, "str | int | Packed"]


@attrs.frozen
class Word:
    """The meaning of a plan's word.

    Attributes:
        cuts: "outputs" or "inputs" of a linear, "rows" or "features" of an embedding; "" for nothing.
        packed: the number of equal packed blocks.
        before: "copy" or "split": how the input becomes this rank's.
        after: "sum" or "gather": how the output becomes replicated; "" leaves it this rank's.
        summed: whether the gradients of replicated leaves are partial, and summed over the ranks.
    """

    cuts: str = ""
    packed: int = 0
    before: str = ""
    after: str = ""
    summed: bool = False


WHOLE = Word()

# Most are Hugging Face's (transformers/distributed/tensor_parallel.py); "vocab", "replicated" and "local" are ours.
WORDS: Mapping[str, Word] = {
    "colwise": Word("outputs", before="copy"),
    "colwise_gather_output": Word("outputs", before="copy", after="gather"),
    "colwise_rep": Word("outputs", before="copy", after="gather"),
    "packed_colwise": Word("outputs", packed=2, before="copy"),
    "rowwise": Word("inputs", after="sum"),
    "rowwise_split_input": Word("inputs", before="split", after="sum"),
    "rowwise_rep": Word("inputs", before="split", after="sum"),
    "packed_rowwise": Word("inputs", packed=2, after="sum"),
    "vocab": Word("rows", before="copy"),
    "embedding_rowwise": Word("rows", before="copy"),
    "embedding_colwise": Word("features", after="gather"),
    "replicated": Word(),
    "replicate": Word(),
    "local_params": Word(),
    "replicated_with_grad_allreduce": Word(summed=True),
    "sequence_parallel": Word(summed=True),
    "moe_tp_experts": Word(),
    "moe_identity_expert": Word(),
    "all_reduce": Word(),
    "mla_kv_a_proj": Word(),
    "local": Word(),
}


# Words for a whole leaf; others define how a module runs.
STAYS = frozenset({"replicated", "replicate", "local_params", "replicated_with_grad_allreduce"})


def word_of(value: str | Packed) -> Word:
    """The meaning of a plan's value.

    Raises:
        ValueError: the word is unknown.
    """
    name = value.word if isinstance(value, Packed) else value
    if name not in WORDS:
        raise ValueError(f"plan: {name!r} is not one of the words {', '.join(WORDS)}, a dim or an fds.tp.Packed")
    return WORDS[name]


def fits(pattern: str, path: str) -> bool:
    """Whether a key of a plan matches a path: its names match the path's last ones; each may be a pattern, ``*`` is any name.

    >>> fits("layers.*.q_proj", "model.layers.0.q_proj"), fits("layers.*", "model.layers.0.q_proj")
    (True, False)
    """
    wanted, parts = pattern.split("."), path.split(".")
    return len(wanted) <= len(parts) and all(map(fnmatch.fnmatchcase, parts[len(parts) - len(wanted) :], wanted))


def value_at(plan: Plan, path: str) -> str | Packed | None:
    """The plan's value for a path: that of the most specific key that matches; None if there is none.

    Of two keys the more specific one matches only some of the paths that the other matches. Dims and equal values do not
    conflict.

    Raises:
        ValueError: two keys differ, only one of them splits the path, and neither is more specific.

    >>> value_at({"up": "colwise", "experts.up": "replicated"}, "0.experts.up"), value_at({"up": "colwise"}, "up.bias")
    ('replicated', None)
    """
    known = {key: value for key, value in plan.items() if not isinstance(value, int) and path and fits(key, path)}
    exact = [key for key in known if not any(_within(other, key) for other in known)]
    first = next((key for key in exact if word_of(known[key]).cuts), exact[0] if exact else "")
    for other in exact:
        if not word_of(known[other]).cuts and known[other] != known[first]:
            raise ValueError(
                f"plan: {path!r} matches {first!r}: {known[first]!r} and {other!r}: {known[other]!r}, and neither key "
                f"is more specific: add one that is, {path!r}"
            )
    return known[first] if exact else None


def _within(key: str, other: str) -> bool:
    """Whether a key matches some of the paths that another matches, and not all of them."""
    names, wider = key.split("."), other.split(".")
    if key == other or len(names) < len(wider):
        return False
    return all(map(_refines, names[len(names) - len(wider) :], wider))


def _refines(name: str, wider: str) -> bool:
    return wider in (name, "*") or (not set(name) & set("*?[") and fnmatch.fnmatchcase(name, wider))


def plan_of(model: nn.Module) -> dict[str, str]:
    """A Hugging Face model's own plan, without entries for modules that this model does not have.

    Raises:
        ValueError: the model has none.

    >>> model = nn.Module()
    >>> model.up, model.down = nn.Linear(2, 4), nn.Linear(4, 2)
    >>> model.tp_plan = {"up": "colwise", "down": "rowwise", "gate": "colwise"}
    >>> plan_of(model)
    {'up': 'colwise', 'down': 'rowwise'}
    """
    plan: dict[str, str] = dict(getattr(model, "tp_plan", None) or {})
    base: Any = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    plan = plan or dict(base or {})
    if not plan:
        raise ValueError(f"plan_of: {type(model).__name__} has no tp_plan; write one: {{'q_proj': 'colwise', ...}}")
    known = {path for path, _ in (*model.named_modules(), *model.named_parameters(remove_duplicate=False))}

    def said_again(key: str) -> bool:
        longer = [other for other in plan if other.endswith(f".{key}") and plan[other] == plan[key]]
        return all(any(fits(other, path) for other in longer) for path in known if fits(key, path))

    return {key: word for key, word in plan.items() if any(fits(key, path) for path in known) and not said_again(key)}
