"""``check_shapes``: runs stages on tensors without values, to see whether each takes what the one before gives."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.prng import Key
from functional_ds.base.torch_private import (
    READ_NUMBER,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from functional_ds.base.weighted import weigh

__all__ = ["NEEDS_VALUES", "OnesReadMode", "check_shapes", "mapped", "shown", "standing_for"]

StageFunction = Callable[[Mapping[str, Tensor], Any, Any, Key | None], Any]
NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)


class OnesReadMode(FakeTensorMode):
    """Tensors without values, of which a loss may read some: enough to know its dtypes.

    A number that is read on the host (``.item()``) is one, and a mask takes every element.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except DataDependentOutputException:
            if func is not READ_NUMBER:
                raise
            return torch.ones((), dtype=args[0].dtype, device="cpu").tolist()
        except DynamicOutputShapeException:
            if func is torch.ops.aten.nonzero.default:
                return args[0].new_zeros((args[0].numel(), args[0].dim()), dtype=torch.int64)
            if func is torch.ops.aten.masked_select.default:
                return torch.add(*args[:2]).flatten().to(args[0].dtype)
            raise


def check_shapes(stages: Sequence[tuple[str, StageFunction]], params: Mapping[str, Tensor], batch: Any) -> tuple[Any, ...]:
    """What each stage sends to the next, as tensors on the device "meta".

    Where a stage needs values, all stages run on the real tensors. Meta tensors stand for tensors on the others' device.

    Args:
        stages: each stage's name and function.
        params: all leaves by path.
        batch: what the stages run on.

    Raises:
        ValueError: a stage cannot take what the one before gives.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    given = dict(params), batch, Key.of(0)
    device = next((leaf.device for leaf in tree.leaves(given[:2]) if isinstance(leaf, Tensor) and not leaf.is_meta), "cpu")
    faked = [mapped(lambda leaf: standing_for(leaf, mode, device), each) for each in given]
    try:
        with mode:
            sent = _run_all(stages, *faked)
    except NEEDS_VALUES:
        with torch.no_grad():
            sent = _run_all(stages, params, batch, Key.of(0))
    return tuple(mapped(_meta, x) for x in sent)


def standing_for(leaf: Tensor, mode: FakeTensorMode, device: torch.device | str) -> Tensor:
    """A tensor without values; in place of a meta tensor one on a device, for a forward may ask where it computes."""
    if not leaf.is_meta:
        return mode.from_tensor(leaf)
    with mode:
        found = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)
        return found.requires_grad_(leaf.requires_grad)


def mapped(function: Callable[[Tensor], Any], value: Any) -> Any:
    """The tree with ``function`` of its tensors, and other leaves as they are."""
    return tree.map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value)


def _run_all(
    stages: Sequence[tuple[str, StageFunction]], params: Mapping[str, Tensor], batch: Any, key: Key
) -> tuple[Any, ...]:
    x, sent = None, []
    for index, (name, run) in enumerate(stages):
        try:
            y = run(params, x, batch, key)
            if index == len(stages) - 1:
                weigh(y[0] if isinstance(y, tuple) else y, "the loss")
            else:
                _refuse_others(y)
                sent.append(y)
        except NEEDS_VALUES:
            raise
        except Exception as error:
            source = f"the batch, {shown(batch)}" if index == 0 else f"what stage {index - 1} gives, {shown(x)}"
            raise ValueError(f"stage {index} ({name}) cannot take {source}: {type(error).__name__}: {error}") from error
        x = y
    return tuple(sent)


def _meta(leaf: Tensor) -> Tensor:
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")


def _refuse_others(x: Any) -> None:
    """Refuses leaves that are no tensors."""
    for path, leaf in tree.named(x):
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"it gives {type(leaf).__name__} {leaf!r} at {path or 'the top'!r} to the next; only tensors are sent"
            )


def shown(value: Any) -> str:
    """A tree with each tensor as its dtype and shape.

    >>> shown((torch.zeros(2, 3), {"ids": torch.zeros(4, dtype=torch.int64)}))
    "(float32[2, 3], {'ids': int64[4]})"
    """
    return str(tree.map(_Shown, value))


class _Shown:
    def __init__(self, leaf: Any) -> None:
        self.leaf = leaf

    def __repr__(self) -> str:
        if isinstance(self.leaf, Tensor):
            return f"{str(self.leaf.dtype).removeprefix('torch.')}{list(self.leaf.shape)}"
        return repr(self.leaf)
