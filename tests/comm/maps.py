"""Every row of the table as a map from all ranks' values to all ranks' values, with inputs for it: what the laws range over."""

import random
from collections.abc import Callable
from functools import reduce
from itertools import accumulate
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm, tree
from functional_ds.testing import COMPLEX, FLOATING, Inputs, Leaf

__all__ = ["SMOOTH", "Do", "dense", "dot", "linear", "live", "pull", "rows", "transpose", "values_like"]

SMOOTH = (*FLOATING, *COMPLEX)
SHARED_IN = {"copy_to", "scatter_to"}  # of a value that all ranks hold, and that counts once
SHARED_OUT = {"reduce_from", "gather_from"}


@attrs.frozen
class Do:
    """A collective with its options: ``do(x)`` calls it."""

    name: str
    options: dict[str, Any] = attrs.field(factory=dict)

    def __call__(self, x: Any) -> Any:
        return OWN_WAYS.get(self.name, getattr(comm, self.name, None))(x, **self.options)

    @property
    def shared_in(self) -> bool:
        """Whether it takes a replicated value."""
        return self.name in SHARED_IN

    @property
    def shared_out(self) -> bool:
        """Whether it gives a replicated value."""
        return self.name in SHARED_OUT


def _all_to_all_rows(x: Any, *, dim: int, splits: list[list[int]]) -> Any:
    """The exchange where rank i sends ``splits[i][j]`` rows to rank j."""
    rank = comm.world().rank
    return comm.all_to_all(
        x, split_dim=dim, concat_dim=dim, input_splits=splits[rank], output_splits=[row[rank] for row in splits]
    )


def _transfer(x: Any, *, by: int) -> Any:
    """A message to the rank ``by`` further on, and one from the rank as far back."""
    rank, n = comm.world().rank, comm.world().size
    return comm.batch_p2p([comm.Send(x, (rank + by) % n), comm.Recv(x, (rank - by) % n)])[1]


def _rows_kept(rank: int, size: int) -> int:
    return (7 * rank + size) % (size + 1)


def _uneven(x: Any, *, dim: int) -> Any:
    """Each rank's first rows, another number on each, gathered."""
    rank = comm.world().rank
    mine = tree.map(lambda leaf: leaf.narrow(dim, 0, _rows_kept(rank, leaf.shape[dim])), x)
    return comm.all_gather(mine, dim=dim, uneven=True)


OWN_WAYS: dict[str, Callable[..., Any]] = {"all_to_all_rows": _all_to_all_rows, "transfer": _transfer, "uneven": _uneven}


def rows(case: Inputs, op: str) -> list[tuple[Inputs, Do]]:
    """Every row of the table but the barrier, each with inputs for it, from inputs made with ``cut``; reductions by ``op``."""
    n, dim, pick = case.size, case.dim, random.Random(case.seed)
    last = n - 1
    found = [
        Do("all_reduce", {"op": op}),
        Do("reduce", {"dst": last, "op": op}),
        Do("broadcast", {"src": last}),
        Do("all_gather", {"dim": dim}),
        Do("all_gather", {"tiled": False}),
        Do("uneven", {"dim": dim}),
        Do("reduce_scatter", {"dim": dim, "op": op}),
        Do("gather", {"dst": last, "dim": dim}),
        Do("gather", {"dst": 0, "tiled": False}),
        Do("scatter", {"src": last, "dim": dim}),
        Do("all_to_all", {"split_dim": dim, "concat_dim": 0}),
        Do("permute", {"perm": list(zip(pick.sample(range(n), (n + 1) // 2), pick.sample(range(n), n), strict=False))}),
        Do("copy_to"),
        Do("scatter_to", {"dim": dim}),
        Do("gather_from", {"dim": dim}),
    ]
    if n > 1:
        found.append(Do("transfer", {"by": 1}))
    if op == "sum":
        found.append(Do("reduce_from"))

    by_rows = attrs.evolve(case, leaves=tree.map(lambda leaf: attrs.evolve(leaf, shape=(n, *leaf.shape)), case.leaves))
    size = 2 * n + case.seed % 3
    cuts = [sorted(pick.choices(range(size + 1), k=n - 1)) for _ in range(n)]
    splits = [[b - a for a, b in zip([0, *cut], [*cut, size], strict=True)] for cut in cuts]
    sized = attrs.evolve(
        case,
        leaves=tree.map(lambda leaf: attrs.evolve(leaf, shape=(*leaf.shape[:dim], size, *leaf.shape[dim + 1 :])), case.leaves),
    )
    return [
        *((case, do) for do in found),
        (by_rows, Do("reduce_scatter", {"tiled": False, "op": op})),
        (by_rows, Do("scatter", {"src": 0, "tiled": False})),
        (sized, Do("all_to_all_rows", {"dim": dim, "splits": splits})),
    ]


def linear(case: Inputs) -> list[tuple[Inputs, Do]]:
    """Every collective that has a transpose, each with inputs for it, from inputs made with ``cut``."""
    return rows(case, "sum")


def transpose(do: Do) -> Do:
    """What the table of transposes says."""
    options = {name: value for name, value in do.options.items() if name != "op"}
    if do.name in ("broadcast", "reduce", "gather", "scatter"):
        other = {"broadcast": "reduce", "reduce": "broadcast", "gather": "scatter", "scatter": "gather"}[do.name]
        return Do(other, {{"src": "dst", "dst": "src"}.get(name, name): value for name, value in options.items()})
    if do.name == "all_to_all":
        return Do("all_to_all", {"split_dim": options["concat_dim"], "concat_dim": options["split_dim"]})
    if do.name == "all_to_all_rows":
        columns = [list(column) for column in zip(*options["splits"], strict=True)]
        return Do("all_to_all_rows", {**options, "splits": columns})
    if do.name == "permute":
        return Do("permute", {"perm": [(dst, src) for src, dst in options["perm"]]})
    if do.name == "transfer":
        return Do("transfer", {"by": -options["by"]})
    names = {
        "all_gather": "reduce_scatter",
        "reduce_scatter": "all_gather",
        "copy_to": "all_reduce",
        "reduce_from": "copy_to",
        "scatter_to": "all_gather",
        "gather_from": "scatter_to",
    }
    return Do(names.get(do.name, do.name), options)


# -- the same in torch's own operations -------------------------------------------------------------------------------


def dense(do: Do, xs: list[Tensor]) -> list[Tensor]:
    """The collective as a function of all ranks' inputs at once, in torch's own operations."""
    n, options = len(xs), do.options
    dim = options.get("dim", 0)
    if do.name in ("all_reduce", "reduce", "reduce_scatter", "reduce_from"):
        total = reduce(torch.add, xs)
        if do.name == "reduce":
            return [total if rank == options["dst"] else torch.zeros_like(total) for rank in range(n)]
        return _pieces(total, n, options) if do.name == "reduce_scatter" else [total] * n
    if do.name in ("all_gather", "gather", "gather_from", "uneven"):
        if do.name == "uneven":
            xs = [x.narrow(dim, 0, _rows_kept(rank, x.shape[dim])) for rank, x in enumerate(xs)]
        whole = torch.cat(xs, dim) if options.get("tiled", True) else torch.stack(xs)
        return [whole if rank == options.get("dst", rank) else torch.zeros_like(whole) for rank in range(n)]
    if do.name == "broadcast":
        return [xs[options["src"]]] * n
    if do.name == "scatter":
        return _pieces(xs[options["src"]], n, options)
    if do.name == "scatter_to":
        return [_pieces(x, n, options)[rank] for rank, x in enumerate(xs)]
    if do.name in ("all_to_all", "all_to_all_rows"):
        return _exchanged(xs, options)
    if do.name == "permute":
        source = {dst: src for src, dst in options["perm"]}
        return [xs[source[rank]] if rank in source else torch.zeros_like(xs[rank]) for rank in range(n)]
    if do.name == "transfer":
        return [xs[(rank - options["by"]) % n] for rank in range(n)]
    if do.name == "copy_to":
        return list(xs)
    raise NotImplementedError(do.name)


def _pieces(whole: Tensor, n: int, options: dict[str, Any]) -> list[Tensor]:
    if not options.get("tiled", True):
        return [whole[rank] for rank in range(n)]
    size = whole.shape[options["dim"]] // n
    return [whole.narrow(options["dim"], rank * size, size) for rank in range(n)]


def _exchanged(xs: list[Tensor], options: dict[str, Any]) -> list[Tensor]:
    n = len(xs)
    cut, joined = (options["dim"],) * 2 if "splits" in options else (options["split_dim"], options["concat_dim"])
    splits = options.get("splits", [[xs[0].shape[cut] // n] * n] * n)
    begins = [[0, *accumulate(row)] for row in splits]
    return [
        torch.cat([x.narrow(cut, begins[src][dst], splits[src][dst]) for src, x in enumerate(xs)], joined) for dst in range(n)
    ]


# -- derivatives ------------------------------------------------------------------------------------------------------


def dot(a: Any, b: Any) -> float:
    """The real inner product of two trees."""
    pairs = zip(tree.leaves(a), tree.leaves(b), strict=True)
    return sum((x.to(torch.complex128) * y.to(torch.complex128).conj()).real.sum().item() for x, y in pairs)


def live(x: Any) -> Any:
    """The same values as inputs of an autograd graph."""
    return tree.map(lambda leaf: leaf.detach().clone().requires_grad_(), x)


def pull(outputs: Any, variables: Any, cotangents: Any, **options: Any) -> Any:
    """``torch.autograd.grad`` of trees."""
    found, spec = tree.flatten(variables)
    if not found:
        return variables
    return tree.unflatten(spec, torch.autograd.grad(tree.leaves(outputs), found, tree.leaves(cotangents), **options))


def values_like(case: Inputs, shaped: Any, name: str, *, shared: bool = False) -> Any:
    """Values of another tree's shapes: this rank's own ones, or the same ones on all ranks."""
    plain = tree.map(lambda leaf: Leaf(tuple(leaf.shape), leaf.dtype), shaped)
    return attrs.evolve(case, leaves=plain).of(0 if shared else comm.world().rank, name=name)
