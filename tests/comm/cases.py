"""Many calls of every row of the table, drawn from a seed: what the worlds are compared on (law 18).

The functions here run in spawned processes, so they stand at the top level of a module that can be imported there.
"""

import random
from collections.abc import Callable
from itertools import permutations
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm, tree
from functional_ds.testing import COMPLEX, DTYPES, FLOATING, Leaf

__all__ = ["Case", "draw", "run"]

REDUCTIONS = {"all_reduce", "reduce_scatter", "reduce"}
JOINED = {"all_gather", "reduce_scatter", "gather", "scatter"}  # take dim and tiled
CUT = {"reduce_scatter", "scatter", "scatter_to"}  # need a size that n divides
ROOTS = {"broadcast": "src", "reduce": "dst", "gather": "dst", "scatter": "src"}
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
        rows: where ranks' sizes differ along options' dim, each rank's.
    """

    name: str
    options: dict[str, Any]
    leaves: Any
    seed: int
    special: bool
    gradient: bool
    rows: tuple[int, ...] | None = None

    def values(self, rank: int) -> Any:
        """The rank's tree: any floats, and integers of the dtype's whole range."""
        generator = torch.Generator().manual_seed(self.seed * 64 + rank)
        return tree.map(lambda leaf: _values(self._on(leaf, rank), generator, self.special), self.leaves)

    def _on(self, leaf: Leaf, rank: int) -> Leaf:
        if self.rows is None:
            return leaf
        dim = self.options.get("dim", self.options.get("split_dim", 0))
        return attrs.evolve(leaf, shape=(*leaf.shape[:dim], self.rows[rank], *leaf.shape[dim + 1 :]))


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
    names = [row.name for row in comm.table.TABLE]
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
    if name == "reduce_from":
        dtypes = tuple(dtype for dtype in dtypes if dtype != torch.bool)
    if name in ROOTS:
        options[ROOTS[name]] = pick.randrange(n)
    lead, rows = _draw_dims(name, n, options, pick)
    if name == "permute":
        sources, targets = pick.sample(range(n), pick.randint(0, n)), pick.sample(range(n), n)
        options["perm"] = list(zip(sources, targets, strict=False))
    if name == "transfer":
        pairs = [pair for pair in permutations(range(n), 2) if pick.random() < 0.7]
        options["messages"] = [(*pair, pick.randrange(2)) for pair in pick.sample(pairs, len(pairs)) for _ in range(2)]
    if name != "barrier" and pick.random() < 0.3:
        options["started"] = True
    gradient = name != "barrier" and options.get("op", "sum") == "sum" and pick.random() < 0.4
    if gradient:
        dtypes = SMOOTH

    def leaf() -> Leaf:
        shape = (*lead, *(pick.randrange(5) for _ in range(pick.randrange(3))))
        return Leaf(shape, pick.choice(dtypes), pick.choice(["dense", "dense", "transposed", "strided", "expanded"]))

    leaves = pick.choice([leaf(), [leaf(), leaf()], {"a": leaf(), "b": (leaf(), leaf(), leaf()), "c": []}])
    if pick.random() < 0.1:
        leaves = attrs.evolve(leaf(), shape=(*lead, 50, 41))  # larger than one packet
    return Case(name, options, leaves, pick.randrange(2**20), special=not gradient, gradient=gradient, rows=rows)


def _draw_dims(name: str, n: int, options: dict[str, Any], pick: random.Random) -> tuple[list[int], tuple[int, ...] | None]:
    """Options that say where to cut and join; the sizes that the leaves then need, and each rank's along that dim."""
    dim = pick.randrange(3)
    lead = [pick.randrange(4) for _ in range(dim)]
    size = n * pick.randrange(4)
    if name in JOINED:
        options["tiled"] = pick.random() < 0.7
        if not options["tiled"]:
            return [n] if name in CUT else [], None
    if name in (*JOINED, "scatter_to", "gather_from"):
        options["dim"] = dim
        if name == "all_gather" and pick.random() < 0.4:
            options["uneven"] = True
            return [*lead, 0], tuple(pick.randrange(5) for _ in range(n))
        return [*lead, size if name in CUT else pick.randrange(4)], None
    if name == "all_to_all":
        options.update(split_dim=dim, concat_dim=pick.randrange(3))
        return [*lead, size, *(pick.randrange(4) for _ in range(2 - dim))], None
    if name == "all_to_all_rows":
        options.update(split_dim=dim, concat_dim=dim, splits=[[pick.randrange(4) for _ in range(n)] for _ in range(n)])
        options["both"] = pick.random() < 0.5
        return [*lead, 0], tuple(map(sum, options["splits"]))
    return [], None


def run(cases: list[Case], device: str = "cpu", group: comm.Group | None = None) -> list[Any]:
    """What this rank gets in each case, as CPU tensors."""
    found = [_run_one(case, device, group or comm.world()) for case in cases]
    return tree.map(lambda leaf: leaf.cpu(), found)


def _run_one(case: Case, device: str, group: comm.Group) -> Any:
    if case.name == "barrier":
        return comm.barrier(group)
    x = tree.map(lambda leaf: leaf.to(device), case.values(group.rank))
    if _has_template(case, group.rank):
        x = _piece_of(x, group.size, case.options)
    if not case.gradient:
        before = tree.map(torch.clone, x)
        result = _call(case, x, group)
        _check_untouched(x, before, result)
        return result
    x = tree.map(lambda leaf: leaf.clone().requires_grad_(), x)
    out = _call(case, x, group)
    cotangents = [leaf.detach() * 0.7 + 0.1 for leaf in tree.leaves(out)]
    cotangents = [leaf.requires_grad_() for leaf in cotangents]
    if not cotangents:  # no leaves, or no message for this rank
        return tree.map(torch.detach, out)
    back = torch.autograd.grad(tree.leaves(out), tree.leaves(x), cotangents, create_graph=True, allow_unused=True)
    back = [leaf for leaf in back if leaf is not None]
    again = torch.autograd.grad(back, cotangents, [leaf.detach() * 0.3 for leaf in back])
    return tree.map(torch.detach, (out, list(back), list(again)))


def _call(case: Case, x: Any, group: comm.Group) -> Any:
    options, name, rank = dict(case.options), case.name, group.rank
    carry_out = _waited if options.pop("started", False) else _called
    if name == "all_to_all_rows":
        splits, name = options.pop("splits"), "all_to_all"
        options["input_splits"] = splits[rank]
        if options.pop("both"):
            options["output_splits"] = [row[rank] for row in splits]
    if name == "transfer":
        ops = [_op(message, x, rank) for message in options.pop("messages") if rank in message[:2]]
        return carry_out(comm.batch_p2p, ops, group, **options)
    if _has_template(case, rank):
        return carry_out(comm.scatter, None, group=group, like=x, **options)
    return carry_out(getattr(comm, name), x, group=group, **options)


def _waited(collective: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return comm.start(collective, *args, **options).wait()


def _called(collective: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return collective(*args, **options)


def _op(message: tuple[int, int, int], x: Any, rank: int) -> comm.Send | comm.Recv:
    src, dst, tag = message
    return comm.Send(x, dst, tag) if rank == src else comm.Recv(x, src, tag)


def _has_template(case: Case, rank: int) -> bool:
    """Some ranks that receive from a scatter pass what arrives, instead of a value like the sender's."""
    return case.name == "scatter" and rank != case.options["src"] and bool(case.seed % 2)


def _piece_of(x: Any, n: int, options: dict[str, Any]) -> Any:
    """A value shaped as what arrives of ``x``."""

    def cut(leaf: Tensor) -> Tensor:
        return leaf.tensor_split(n, options["dim"])[0] if options["tiled"] else leaf[0]

    return tree.map(cut, x)


def _check_untouched(x: Any, before: Any, result: Any) -> None:
    """Law 11, which no simulation can check for the processes."""
    for leaf, copy in zip(tree.leaves(x), tree.leaves(before), strict=True):
        if not torch.equal(torch.nan_to_num(leaf, nan=7.0), torch.nan_to_num(copy, nan=7.0)):
            raise AssertionError("a collective changed its input")
    own_memory = [leaf for leaf in tree.leaves(result) if any(leaf.stride()) or leaf.numel() == 1]  # zeros may have none
    places = [leaf.untyped_storage().data_ptr() for leaf in [*tree.leaves(x), *own_memory] if leaf.numel()]
    if len(set(places)) < len(places):
        raise AssertionError("a collective's results share memory with its input or with one another")
