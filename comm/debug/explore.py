"""Searches for interleavings of a program that give different results."""

import copy
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, TypeVarTuple, cast

import optree
import torch
from torch import Tensor

from functional_ds.base.tree import NAMESPACE, summary
from functional_ds.comm.simulation.simulate import simulate
from functional_ds.comm.table.errors import DivergenceError
from functional_ds.comm.variance.declarations import raw_bytes, values_at

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def explore(program: Callable[[*Ts], T], *args: *Ts, world_size: int, seeds: int | Iterable[int] = 100) -> list[T]:
    """Simulates ``program(*args)`` with several interleavings; returns the ranks' results if all runs agree.

    Law: ``explore(program, world_size=n) = simulate(program, world_size=n, seed=s)`` for every explored ``s``, bitwise.

    Each run gets a copy of the tensors in ``args``, which its ranks share. All other leaves of ``args`` are the same objects
    in all runs, and the program must not change them. Random generators start from the same state in each run.

    Args:
        program: what each rank runs; returns a pytree of tensors and values.
        args: its arguments.
        world_size: the number of ranks.
        seeds: the seeds of the interleavings; an int stands for ``range(seeds)``.

    Raises:
        DivergenceError: two runs differ; names their seeds, the first rank and place in its result, and both values. Tensors
            and floats are compared by their bits, so -0.0 differs from 0.0 and a NaN equals itself; other values by ``==``.
        TypeError: a result cannot be compared.
        ValueError: there are no seeds.
        Exception: an exception that a run raised, with a note that names the seed.

    >>> from functional_ds import comm
    >>> explore(lambda: comm.all_reduce(torch.tensor(comm.world().rank)).item(), world_size=3, seeds=20)
    [3, 3, 3]
    >>> def impatient():
    ...     here = comm.world()
    ...     mine, theirs = (here.channel(name) for name in ("ab" if here.rank == 0 else "ba"))
    ...     done = comm.start(comm.all_reduce, torch.ones(1), mine).poll(1.0)  # the other rank polls first, too
    ...     comm.all_reduce(torch.ones(1), theirs)
    ...     return done
    >>> explore(impatient, world_size=2)
    Traceback (most recent call last):
        ...
    functional_ds.comm.table.errors.DivergenceError: the result depends on the interleaving: rank 0's ...
    """
    chosen = iter(range(seeds) if isinstance(seeds, int) else seeds)
    first = next(chosen, None)
    if first is None:
        raise ValueError(f"seeds={seeds!r}: name at least one seed, or how many to try")
    expected = _run(program, args, world_size, first)
    for seed in chosen:
        for rank, (a, b) in enumerate(zip(expected, _run(program, args, world_size, seed), strict=True)):
            difference = _difference(a, b)
            if difference is not None:
                where, one, other = difference
                raise DivergenceError(
                    f"the result depends on the interleaving: rank {rank}'s result{where} is {one} with seed {first} and "
                    f"{other} with seed {seed}; comm.simulate(..., world_size={world_size}, seed={seed}) gives it again"
                )
    return expected


def _run(program: Callable[[*Ts], T], args: tuple[*Ts], world_size: int, seed: int) -> list[T]:
    memo: dict[int, Any] = {}  # per run, so that what is shared in args is shared in the copy

    def copy_of(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return copy.deepcopy(leaf, memo) if leaf.is_leaf else leaf.clone()

    copied: Any = optree.tree_map(copy_of, cast(Any, args), none_is_leaf=True, namespace=NAMESPACE)
    try:
        return simulate(program, *copied, world_size=world_size, seed=seed)
    except BaseException as error:
        error.add_note(f"seed {seed}: run comm.simulate(..., world_size={world_size}, seed={seed}) to see it again")
        raise


def _difference(a: Any, b: Any) -> tuple[str, str, str] | None:
    """Where two results first differ, and their values there; None if they are equal."""
    paths, leaves, spec = optree.tree_flatten_with_path(a, none_is_leaf=True, namespace=NAMESPACE)
    others, other_spec = optree.tree_flatten(b, none_is_leaf=True, namespace=NAMESPACE)
    if spec != other_spec:
        return "", str(spec), str(other_spec)
    for path, x, y in zip(paths, leaves, others, strict=True):
        where = "".join(f"[{entry!r}]" for entry in path)
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            if (x.dtype, x.shape) != (y.dtype, y.shape):
                return where, summary(x), summary(y)
            unequal = (_bits(x, where) != _bits(y, where)).any(-1).nonzero().flatten()
            if len(unequal):
                index, *values = values_at(int(unequal[0]), x, y)
                return (f"{where}, element {index} of {summary(x)}" if index else where), values[0], values[1]
        elif not _equal(x, y, where):
            return where, repr(x), repr(y)
    return None


def _bits(x: Tensor, where: str) -> Tensor:
    """The bytes of each element, [numel, itemsize]."""
    if x.layout != torch.strided:
        raise TypeError(f"result{where}: a tensor of layout {x.layout} cannot be compared; return it to_dense()")
    return raw_bytes(x)


def _equal(x: Any, y: Any, where: str) -> bool:
    if type(x) is not type(y):
        return False
    if isinstance(x, float | complex):
        dtype = torch.float64 if isinstance(x, float) else torch.complex128
        return torch.equal(*(raw_bytes(torch.tensor(value, dtype=dtype)) for value in (x, y)))
    advice = "return tensors, numbers, texts, or pytrees of them"
    equality: Any = type(x).__eq__
    if x is not y and equality is object.__eq__:
        raise TypeError(f"result{where}: {type(x).__name__} has no == of its own, so runs cannot be compared; {advice}")
    try:
        return bool(x == y)
    except Exception as error:
        raise TypeError(f"result{where}: two values of {type(x).__name__} cannot be compared; {advice}") from error
