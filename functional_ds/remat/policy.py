"""Rematerialisation policies as data: which of the tensors that a backward pass needs are saved, and where."""

import difflib
from collections.abc import Iterable, Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any

import attrs

__all__ = [
    "Keep",
    "RematPolicy",
    "everything",
    "nothing",
    "offload_names",
    "partition_names",
    "save_matmuls",
    "save_only_names",
]


class Keep(Enum):
    """Where a tensor is between the forward pass and the backward pass.

    | word | meaning |
    |---|---|
    | save | on its device |
    | recompute | nowhere: it is dropped and computed again |
    | offload | in the host's memory |
    | partition | on the ranks of a group, 1/n on each, all-gathered for the backward pass |
    """

    SAVE = "save"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    PARTITION = "partition"


_DEFAULTS = {"nothing": Keep.RECOMPUTE, "everything": Keep.SAVE, **{keep.value: keep for keep in Keep}}
_INPUTS, _MATMULS = "inputs", "matmuls"


def _frozen(names: Mapping[str, Keep]) -> Mapping[str, Keep]:
    return MappingProxyType(dict(names))


@attrs.frozen(repr=False)
class RematPolicy:
    """Which of the tensors that a backward pass needs are kept where.

    Its text is a word for the default, then ``what=word`` for exceptions. Law: ``parse(str(policy)) = policy``.

    Attributes:
        default: for tensors that no exception covers.
        inputs: for the function's inputs. None is the default, except that a recomputed function's inputs are saved.
        matmuls: for the outputs of matrix products, convolutions and attention. None is the default.
        names: for tensors that ``checkpoint_name`` named.

    >>> policy = RematPolicy.parse("recompute,inputs=offload,attn_out=save")
    >>> policy.default, policy.names["attn_out"], str(policy)
    (<Keep.RECOMPUTE: 'recompute'>, <Keep.SAVE: 'save'>, 'recompute,inputs=offload,attn_out=save')
    """

    default: Keep = Keep.RECOMPUTE
    inputs: Keep | None = None
    matmuls: Keep | None = None
    names: Mapping[str, Keep] = attrs.field(default=MappingProxyType({}), converter=_frozen, hash=False)

    def __reduce__(self) -> Any:
        return RematPolicy, (self.default, self.inputs, self.matmuls, dict(self.names))  # views of dicts are not copied

    def __attrs_post_init__(self) -> None:
        if self.inputs is Keep.RECOMPUTE:
            raise ValueError(
                "inputs=recompute: a function cannot be computed again without its inputs; save, offload or partition"
            )
        named = {_MATMULS: self.matmuls, **self.names} if self.matmuls else self.names
        for what, keep in named.items():
            if keep is Keep.RECOMPUTE and self.default is not Keep.RECOMPUTE:
                raise ValueError(
                    f"{what}=recompute where the rest is {self.default.value}: nothing is run again there; let the rest be "
                    "recompute, and say what is to be kept"
                )
        for reserved in (_INPUTS, _MATMULS, *_DEFAULTS):
            if reserved in self.names:
                raise ValueError(f"names: {reserved!r} is a word of policies; choose another name for the value")

    @staticmethod
    def parse(text: "str | RematPolicy") -> "RematPolicy":
        """The policy of a text; a policy is returned as it is.

        Raises:
            ValueError: a word is unknown; the message names the nearest one.
            TypeError: ``text`` is neither text nor a policy.
        """
        if isinstance(text, RematPolicy):
            return text
        if not isinstance(text, str):
            raise TypeError(f"policy={text!r} is neither a RematPolicy nor text such as 'recompute,attn_out=offload'")
        default, exceptions = Keep.RECOMPUTE, {}
        for place, word in enumerate(part.strip() for part in text.split(",")):
            what, equals, value = word.partition("=")
            if equals:
                exceptions[what.strip()] = _word(value.strip(), {keep.value: keep for keep in Keep}, text)
            elif place == 0:
                default = _word(word, _DEFAULTS, text)
            else:
                raise ValueError(f"policy={text!r}: {word!r} is not what=word; only the first word stands alone, for the rest")
        inputs, matmuls = exceptions.pop(_INPUTS, None), exceptions.pop(_MATMULS, None)
        return RematPolicy(default, inputs, matmuls, exceptions)

    def of(self, what: str) -> Keep:
        """Where tensors of a kind are saved: "inputs", "matmuls", a name, or anything else for the default."""
        if what == _INPUTS:
            return self.inputs or (Keep.SAVE if self.recomputes else self.default)
        if what == _MATMULS:
            return self.matmuls or self.default
        return self.names.get(what, self.default)

    @property
    def recomputes(self) -> bool:
        """Whether the function runs again."""
        return self.default is Keep.RECOMPUTE

    @property
    def saves_everything(self) -> bool:
        """Whether autograd's own way is the policy's."""
        return self.default is Keep.SAVE and self.inputs is None and not self.by_operation

    @property
    def partitions(self) -> bool:
        """Whether anything is partitioned, which needs a group."""
        return Keep.PARTITION in (self.default, self.inputs, self.matmuls, *self.names.values())

    @property
    def by_operation(self) -> bool:
        """Whether the outputs of single operations are exceptions, which needs a dispatch mode to see them."""
        return bool(self.names) or self.matmuls is not None

    def __repr__(self) -> str:
        return f"RematPolicy.parse({str(self)!r})"

    def __str__(self) -> str:
        given = {_INPUTS: self.inputs, _MATMULS: self.matmuls, **self.names}
        return ",".join([self.default.value, *(f"{what}={keep.value}" for what, keep in given.items() if keep)])


def _word(word: str, known: Mapping[str, Keep], text: str) -> Keep:
    if word in known:
        return known[word]
    near = difflib.get_close_matches(word, known, n=1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"policy={text!r}: the word {word!r} is unknown; {meant}the words are {', '.join(known)}")


everything = RematPolicy(Keep.SAVE)
nothing = RematPolicy(Keep.RECOMPUTE)
save_matmuls = RematPolicy(Keep.RECOMPUTE, matmuls=Keep.SAVE)


def save_only_names(*names: str) -> RematPolicy:
    """Saves the tensors of these names on the device; recomputes all others.

    >>> print(save_only_names("attn_out", "mlp_out"))
    recompute,attn_out=save,mlp_out=save
    """
    return _only(names, Keep.SAVE)


def offload_names(*names: str) -> RematPolicy:
    """Offloads the tensors of these names to the host; recomputes all others.

    >>> print(offload_names("attn_out"))
    recompute,attn_out=offload
    """
    return _only(names, Keep.OFFLOAD)


def partition_names(*names: str) -> RematPolicy:
    """Partitions the tensors of these names over the group; recomputes all others.

    >>> print(partition_names("attn_out"))
    recompute,attn_out=partition
    """
    return _only(names, Keep.PARTITION)


def _only(names: Iterable[str], keep: Keep) -> RematPolicy:
    found = tuple(names)
    if not found:
        raise ValueError(f"{keep.value} which names? none is given; to keep nothing, use the policy 'nothing'")
    return RematPolicy(names=dict.fromkeys(found, keep))
