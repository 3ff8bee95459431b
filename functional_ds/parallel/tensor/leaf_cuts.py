"""Applies a tensor-parallel plan to a tree of params: which slice of each leaf every rank holds."""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
from torch import Tensor, nn

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.marks import module_of
from functional_ds.modules.module_places import parted
from functional_ds.sharding.leaf_slice import LeafSlice
from functional_ds.sharding.path_patterns import nearest

from .words import STAYS, WHOLE, Packed, Plan, fits, value_at, word_of


@attrs.frozen
class Cuts:
    """The slices that a plan defines for a tree's leaves.

    Attributes:
        slices: by the leaf's path.
        summed: paths of replicated leaves whose gradients are partial.
        by_word: those that a word for the leaf names; others are in ``"sequence_parallel"`` layers, whose tokens are split.
        in_modules: paths of the slices that modules use, whose calls this transform must intercept.
    """

    slices: Mapping[str, LeafSlice]
    summed: frozenset[str]
    by_word: frozenset[str]
    in_modules: frozenset[str]


@attrs.frozen
class _LeafPlace:
    """A leaf's place in a module; a tied leaf has several."""

    module: nn.Module | None
    path: str
    owner: str
    key: str


def cuts_of(params: Any, plan: Plan, group: comm.Group) -> Cuts:
    """Which slices of the leaves this rank holds.

    Args:
        params: the user's tree, with whole leaves.
        plan: by path.
        group: the ranks.

    Raises:
        ValueError: a word is unknown; a key matches nothing; two match a leaf; a layer's param has another word than the layer;
            a size is not divisible by the ranks; the params of a GroupNorm are cut, and its groups are not.
    """
    slices: dict[str, LeafSlice] = {}
    summed, by_word, worded, used = set(), set(), set(), set()
    places = {path: _places(path, leaf) for path, leaf in tree.named(params)}
    for path, leaf in tree.named(params):
        cuts: dict[str, LeafSlice] = {}
        for key, at in _dims(plan, path):
            used.add(key)
            cuts[key] = _even(path, leaf, at, [_size(path, leaf, at)], group)
        for place in places[path]:
            used.update(key for key, _ in _claims(plan, place))
            value = _ruling(plan, place)
            if _in_cut_sequences(plan, place):
                summed.add(path)
            elif _is_summed(plan, place, value):
                by_word.add(path)
            dim = _dim(value, leaf, place)
            if _is_layer(_owner(place)) and dim != _dim(value_at(plan, place.owner), leaf, place):
                raise ValueError(_other_word(plan, place))
            if value is not None and dim is not None:
                cuts[place.path] = _slice(place, leaf, dim, value, group)
                worded.add(path)
        if len({(cut.dim, cut.ranges_by_rank) for cut in cuts.values()}) > 1 or _twice(plan, path, places[path]):
            raise ValueError(_conflict(plan, path, places[path]))
        if cuts:
            slices[path] = next(iter(cuts.values()))
    everywhere = [place for leaf_places in places.values() for place in leaf_places]
    _check_used(plan, used, everywhere, group.size)
    _check_groups(plan, [place for path in slices for place in places[path]], group)
    whole = (place for path, leaf in tree.named(params) if leaf.dim() > 1 and path not in slices for place in places[path])
    _check_tokenwise(plan, everywhere, whole)
    in_modules = frozenset(path for path in worded if places[path][0].module is not None)
    summed, by_word = summed - slices.keys(), by_word - slices.keys()
    return Cuts(slices, frozenset(summed | by_word), frozenset(by_word - summed), in_modules)


def _places(path: str, leaf: Tensor) -> list[_LeafPlace]:
    known = module_of(leaf)
    if known is None:
        return [_LeafPlace(None, path, *parted(path))]
    apply, name = known
    module: nn.Module = apply.module
    every = dict(module.named_parameters(remove_duplicate=False))
    return [_LeafPlace(module, alias, *parted(alias)) for alias, parameter in every.items() if parameter is every[name]]


def _dims(plan: Plan, path: str) -> Iterator[tuple[str, int]]:
    """The regular expressions that match, with their dims."""
    yield from ((key, dim) for key, dim in plan.items() if isinstance(dim, int) and re.search(key, path))


def _claims(plan: Plan, place: _LeafPlace) -> Iterator[tuple[str, str | Packed]]:
    """The keys that match this place: its module, the leaf itself, or, for keys of everything below a module, one above it."""
    for key, value in plan.items():
        if isinstance(value, int):
            continue
        above = _above(place.owner) if word_of(value).summed else []
        if any(fits(key, path) for path in (place.path, *filter(None, [place.owner]), *above)):
            yield key, value


def _ruling(plan: Plan, place: _LeafPlace) -> str | Packed | None:
    """The plan's value for a leaf: from the most specific key for the leaf itself, else from that for its module."""
    value = _own_word(plan, place)
    return value_at(plan, place.owner) if value is None else value


def _own_word(plan: Plan, place: _LeafPlace) -> str | Packed | None:
    """The plan's value for the leaf itself; a key such as ``*`` that also matches the module belongs to the module."""
    return value_at({key: value for key, value in plan.items() if not fits(key, place.owner)}, place.path)


def _in_cut_sequences(plan: Plan, place: _LeafPlace) -> bool:
    return any(value_at(plan, owner) == "sequence_parallel" for owner in (*_above(place.owner), place.owner))


def _is_summed(plan: Plan, place: _LeafPlace, value: str | Packed | None) -> bool:
    """Whether the nearest word makes gradients of a whole leaf partial."""
    above = [value_at(plan, owner) for owner in (*_above(place.owner), place.owner)]
    nearest = value if value is not None and (word_of(value).cuts or value in STAYS) else None
    nearest = nearest or next((word for word in reversed(above) if word in STAYS), None)
    return nearest is not None and word_of(nearest).summed


def _above(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _twice(plan: Plan, path: str, places: Sequence[_LeafPlace]) -> bool:
    """Whether two keys slice the leaf at one place, or both a word and a regular expression apply to it."""
    regexes = len(list(_dims(plan, path)))
    words = [sum(bool(word_of(value).cuts) for _, value in _claims(plan, place)) for place in places]
    stays = regexes > 0 and any(_ruling(plan, place) in STAYS for place in places)
    return regexes + max(words) > 1 or stays


def _conflict(plan: Plan, path: str, places: Sequence[_LeafPlace]) -> str:
    expressions = [f"{path!r} by {key!r}: {dim}" for key, dim in _dims(plan, path)]
    for place in places:
        words = [(key, value) for key, value in _claims(plan, place) if word_of(value).cuts or value in STAYS]
        expressions += [f"{place.path!r} by {key!r}: {value!r}" for key, value in words]
    tied = f"; one leaf, tied, is in {len(places)} places, and the plan's words for them must split it alike"
    ways = f"{', '.join(expressions)}; let one match{tied if len(places) > 1 else ''}"
    return f"plan: two expressions split {path!r} in different ways: {ways}"


def _other_word(plan: Plan, place: _LeafPlace) -> str:
    layer, layer_word = type(_owner(place)).__name__, value_at(plan, place.owner)
    return (
        f"plan: {place.path!r} is {_own_word(plan, place)!r}, and its {layer} {place.owner!r} "
        f"{'has no word' if layer_word is None else f'is {layer_word!r}'}: a layer runs as its word says, which splits its "
        f"params too; give the layer the word, {{{place.owner!r}: ...}}, and its params none"
    )


def _is_layer(module: nn.Module | None) -> bool:
    """Whether it is a layer that runs differently if it is sliced."""
    return isinstance(module, (nn.Linear, nn.Embedding)) or is_transposed(module)


def _size(path: str, leaf: Tensor, dim: int) -> int:
    if not -leaf.dim() <= dim < leaf.dim():
        raise ValueError(f"plan: {path!r} of shape {list(leaf.shape)} has no dim {dim}: it cannot be split along dim {dim}")
    return leaf.shape[dim]


def _dim(value: str | Packed | None, leaf: Tensor, place: _LeafPlace) -> int | None:
    """The dim of a leaf that a plan's value slices; None if the leaf stays whole."""
    word = WHOLE if value is None else word_of(value)
    if not word.cuts:
        return None
    turned = is_transposed(_owner(place))
    if leaf.dim() < 2:
        whole = word.cuts in ("inputs", "features") or not leaf.dim()
        return None if whole else 0
    outputs = leaf.dim() - 1 if turned else leaf.dim() - 2
    inputs = leaf.dim() - 2 if turned else leaf.dim() - 1
    return {"outputs": outputs, "inputs": inputs, "rows": outputs, "features": inputs}[word.cuts]


def _slice(place: _LeafPlace, leaf: Tensor, dim: int, value: str | Packed, group: comm.Group) -> LeafSlice:
    """This rank's slice; whole heads if the layer is part of an attention."""
    packed = value if isinstance(value, Packed) else Packed(word_of(value).packed or 1)
    sizes = packed.blocks(leaf.shape[dim])
    owner, outputs = _owner(place), word_of(value).cuts in ("outputs", "inputs")
    width = size_of_heads(_attention(place)) if outputs else None
    if width is None or any(size % width for size in sizes):
        return _even(place.path, leaf, dim, sizes, group)
    counts = [size // width for size in sizes]
    if any(count % group.size for count in counts):
        shared = len(counts) == 1 and owner is not None and _is_kv(place, counts[0]) and group.size % counts[0] == 0
        if not shared:
            raise ValueError(
                f"plan: {place.path!r}: {' + '.join(map(str, counts))} heads of {width} along dim {dim} of shape "
                f"{list(leaf.shape)} do not divide by the {group.size} ranks of {group.name!r}; take as many "
                "ranks as divide them (of key-value heads also a multiple), or leave this attention's layers out of the plan"
            )
        return LeafSlice.heads(dim, counts[0], width, group.size, group.rank)
    return LeafSlice.even(dim, sizes, group.size, group.rank)


def _even(path: str, leaf: Tensor, dim: int, sizes: Sequence[int], group: comm.Group) -> LeafSlice:
    if any(size % group.size for size in sizes):
        blocks = f" in blocks of {list(sizes)}" if len(sizes) > 1 else ""
        raise ValueError(
            f"plan: {path!r} of shape {list(leaf.shape)}{blocks} does not divide along dim {dim} by the {group.size} ranks of "
            f"{group.name!r}"
        )
    return LeafSlice.even(dim % leaf.dim(), sizes, group.size, group.rank)


def _owner(place: _LeafPlace) -> nn.Module | None:
    return None if place.module is None else place.module.get_submodule(place.owner)


def is_transposed(module: nn.Module | None) -> bool:
    """Whether a layer's weight is [inputs, outputs], as that of Hugging Face's ``Conv1D``."""
    return isinstance(getattr(module, "nf", None), int) and isinstance(getattr(module, "nx", None), int)


# -- heads --------------------------------------------------------------------------------------------------------------


def _attention(place: _LeafPlace) -> nn.Module | None:
    """The module that contains the layer, or a wrapper of it such as LoRA's."""
    above = parted(place.owner)[0]
    if place.module is None or not place.owner:
        return None
    modules = [place.module.get_submodule(path) for path in (above, parted(above)[0])]
    return next((module for module in modules if size_of_heads(module)), modules[0])


def size_of_heads(attention: nn.Module | None) -> int | None:
    """The size of an attention's heads, if it has one."""
    sizes = [getattr(attention, name, None) for name in ("head_dim", "head_size")]
    return next((size for size in sizes if isinstance(size, int) and size > 0), None)


def _is_kv(place: _LeafPlace, count: int) -> bool:
    attention = _attention(place)
    groups = None if attention is None else kv_groups(attention)
    return attention is not None and groups is not None and count == heads_of(attention) // groups


def kv_groups(attention: nn.Module) -> int | None:
    """How many query heads share a key-value head."""
    groups = getattr(attention, "num_key_value_groups", None)
    return groups if isinstance(groups, int) and groups > 1 else None


def heads_of(attention: nn.Module) -> int:
    """The query heads of an attention, from its configuration, else from its linears; 0 if unknown.

    Linears of queries and keys have one input, and the former is as many times as wide as heads share a key-value head.
    """
    known = getattr(getattr(attention, "config", None), "num_attention_heads", None)
    if isinstance(known, int):
        return known
    size, groups = size_of_heads(attention) or 1, kv_groups(attention) or 1
    linears = [module for module in attention.modules() if isinstance(module, nn.Linear)]
    pairs = [(q, k) for q, k in itertools.permutations(linears, 2) if q.in_features == k.in_features]
    return max((q.out_features // size for q, k in pairs if q.out_features == k.out_features * groups), default=0)


# -- what a plan leaves over ----------------------------------------------------------------------------------------------


def _check_used(plan: Plan, used: Iterable[str], places: Sequence[_LeafPlace], n: int) -> None:
    known = {name: None for place in places for name in (place.path, place.owner)}
    modules = {id(place.module): place.module for place in places if place.module is not None}
    inside = {path: module for root in modules.values() for path, module in root.named_modules()}
    for key, value in plan.items():
        if value == "sequence_parallel":
            _check_lists(key, inside)
        if key in used:
            continue
        if value == "local":
            _check_local(key, inside, n)
        elif isinstance(value, int) or word_of(value).cuts or not any(fits(key, path) for path in (*inside, *known)):
            empty = next((path for path in inside if fits(key, path)), None)
            if empty:
                below = [
                    f"{key}.{name}" for name, child in inside[empty].named_children() if any(True for _ in child.parameters())
                ]
                raise ValueError(
                    f"plan: {key!r} means {empty!r}, a {type(inside[empty]).__name__} without params of its own: name what is "
                    f"in it, such as {below}"
                )
            raise ValueError(f"plan: {key!r} matches no path; {nearest(key, [*known, *inside])}")


def _check_tokenwise(plan: Plan, everywhere: Sequence[_LeafPlace], whole: Iterable[_LeafPlace]) -> None:
    """Raises an error for layers that would see a part of the sequence, unless the plan declares them tokenwise.

    Args:
        plan: the plan.
        everywhere: the places of all leaves.
        whole: those of whole leaves of two dims or more.
    """
    lists = [key for key, value in plan.items() if value == "sequence_parallel"]
    if not lists:
        return
    words = {place.owner: [value for _, value in _claims(plan, place) if value != "sequence_parallel"] for place in everywhere}
    ruling = {owner: value for owner in words if (value := value_at(plan, owner)) is not None}
    blocks = {parted(owner)[0] for owner, value in ruling.items() if word_of(value).cuts == "outputs"}
    for place in whole:
        above = [*_above(place.owner), place.owner]
        if not words[place.owner] and not blocks & {*above} and any(fits(key, owner) for key in lists for owner in above):
            raise ValueError(
                f"plan: {place.path!r} is in a sequence_parallel list and is not split, so it would see a part of the "
                f"sequence: split the module that contains it, or add {{{place.owner!r}: 'replicated'}} if it acts on each "
                "token alone, as a router does"
            )


def _check_local(key: str, inside: Mapping[str, nn.Module], n: int) -> None:
    owner, name = parted(key)
    values = [(path, getattr(module, name, None)) for path, module in inside.items() if not owner or fits(owner, path)]
    numbers = [(path, value) for path, value in values if isinstance(value, int)]
    if not numbers:
        raise ValueError(f"plan: {key!r} is 'local', and no module at such a path has a number {name!r}")
    for path, value in numbers:
        if value % n:
            raise ValueError(f"plan: {path}.{name} = {value} does not divide by the {n} ranks")


def _check_groups(plan: Plan, cut: Iterable[_LeafPlace], group: comm.Group) -> None:
    """Raises an error for a GroupNorm with cut params whose groups are not divided by the ranks."""
    local = [parted(key) for key, value in plan.items() if value == "local"]
    for place in cut:
        module = _owner(place)
        counted = any(name == "num_groups" and (not owner or fits(owner, place.owner)) for owner, name in local)
        if group.size > 1 and isinstance(module, nn.GroupNorm) and not counted:
            attribute = f"{place.owner}.num_groups".lstrip(".")
            raise ValueError(
                f"plan: {place.path!r} is split over the {group.size} ranks of {group.name!r}, and its GroupNorm would make "
                f"all {module.num_groups} groups of each rank's features: add {{{attribute!r}: 'local'}}, too; where the "
                "ranks do not divide the groups, leave the layers around it out of the plan"
            )


def _check_lists(key: str, inside: Mapping[str, nn.Module]) -> None:
    for path, module in inside.items():
        if fits(key, path) and not isinstance(module, (nn.ModuleList, nn.Sequential)):
            raise ValueError(
                f"plan: {key!r} is 'sequence_parallel', and {path!r} is a {type(module).__name__}: name the list of layers, "
                "whose first takes its part of the sequence and whose last gathers it"
            )
