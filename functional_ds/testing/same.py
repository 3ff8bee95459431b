"""Assertions that pytrees, or programs, are equal."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.comm.variance.declarations import raw_bytes


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of one dtype and shape are bitwise equal."""
    return torch.equal(raw_bytes(x), raw_bytes(y))


def same_or_nan(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are equal, where NaN equals NaN."""
    return x.shape == y.shape and bool(((x == y) | (x.isnan() & y.isnan())).all())


def assert_same(actual: Any, expected: Any, *, bits: bool = True) -> None:
    """Asserts that two pytrees have equal structure, dtypes, shapes and bits; with ``bits=False``, equal values.

    >>> assert_same([torch.tensor(0.0)], [torch.tensor(-0.0)], bits=False)
    >>> assert_same([torch.tensor(0.0)], [torch.tensor(-0.0)])
    Traceback (most recent call last):
        ...
    AssertionError: at [0]: 0.0 is not -0.0
    """
    if tree.structure(actual) != tree.structure(expected):
        raise AssertionError(f"structures differ: {tree.structure(actual)} is not {tree.structure(expected)}")
    for (path, x), (_, y) in zip(tree.named(actual), tree.named(expected), strict=True):
        where = f"at [{path}]: " if path else ""
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            if isinstance(x, Tensor) or isinstance(y, Tensor) or x != y:
                raise AssertionError(f"{where}{x!r} is not {y!r}")
            continue
        if (x.dtype, x.shape) != (y.dtype, y.shape):
            raise AssertionError(f"{where}{x.dtype}{list(x.shape)} is not {y.dtype}{list(y.shape)}")
        if not (same_bits(x, y) if bits else torch.equal(x, y)):
            raise AssertionError(f"{where}{x} is not {y}")


def assert_like_one_rank(
    program: Callable[..., Any],
    *args: Any,
    world_size: int,
    seed: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Asserts that ``program(*args)`` returns the same on each of ``world_size`` simulated ranks as on a single rank.

    Declarations (``comm.replicated``, ``invariant``, ``varying``, ``partial``) are checked with
    ``comm.simulate(..., variance=True)``. That does not detect wrong constant factors; the comparison of results does, so let
    the program return losses, gradients or params.

    Args:
        program: what each rank runs; returns a pytree of tensors and numbers.
        args: its arguments.
        world_size: the number of ranks.
        seed: picks the interleaving.
        rtol: relative tolerance; by default torch's for the dtype.
        atol: absolute tolerance; by default torch's for the dtype.

    Raises:
        VarianceError: a value contradicts its declaration.
        AssertionError: a rank's result differs from that of a single rank; names the rank and the leaf.

    >>> def mean(divide_by):
    ...     x = torch.arange(4.0).chunk(comm.world().size)[comm.world().rank]
    ...     return comm.all_reduce(comm.partial(x.sum())) / (divide_by or len(x))
    >>> assert_like_one_rank(mean, 4, world_size=2)
    >>> assert_like_one_rank(mean, None, world_size=2)
    Traceback (most recent call last):
        ...
    AssertionError: rank 0 of 2, the result itself: Scalars are not close!
    ...
    """
    (expected,) = comm.simulate(program, *args, world_size=1)
    for rank, result in enumerate(comm.simulate(program, *args, world_size=world_size, seed=seed, variance=True)):
        where = f"rank {rank} of {world_size}"
        if tree.structure(result) != tree.structure(expected):
            raise AssertionError(f"{where}: the result's structure {tree.structure(result)} is not {tree.structure(expected)}")
        for (path, x), (_, y) in zip(tree.named(result), tree.named(expected), strict=True):
            leaf = f"{where}, {f'[{path}]' if path else 'the result itself'}"
            close = partial(torch.testing.assert_close, rtol=rtol, atol=atol, equal_nan=True)
            close(x, y, msg=partial("{}: {}".format, leaf))
