"""Activation-checkpointing policies as data: which tensors are saved for the backward pass, and where."""

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Any

import attrs

from functional_ds.sharding.path_patterns import nearest


class Keep(Enum):
    """Where a tensor is between the forward pass and the backward pass.

    | word | meaning |
    |---|---|
    | save | on its device |
    | recompute | nowhere: it is dropped and recomputed |
    | offload | in host memory |
    | partition | on the ranks of a group, 1/n on each, all-gathered for the backward pass |
    """

    SAVE = "save"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    PARTITION = "partition"


_INPUTS, _MATMULS = "inputs", "matmuls"


def _frozen(names: Mapping[str, Keep]) -> Mapping[str, Keep]:
    return MappingProxyType(dict(names))


@attrs.frozen(repr=False)
class RematPolicy:
    """An activation-checkpointing policy: which tensors are saved for the backward pass, and where.

    Its text is a word for the default, then ``what=word`` for exceptions. Law: ``parse(str(policy)) = policy``.

    Attributes:
        default: for tensors that no exception covers.
        inputs: for the function's inputs. None is the default, except that a recomputed function's inputs are saved.
        matmuls: for the outputs of matrix products, convolutions and attention. None is the default.
        names: for tensors named by ``checkpoint_name``.

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
        for reserved in (_INPUTS, _MATMULS, *(keep.value for keep in Keep)):
            if reserved in self.names:
                raise ValueError(f"names: {reserved!r} is a word of policies; choose another name for the value")

    @staticmethod
    def parse(text: "str | RematPolicy") -> "RematPolicy":
        """Parses a policy; a ``RematPolicy`` is returned unchanged.

        Raises:
            ValueError: an unknown word; the message suggests the nearest one.
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
                exceptions[what.strip()] = _word(value.strip(), text)
            elif place == 0:
                default = _word(word, text)
            else:
                raise ValueError(f"policy={text!r}: {word!r} is not what=word; only the first word has no name, for the rest")
        inputs, matmuls = exceptions.pop(_INPUTS, None), exceptions.pop(_MATMULS, None)
        return RematPolicy(default, inputs, matmuls, exceptions)

    def of(self, what: str) -> Keep:
        """Where to keep tensors of a category: "inputs", "matmuls", a name, or anything else for the default."""
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
        """Whether the policy is what autograd does by default."""
        return self.default is Keep.SAVE and self.inputs is None and not self.by_operation

    @property
    def partitions(self) -> bool:
        """Whether anything is partitioned, which needs a group."""
        return Keep.PARTITION in (self.default, self.inputs, self.matmuls, *self.names.values())

    @property
    def by_operation(self) -> bool:
        """Whether outputs of single operations are exceptions, which needs a dispatch mode to see them."""
        return bool(self.names) or self.matmuls is not None

    def __repr__(self) -> str:
        return f"RematPolicy.parse({str(self)!r})"

    def __str__(self) -> str:
        given = {_INPUTS: self.inputs, _MATMULS: self.matmuls, **self.names}
        return ",".join([self.default.value, *(f"{what}={keep.value}" for what, keep in given.items() if keep)])


def _word(word: str, text: str) -> Keep:
    try:
        return Keep(word)
    except ValueError:
        words = [keep.value for keep in Keep]
        raise ValueError(
            f"policy={text!r}: the word {word!r} is unknown; {nearest(word, words)}, of {', '.join(words)}"
        ) from None
