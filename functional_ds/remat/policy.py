"""What becomes of the values that a backward pass needs, as data."""

import difflib
from collections.abc import Iterable, Mapping
from enum import Enum
from types import MappingProxyType

import attrs

__all__ = [
    "Keep",
    "Saving",
    "everything",
    "nothing",
    "offload_names",
    "partition_names",
    "save_matmuls",
    "save_only_names",
]


class Keep(Enum):
    """What becomes of a value between the forward pass and the backward.

    | word | meaning |
    |---|---|
    | save | it stays where it is |
    | recompute | it is dropped, and computed again |
    | offload | it goes to the host's memory, and comes back |
    | partition | each rank of a group keeps 1/n of it, and it is gathered |
    """

    SAVE = "save"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    PARTITION = "partition"


_REST = {"nothing": Keep.RECOMPUTE, "everything": Keep.SAVE, **{keep.value: keep for keep in Keep}}
_INPUTS, _MATMULS = "inputs", "matmuls"


def _frozen(names: Mapping[str, Keep]) -> Mapping[str, Keep]:
    return MappingProxyType(dict(names))


@attrs.frozen
class Saving:
    """A policy: what becomes of which values.

    Its text has a word for the rest, then ``what=word`` for exceptions; parsing it gives the policy again.

    Attributes:
        rest: what becomes of values that nothing below speaks of.
        inputs: of what the function is given; None for as the rest, where a recomputed function's are saved.
        matmuls: of what matrix products, convolutions and attention give; None for as the rest.
        names: of values that ``checkpoint_name`` named.

    >>> policy = Saving.parse("recompute,inputs=offload,attn_out=save")
    >>> policy.rest, policy.names["attn_out"], str(policy)
    (<Keep.RECOMPUTE: 'recompute'>, <Keep.SAVE: 'save'>, 'recompute,inputs=offload,attn_out=save')
    """

    rest: Keep = Keep.RECOMPUTE
    inputs: Keep | None = None
    matmuls: Keep | None = None
    names: Mapping[str, Keep] = attrs.field(default=MappingProxyType({}), converter=_frozen, hash=False)

    def __attrs_post_init__(self) -> None:
        if self.inputs is Keep.RECOMPUTE:
            raise ValueError(
                "inputs=recompute: a function cannot be computed again without its inputs; save, offload or partition"
            )
        named = {_MATMULS: self.matmuls, **self.names} if self.matmuls else self.names
        for what, keep in named.items():
            if keep is Keep.RECOMPUTE and self.rest is not Keep.RECOMPUTE:
                raise ValueError(
                    f"{what}=recompute where the rest is {self.rest.value}: nothing is run again there; let the rest be "
                    "recompute, and say what is to be kept"
                )
        for reserved in (_INPUTS, _MATMULS, *_REST):
            if reserved in self.names:
                raise ValueError(f"names: {reserved!r} is a word of policies; choose another name for the value")

    @staticmethod
    def parse(text: "str | Saving") -> "Saving":
        """The policy of a text; a policy is its own.

        Raises:
            ValueError: a word is unknown; the nearest one is named.
            TypeError: it is neither text nor a policy.
        """
        if isinstance(text, Saving):
            return text
        if not isinstance(text, str):
            raise TypeError(f"policy={text!r} is neither a Saving nor text such as 'recompute,attn_out=offload'")
        rest, exceptions = Keep.RECOMPUTE, {}
        for place, word in enumerate(part.strip() for part in text.split(",")):
            what, equals, value = word.partition("=")
            if equals:
                exceptions[what.strip()] = _word(value.strip(), {keep.value: keep for keep in Keep}, text)
            elif place == 0:
                rest = _word(word, _REST, text)
            else:
                raise ValueError(f"policy={text!r}: {word!r} is not what=word; only the first word stands alone, for the rest")
        inputs, matmuls = exceptions.pop(_INPUTS, None), exceptions.pop(_MATMULS, None)
        return Saving(rest, inputs, matmuls, exceptions)

    @property
    def of_inputs(self) -> Keep:
        """What becomes of what the function is given."""
        return self.inputs or (Keep.SAVE if self.rest is Keep.RECOMPUTE else self.rest)

    @property
    def partitions(self) -> bool:
        """Whether anything is partitioned, which takes a group."""
        return Keep.PARTITION in (self.rest, self.inputs, self.matmuls, *self.names.values())

    @property
    def by_operation(self) -> bool:
        """Whether single operations' values are treated in their own way, which takes watching them."""
        return bool(self.names) or self.matmuls is not None

    def __str__(self) -> str:
        given = {_INPUTS: self.inputs, _MATMULS: self.matmuls, **self.names}
        return ",".join([self.rest.value, *(f"{what}={keep.value}" for what, keep in given.items() if keep)])


def _word(word: str, known: Mapping[str, Keep], text: str) -> Keep:
    if word in known:
        return known[word]
    near = difflib.get_close_matches(word, known, n=1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"policy={text!r}: the word {word!r} is unknown; {meant}the words are {', '.join(known)}")


everything = Saving(Keep.SAVE)
nothing = Saving(Keep.RECOMPUTE)
save_matmuls = Saving(Keep.RECOMPUTE, matmuls=Keep.SAVE)


def save_only_names(*names: str) -> Saving:
    """Values of these names stay; the rest is recomputed.

    >>> print(save_only_names("attn_out", "mlp_out"))
    recompute,attn_out=save,mlp_out=save
    """
    return _only(names, Keep.SAVE)


def offload_names(*names: str) -> Saving:
    """Values of these names go to the host's memory; the rest is recomputed.

    >>> print(offload_names("attn_out"))
    recompute,attn_out=offload
    """
    return _only(names, Keep.OFFLOAD)


def partition_names(*names: str) -> Saving:
    """Of values of these names each rank keeps 1/n; the rest is recomputed.

    >>> print(partition_names("attn_out"))
    recompute,attn_out=partition
    """
    return _only(names, Keep.PARTITION)


def _only(names: Iterable[str], keep: Keep) -> Saving:
    found = tuple(names)
    if not found:
        raise ValueError(f"{keep.value} which names? none is given; to keep nothing, use the policy 'nothing'")
    return Saving(names=dict.fromkeys(found, keep))
