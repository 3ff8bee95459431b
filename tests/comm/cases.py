"""Many calls of every row of the table, drawn from a seed: what the worlds are compared on (law 18).

The functions here run in spawned processes, so they stand at the top level of a module that can be imported there.
"""

import random
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm, tree
from functional_ds.testing import COMPLEX, DTYPES, FLOATING, Leaf

__all__ = ["Case", "draw", "run"]

REDUCTIONS = {"all_reduce", "reduce_scatter", "reduce"}
SMOOTH = (*FLOATING, *COMPLEX)
SPECIAL = (0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-42, 3e38)


@attrs.frozen
class Case:
    """One call: everything but the values, which follow from the seed and the rank.

    Attributes:
        name: of the collective.
        options: its keyword arguments.
        leaves: a tree of ``Leaf``.
        seed: of the values.
        special: whether infinities, NaN, zeros of both signs and denormals are among them.
        gradient: whether to go through its transpose, and the transpose's, too.
    """

    name: str
    options: dict[str, Any]
    leaves: Any
    seed: int
    special: bool
    gradient: bool

    def values(self, rank: int) -> Any:
        """The rank's tree: any floats, and integers of the dtype's whole range."""
        generator = torch.Generator().manual_seed(self.seed * 64 + rank)
        return tree.map(lambda leaf: _values(leaf, generator, self.special), self.leaves)


def _values(leaf: Leaf, generator: torch.Generator, special: bool) -> Tensor:
    like = leaf.fill(0)
    shape = list(like.shape)
    if leaf.dtype == torch.bool:
        values = torch.randint(0, 2, shape, generator=generator).bool()
    elif leaf.dtype in SMOOTH:
        real = torch.float64 if not leaf.dtype.is_complex else torch.complex128
        values = torch.randn(shape, dtype=real, generator=generator) * 10 ** torch.randint(-3, 4, shape, generator=generator)
        if special and not leaf.dtype.is_complex and values.numel():
            chosen = torch.tensor(SPECIAL)[torch.randint(0, len(SPECIAL), shape, generator=generator)]
            values = torch.where(torch.rand(shape, generator=generator) < 0.4, chosen.double(), values)
    else:
        info = torch.iinfo(leaf.dtype)
        values = torch.randint(info.min, info.max, shape, generator=generator)
    if leaf.memory == "expanded":
        return values.to(leaf.dtype)[:1].expand(shape) if shape and shape[0] else values.to(leaf.dtype)
    out = torch.empty_strided(shape, like.stride(), dtype=leaf.dtype)
    return out.copy_(values)


def draw(count: int, world_size: int, seed: int) -> list[Case]:
    """``count`` cases, every row of the table in turn."""
    pick = random.Random(seed)
    names = [row.name for row in comm.TABLE]
    return [_draw_one(names[i % len(names)], world_size, pick) for i in range(count)]


def _draw_one(name: str, n: int, pick: random.Random) -> Case:
    options: dict[str, Any] = {}
    dtypes: tuple[torch.dtype, ...] = DTYPES
    if name in REDUCTIONS:
        options["op"] = pick.choice(["sum", "sum", "product", "min", "max"])
        if options["op"] in ("min", "max"):
            dtypes = tuple(dtype for dtype in dtypes if not dtype.is_complex)
        else:
            dtypes = tuple(dtype for dtype in dtypes if dtype != torch.bool)
    lead: list[int] = []
    if name in ("all_gather", "reduce_scatter"):
        options["tiled"] = pick.random() < 0.7
        if options["tiled"]:
            options["dim"] = pick.randrange(3)
            lead = [pick.randrange(4) for _ in range(options["dim"])] + [n * pick.randrange(4)]
        elif name == "reduce_scatter":
            lead = [n]
    if name in ("broadcast", "reduce"):
        options["src" if name == "broadcast" else "dst"] = pick.randrange(n)
    if name != "barrier" and pick.random() < 0.3:
        options["async_op"] = True
    gradient = name != "barrier" and options.get("op", "sum") == "sum" and pick.random() < 0.4
    if gradient:
        dtypes = SMOOTH

    def leaf() -> Leaf:
        shape = (*lead, *(pick.randrange(5) for _ in range(pick.randrange(3))))
        return Leaf(shape, pick.choice(dtypes), pick.choice(["dense", "dense", "transposed", "strided", "expanded"]))

    leaves = pick.choice([leaf(), [leaf(), leaf()], {"a": leaf(), "b": (leaf(), leaf(), leaf()), "c": []}])
    if pick.random() < 0.1:
        leaves = attrs.evolve(leaf(), shape=(*lead, 50, 41))  # larger than one packet
    return Case(name, options, leaves, pick.randrange(2**20), special=not gradient, gradient=gradient)


def run(cases: list[Case], device: str = "cpu", group: comm.Group | None = None) -> list[Any]:
    """What this rank gets in each case, as CPU tensors."""
    found = [_run_one(case, device, group or comm.world()) for case in cases]
    return tree.map(lambda leaf: leaf.cpu(), found)


def _run_one(case: Case, device: str, group: comm.Group) -> Any:
    if case.name == "barrier":
        return comm.barrier(group)
    x = tree.map(lambda leaf: leaf.to(device), case.values(group.rank))
    if not case.gradient:
        before = tree.map(torch.clone, x)
        result = _call(case, x, group)
        _check_untouched(x, before, result)
        return result
    x = tree.map(lambda leaf: leaf.requires_grad_(), x)
    out = _call(case, x, group)
    cotangents = [leaf.detach() * 0.7 + 0.1 for leaf in tree.leaves(out)]
    cotangents = [leaf.requires_grad_() for leaf in cotangents]
    back = torch.autograd.grad(tree.leaves(out), tree.leaves(x), cotangents, create_graph=True)
    again = torch.autograd.grad(back, cotangents, [leaf.detach() * 0.3 for leaf in back])
    return tree.map(torch.detach, (out, list(back), list(again)))


def _call(case: Case, x: Any, group: comm.Group) -> Any:
    result = getattr(comm, case.name)(x, group=group, **case.options)
    return result.wait() if case.options.get("async_op") else result


def _check_untouched(x: Any, before: Any, result: Any) -> None:
    """Law 11, which no simulation can check for the processes."""
    for leaf, copy in zip(tree.leaves(x), tree.leaves(before), strict=True):
        if not torch.equal(torch.nan_to_num(leaf, nan=7.0), torch.nan_to_num(copy, nan=7.0)):
            raise AssertionError("a collective changed its input")
    places = [leaf.untyped_storage().data_ptr() for leaf in tree.leaves((x, result)) if leaf.numel()]
    if len(set(places)) < len(places):
        raise AssertionError("a collective's results share memory with its input or with one another")
