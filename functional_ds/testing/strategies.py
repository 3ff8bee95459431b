"""Hypothesis strategies for programs on many ranks.

Values are small integers in any dtype, so that sums are exact and laws hold bitwise.

>>> from hypothesis import given
>>> from functional_ds import comm
>>> from functional_ds.testing import assert_same
>>> @given(inputs(sizes=world_sizes(4)))
... def all_ranks_get_the_same(case):
...     first, *others = case.simulate(comm.all_reduce)
...     for other in others:
...         assert_same(other, first)
>>> all_ranks_get_the_same()
"""

import random
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import attrs
import torch
from hypothesis import strategies as st
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree

if TYPE_CHECKING:  # pipelining may be absent; only ``schedules`` needs it
    from functional_ds.pipelining.schedules.schedule import Schedule

FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
COMPLEX = (torch.complex64, torch.complex128)
INTEGRAL = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
ADDABLE = (*FLOATING, *COMPLEX, *INTEGRAL)
DTYPES = (*ADDABLE, torch.bool)

Memory = Literal["dense", "transposed", "strided", "expanded"]
_MEMORY: tuple[Memory, ...] = ("dense", "transposed", "strided", "expanded")


@attrs.frozen
class Leaf:
    """The shape, dtype and memory layout of a tensor.

    Attributes:
        shape: its shape.
        dtype: its dtype.
        memory: "dense"; "transposed": dims in reverse order; "strided": every second element of a larger tensor; "expanded":
            stride 0 along the first dim.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    memory: Memory = "dense"

    def fill(self, seed: int, *, bound: int = 3) -> Tensor:
        """A tensor of random integers of at most ``bound`` in absolute value, determined by the seed.

        >>> Leaf((2, 3), torch.int64).fill(0).shape
        torch.Size([2, 3])
        """
        generator = torch.Generator().manual_seed(seed)
        shape = (1, *self.shape[1:]) if self.memory == "expanded" and self.shape else self.shape
        dense = self._integers(shape, bound, generator)
        if self.memory == "transposed":
            backwards = tuple(reversed(range(dense.dim())))
            return dense.permute(backwards).contiguous().permute(backwards)
        if self.memory == "strided":
            return torch.stack([dense, dense + dense], dim=-1)[..., 0]
        return dense.expand(self.shape)

    def _integers(self, shape: Sequence[int], bound: int, generator: torch.Generator) -> Tensor:
        low = 0 if self.dtype in (torch.uint8, torch.bool) else -bound
        high = 1 if self.dtype == torch.bool else bound
        real = torch.randint(low, high + 1, shape, generator=generator)
        if not self.dtype.is_complex:
            return real.to(self.dtype)
        return torch.complex(real.double(), torch.randint(low, high + 1, shape, generator=generator).double()).to(self.dtype)


@attrs.frozen
class Inputs:
    """The inputs of a program on all ranks: pytrees of one structure, with different values on each rank.

    Attributes:
        size: the number of ranks.
        leaves: a pytree of ``Leaf``.
        seed: determines the values and the simulator's interleaving.
        dim: with ``inputs(cut=True)``, a dim of all leaves whose size is a multiple of ``size``.
    """

    size: int
    leaves: Any
    seed: int
    dim: int = 0

    def of(self, rank: int, *, name: str = "x", bound: int = 3) -> Any:
        """The rank's pytree; different names give different values."""
        drawn, spec = tree.flatten(self.leaves)
        seeds = [zlib.crc32(f"{self.seed} {name} {rank} {place}".encode()) for place in range(len(drawn))]
        return tree.unflatten(spec, [leaf.fill(seed, bound=bound) for leaf, seed in zip(drawn, seeds, strict=True)])

    def all(self, *, name: str = "x", bound: int = 3) -> list[Any]:
        """The pytrees of all ranks."""
        return [self.of(rank, name=name, bound=bound) for rank in range(self.size)]

    def simulate(self, program: Callable[[Any], Any]) -> list[Any]:
        """Runs ``program(tree)`` on simulated ranks; returns their results.

        >>> Inputs(2, [Leaf((1,))], seed=0).simulate(lambda x: (comm.world().rank, x[0].shape))
        [(0, torch.Size([1])), (1, torch.Size([1]))]
        """
        return comm.simulate(lambda: program(self.of(comm.world().rank)), world_size=self.size, seed=self.seed)


def world_sizes(most: int = 5) -> st.SearchStrategy[int]:
    """World sizes from 1 to ``most``."""
    return st.integers(1, most)


def seeds() -> st.SearchStrategy[int]:
    """Seeds of random generators and interleavings."""
    return st.integers(0, 2**31 - 1)


def shapes(*, min_dims: int = 0, max_dims: int = 3, max_side: int = 4) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes, including those of scalars and empty tensors."""
    return st.lists(st.integers(0, max_side), min_size=min_dims, max_size=max_dims).map(tuple)


def leaves(
    dtypes: Sequence[torch.dtype] = DTYPES, *, shape: st.SearchStrategy[tuple[int, ...]] | None = None
) -> st.SearchStrategy[Leaf]:
    """Leaves of any shape, dtype and memory layout."""
    return st.builds(Leaf, shapes() if shape is None else shape, st.sampled_from(list(dtypes)), st.sampled_from(_MEMORY))


def trees(leaf: st.SearchStrategy[Any], *, max_leaves: int = 4) -> st.SearchStrategy[Any]:
    """Pytrees of nested tuples, lists and dicts, possibly without leaves."""

    def grow(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        several = st.lists(inner, max_size=3)
        return several | several.map(tuple) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)

    return st.recursive(leaf, grow, max_leaves=max_leaves)


@st.composite
def inputs(
    draw: st.DrawFn,
    *,
    sizes: st.SearchStrategy[int] | None = None,
    dtypes: Sequence[torch.dtype] = ADDABLE,
    cut: bool = False,
    max_leaves: int = 4,
) -> Inputs:
    """Worlds and their ranks' inputs; with ``cut``, all leaves can be split along ``dim`` among the ranks."""
    size = draw(world_sizes() if sizes is None else sizes)
    dim = draw(st.integers(0, 2)) if cut else 0
    shape = shapes(min_dims=dim + 1, max_dims=3, max_side=3) if cut else shapes()
    if cut:
        shape = shape.map(lambda sides: (*sides[:dim], sides[dim] * size, *sides[dim + 1 :]))
    pytree = draw(trees(leaves(dtypes, shape=shape), max_leaves=max_leaves))
    return Inputs(size, pytree, draw(seeds()), dim)


@st.composite
def schedules(draw: st.DrawFn, *, ranks: int = 3, stages: int = 5, microbatches: int = 4, training: bool = True) -> "Schedule":
    """Valid pipeline schedules up to these sizes, with any placement, any order, and whole or split backward passes."""
    from functional_ds.pipelining.schedules.action import Action, Kind
    from functional_ds.pipelining.schedules.schedule import Schedule

    count = draw(st.integers(1, ranks))
    holders = draw(st.lists(st.integers(0, count - 1), max_size=stages - count))
    placement = draw(st.permutations([*range(count), *holders]))
    m, chooser = draw(st.integers(1, microbatches)), random.Random(draw(seeds()))
    rows: list[list[Action]] = [[] for _ in range(count)]
    ready = [Action(Kind.F, 0, j) for j in range(m)]
    while ready:  # one action after another, each on its rank, so no rank waits for a later one
        kind, stage, j = action = ready.pop(chooser.randrange(len(ready)))
        rows[placement[stage]].append(action)
        backward = chooser.choice((Kind.B, Kind.I))
        if kind is Kind.F and stage + 1 < len(placement):
            ready.append(Action(Kind.F, stage + 1, j))
        elif kind is Kind.F and training:
            ready.append(Action(backward, stage, j))
        elif kind in (Kind.B, Kind.I):
            ready += [Action(Kind.W, stage, j)] if kind is Kind.I else []
            ready += [Action(backward, stage - 1, j)] if stage else []
    return Schedule.of(rows, placement, m)
