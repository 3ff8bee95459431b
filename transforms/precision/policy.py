"""Mixed-precision policies: the dtypes of a step, as data."""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.marks import mark_stored
from functional_ds.sharding.path_patterns import nearest

Where = str | Callable[[str], bool]

_DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
_WORDS = {dtype: word for word, dtype in _DTYPES.items()}
_ALIASES = {"fp32": "f32", "fp16": "f16"} | {str(dtype).removeprefix("torch."): word for dtype, word in _WORDS.items()}
_FIELDS = ("params", "compute", "output", "reduce")
_PATTERN = frozenset("*?[.")  # a key with one of these is a path pattern


def _rules(given: Any) -> tuple[tuple[Where, torch.dtype], ...]:
    return tuple(given.items()) if isinstance(given, Mapping) else tuple(given)


@attrs.frozen
class Policy:
    """The dtypes of a step.

    Attributes:
        params: of what the optimizer updates. If it differs from ``compute``, masters of this dtype are stored with the
            optimizer's state.
        compute: of the params and batches that the loss sees, and so of gathers.
        output: of the returned loss and metrics.
        reduce: in which gradients are reduced over ranks; by default ``compute``.
        exceptions: dtypes to use instead of ``compute`` for leaves whose path matches a pattern (``fnmatch``'s, on the whole
            path) or satisfies a function; the first rule that matches applies.

    Raises:
        ValueError: ``params`` is neither f32, nor f64, nor ``compute``; a dtype that is not floating.

    >>> print(Policy.parse("bf16,*norm*=f32"))
    params=f32,compute=bf16,output=f32,reduce=bf16,*norm*=f32
    """

    params: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    output: torch.dtype = torch.float32
    reduce: torch.dtype = attrs.field(default=attrs.Factory(lambda self: self.compute, takes_self=True))
    exceptions: tuple[tuple[Where, torch.dtype], ...] = attrs.field(default=(), converter=_rules)

    def __attrs_post_init__(self) -> None:
        for name, dtype in [*((name, getattr(self, name)) for name in _FIELDS), *self.exceptions]:
            if dtype not in _WORDS:
                raise ValueError(f"policy: {name}={dtype}: use one of {', '.join(map(str, _WORDS))}")
        if self.params not in (torch.float32, torch.float64, self.compute):
            raise ValueError(
                f"policy: params={_WORDS[self.params]} is neither f32, nor f64, nor compute={_WORDS[self.compute]}: params are "
                "kept wide, or in the dtype that they compute in"
            )

    @staticmethod
    def parse(text: str) -> "Policy":
        """Parses a policy; ``str`` is the inverse.

        A name may come first: ``f32``, ``bf16`` (params and output f32, the rest bf16) or ``fp16`` (likewise). Then come
        ``params=``, ``compute=``, ``output=``, ``reduce=`` and path patterns, which contain one of ``* ? [ .``

        Law: ``Policy.parse(str(policy)) == policy``, unless an exception is a function.

        Raises:
            ValueError: an unknown word; the message suggests the nearest.

        >>> Policy.parse("bf16") == Policy.parse("params=f32,compute=bf16,output=f32,reduce=bf16")
        True
        """
        given: dict[str, torch.dtype] = {}
        rules: dict[Where, torch.dtype] = {}
        for place, part in enumerate(text.split(",")):
            key, equals, word = (side.strip() for side in part.partition("="))
            if not equals and not place:
                given["compute"] = _dtype(key, text)
            elif key in _FIELDS:
                given[key] = _dtype(word, text)
            elif _PATTERN & set(key) and equals:
                rules[key] = _dtype(word, text)
            else:
                raise ValueError(f"policy={text!r}: {key!r} is unknown; {nearest(key, _FIELDS)}; a path has one of * ? [ .")
        return Policy(**given, exceptions=rules)

    def __str__(self) -> str:
        rules = [(name, getattr(self, name)) for name in _FIELDS] + list(self.exceptions)
        return ",".join(f"{getattr(key, '__name__', key)}={_WORDS[dtype]}" for key, dtype in rules)

    @property
    def masters(self) -> bool:
        """Whether the optimizer updates master weights."""
        return self.params != self.compute

    def mark(self, params: Any) -> Any:
        """Marks the leaves that ``exceptions`` match.

        Raises:
            ValueError: a rule matches no floating leaf; the message suggests the nearest path.
        """
        leaves, spec = tree.flatten(params)
        paths = [path for path, _ in tree.named(params)]
        smooth = [path for path, leaf in zip(paths, leaves, strict=True) if leaf.is_floating_point()]
        for where, _ in self.exceptions:
            if not any(_fits(where, path) for path in smooth):
                raise ValueError(f"policy: {where!r} fits no floating leaf; {nearest(str(where).strip('*'), smooth)}")
        marks = [next((dtype for where, dtype in self.exceptions if _fits(where, path)), None) for path in paths]
        return tree.unflatten(spec, [mark_stored(leaf, dtype) for leaf, dtype in zip(leaves, marks, strict=True)])

    def reducing(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        """A reduction, for ``zero``, that sends values of dtype ``compute`` as ``reduce``.

        >>> from functional_ds import comm
        >>> policy = Policy.parse("bf16,reduce=f32")
        >>> reduced = policy.reducing(comm.all_reduce)(torch.ones(2, dtype=torch.bfloat16))
        >>> reduced.dtype, str(policy.reducing(comm.reduce_scatter))
        (torch.float32, 'reduce_scatter in f32')
        """
        return _Reducing(collective, self.compute, self.reduce)


@attrs.frozen
class _Reducing:
    collective: Callable[..., Any]
    compute: torch.dtype
    reduce: torch.dtype

    def __call__(self, tensors: Any, *args: Any, **options: Any) -> Any:
        return self.request(tensors, *args, **options).run()

    def request(self, tensors: Any, *args: Any, **options: Any) -> comm.table.Request[Any]:
        """The request that ``comm.start`` starts."""
        return comm.table.prepare(self.collective, tree.map(self._cast, tensors), *args, **options)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.reduce) if tensor.dtype == self.compute else tensor

    def __str__(self) -> str:
        return f"{getattr(self.collective, '__name__', self.collective)} in {_WORDS[self.reduce]}"


def _fits(where: Where, path: str) -> bool:
    return where(path) if callable(where) else fnmatchcase(path, where)


def _dtype(word: str, text: str) -> torch.dtype:
    dtype = _DTYPES.get(_ALIASES.get(word, word))
    if dtype is None:
        raise ValueError(f"policy={text!r} is unknown: {word!r} names no dtype; {nearest(word, [*_DTYPES, *_ALIASES])}")
    return dtype
