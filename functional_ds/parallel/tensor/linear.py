"""Column- and row-parallel linears (Shoeybi et al. 2019), with sequence parallelism (Korthikanti et al. 2022)."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from functional_ds import comm

from .pairs import shared, summed, tensor_group

Biases = Sequence[Tensor | None]


@overload
def column(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    group: comm.Group | None = None,
    gather_output: bool = False,
    sequence_dim: int | None = None,
    regather: bool = False,
    chunks: int = 1,
) -> Tensor: ...
@overload
def column(
    x: Tensor,
    weight: Sequence[Tensor],
    *,
    bias: Biases | None = None,
    group: comm.Group | None = None,
    gather_output: bool = False,
    sequence_dim: int | None = None,
    regather: bool = False,
    chunks: int = 1,
) -> tuple[Tensor, ...]: ...
def column(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    *,
    bias: Tensor | Biases | None = None,
    group: comm.Group | None = None,
    gather_output: bool = False,
    sequence_dim: int | None = None,
    regather: bool = False,
    chunks: int = 1,
) -> Tensor | tuple[Tensor, ...]:
    """Column-parallel linear: each rank has some rows of the weight, and computes their output features.

    Several weights for one input, such as those of queries, keys and values, share its collective.

    ``row(column(x, A), B) = x Aᵀ Bᵀ`` with whole weights, in value and gradients.

    Args:
        x: [..., inputs], replicated over the group. With ``sequence_dim`` it is this rank's part along that dim.
        weight: [outputs / n, inputs], this rank's rows, as in ``torch.nn.Linear``; or several such.
        bias: [outputs / n], or one for each weight.
        group: the n ranks; None for those of the running step's ``T.tensor_parallel``.
        gather_output: return all features, replicated, instead of this rank's.
        sequence_dim: the dim along which ``x`` is split; the output is whole along it. None if ``x`` is whole.
        regather: with ``sequence_dim``: keep only this rank's part of ``x`` for the backward pass, which gathers it again for
            the weights' gradients.
        chunks: with ``sequence_dim``: gather in so many pieces, each overlapped with the product with the previous piece; the
            backward pass reduces in as many.

    Returns:
        [..., outputs / n] for each weight, different on each rank.

    Cost, N elements of a whole x: nothing forward, one all-reduce of N backward, 2 N (n - 1) / n elements. With
    ``sequence_dim`` one all-gather forward and one reduce-scatter backward, N (n - 1) / n each; ``regather`` adds one
    all-gather. ``gather_output`` adds an all-gather of the output.

    Raises:
        ValueError: there is no group; sizes do not match; ``chunks`` or ``regather`` without ``sequence_dim``.

    >>> import torch
    >>> from functional_ds import comm
    >>> def program():
    ...     here, x, a, b = comm.world(), torch.ones(3, 4), torch.ones(6, 4), torch.ones(2, 6)
    ...     hidden = column(x, a.chunk(here.size)[here.rank], group=here)
    ...     return hidden.shape, row(hidden, b.chunk(here.size, 1)[here.rank], group=here).tolist()
    >>> comm.simulate(program, world_size=2)[0]
    (torch.Size([3, 3]), [[24.0, 24.0], [24.0, 24.0], [24.0, 24.0]])
    """
    here = tensor_group(group, "tp.column")
    weights = [weight] if isinstance(weight, Tensor) else list(weight)
    biases = _biases(bias, len(weights))
    for matrix in weights:
        _check_inputs("tp.column", x, matrix, "the input is whole in its features")
    dim = _sequence_dim("tp.column", x, sequence_dim, regather=regather, chunks=chunks)
    if dim is None:
        one = shared(x, here)
        outputs = [F.linear(one, w, b) for w, b in zip(weights, biases, strict=True)]
    elif chunks == 1 and not regather:
        whole = comm.all_gather(x, here, dim=dim)
        outputs = [F.linear(whole, w, b) for w, b in zip(weights, biases, strict=True)]
    else:
        _check_chunks(x.shape, dim, x.shape[dim], chunks)
        views = [matrix.view_as(matrix) for matrix in weights]  # a parameter's gradient may not come out of a custom function
        products = _GatheredProducts.apply(x, here, dim, chunks, regather, *views)
        outputs = [y if b is None else y + b for y, b in zip(products, biases, strict=True)]
    if gather_output:
        outputs = [comm.gather_from(y, here, dim=y.dim() - 1) for y in outputs]
    return outputs[0] if isinstance(weight, Tensor) else tuple(outputs)


def row(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    group: comm.Group | None = None,
    split_input: bool = False,
    sequence_dim: int | None = None,
    chunks: int = 1,
) -> Tensor:
    """Row-parallel linear: each rank has some columns of the weight, and the products are summed over ranks.

    The same equation as that of ``column`` holds.

    Args:
        x: [..., inputs / n], this rank's features, as from ``column``.
        weight: [outputs, inputs / n], this rank's columns.
        bias: [outputs], replicated; it is added once, after the sum. With ``sequence_dim`` each rank's gradient of it is
            partial: ``"replicated_with_grad_allreduce"`` in a plan of ``T.tensor_parallel`` sums it.
        group: the n ranks; None for those of the running step's ``T.tensor_parallel``.
        split_input: ``x`` is whole and replicated, and each rank takes its features of it.
        sequence_dim: return this rank's part along this dim, instead of the whole.
        chunks: with ``sequence_dim``: reduce in so many pieces, each overlapped with the product of the next piece; the
            backward pass gathers in as many.

    Returns:
        [..., outputs], replicated; with ``sequence_dim`` this rank's part.

    Cost, N elements of the output: one all-reduce forward, 2 N (n - 1) / n elements, nothing backward. With ``sequence_dim``
    one reduce-scatter forward and one all-gather backward, N (n - 1) / n each.

    Raises:
        ValueError: there is no group; sizes do not match; ``chunks`` without ``sequence_dim``.

    >>> import torch
    >>> x, weight = torch.arange(8.0).view(2, 4), torch.eye(4)
    >>> def program():
    ...     world = comm.world()
    ...     part, columns = x.chunk(2, -1)[world.rank], weight.chunk(2, -1)[world.rank]
    ...     return row(part, columns, group=world)
    >>> comm.simulate(program, world_size=2)[0].equal(x)
    True
    """
    here = tensor_group(group, "tp.row")
    local_x = comm.scatter_to(x, here, dim=x.dim() - 1) if split_input else x
    _check_inputs("tp.row", local_x, weight, f"each of the {here.size} ranks has a part of the features")
    dim = _sequence_dim("tp.row", x, sequence_dim, chunks=chunks)
    if dim is None:
        y = summed(F.linear(local_x, weight), here)
    elif chunks == 1:
        y = comm.reduce_scatter(F.linear(local_x, weight), here, dim=dim)
    else:
        _check_chunks(local_x.shape, dim, local_x.shape[dim], here.size * chunks)
        y = _ScatteredProduct.apply(local_x, weight.view_as(weight), here, dim, chunks)
    return y if bias is None else y + bias


def _biases(bias: Tensor | Biases | None, count: int) -> Biases:
    biases = [bias] * count if bias is None or isinstance(bias, Tensor) else list(bias)
    if len(biases) != count or (isinstance(bias, Tensor) and count > 1):
        given = 1 if isinstance(bias, Tensor) else len(biases)
        raise ValueError(f"tp.column: bias: {given} for {count} weights; pass one for each, or None")
    return biases


def _check_inputs(what: str, x: Tensor, weight: Tensor, why: str) -> None:
    if weight.dim() != 2 or not x.dim() or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{what}: x of shape {list(x.shape)} does not fit this rank's weight of shape {list(weight.shape)}, [outputs, "
            f"inputs]: {why}"
        )


def _sequence_dim(what: str, x: Tensor, dim: int | None, *, regather: bool = False, chunks: int = 1) -> int | None:
    """The dim, counted from the start."""
    if chunks < 1:
        raise ValueError(f"{what}: chunks={chunks} must be at least 1")
    if dim is None:
        if regather or chunks > 1:
            given = "regather=True" if regather else f"chunks={chunks}"
            raise ValueError(f"{what}: {given} needs sequence_dim=: without it no input is gathered")
        return None
    if not -x.dim() <= dim < x.dim() or dim % x.dim() == x.dim() - 1:
        raise ValueError(f"{what}: sequence_dim={dim} is not a dim of x, of shape {list(x.shape)}, before its features")
    return dim % x.dim()


def _check_chunks(shape: Sequence[int], dim: int, size: int, parts: int) -> None:
    if size % parts:
        raise ValueError(f"chunks: a tensor of shape {list(shape)} does not divide along dim {dim} into {parts} equal parts")


def _gather(x: Tensor, group: comm.Group, dim: int, chunks: int) -> list[comm.Pending[Tensor]]:
    """The j-th is the j-th piece of every rank's part."""
    return [comm.start(comm.all_gather, piece, group, dim=dim) for piece in x.chunk(chunks, dim)]


def _scatter(piece_of: Callable[[int], Tensor], group: comm.Group, dim: int, chunks: int) -> list[comm.Pending[Tensor]]:
    """Starts each reduction as soon as its product is there."""
    return [comm.start(comm.reduce_scatter, piece_of(j), group, dim=dim) for j in range(chunks)]


def _pieces(whole: Tensor, n: int, dim: int, chunks: int) -> list[Tensor]:
    """The rows that belong to ``_gather``'s pieces."""
    if chunks == 1:
        return [whole]
    parts = whole.unflatten(dim, (n, chunks, -1))
    return [parts.select(dim + 1, j).flatten(dim, dim + 1) for j in range(chunks)]


def _assembled(pieces: Sequence[Tensor], n: int, dim: int) -> Tensor:
    """The inverse of ``_pieces``."""
    if len(pieces) == 1:
        return pieces[0]
    return torch.stack([piece.unflatten(dim, (n, -1)) for piece in pieces], dim + 1).flatten(dim, dim + 2)


def _weight_gradient(grads: Sequence[Tensor], inputs: Sequence[Tensor]) -> Tensor:
    products = [g.flatten(0, -2).t() @ x.flatten(0, -2) for g, x in zip(grads, inputs, strict=True)]
    return functools.reduce(torch.add, products)


class _GatheredProducts(torch.autograd.Function):
    """``all_gather(x) @ wᵀ`` for each weight, in ``chunks`` messages; with ``regather`` the backward pass gathers x again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: comm.Group, dim: int, chunks: int, regather: bool, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.dim, ctx.chunks, ctx.regather = group, dim, chunks, regather
        gathered, outputs = [], []
        for pending in _gather(x, group, dim, chunks):
            gathered.append(pending.wait())
            outputs.append([gathered[-1] @ weight.t() for weight in weights])
        kept = [x] if regather else gathered
        ctx.save_for_backward(*weights, *kept)
        ctx.count = len(weights)
        return tuple(_assembled(pieces, group.size, dim) for pieces in zip(*outputs, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        group, dim, chunks = ctx.group, ctx.dim, ctx.chunks
        saved = ctx.saved_tensors  # once: torch.utils.checkpoint recomputes at the first access and raises at a second
        weights, kept = saved[: ctx.count], saved[ctx.count :]
        pieces = [_pieces(grad, group.size, dim, chunks) for grad in grads]
        wants_x, wants_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[5:]
        again = _gather(kept[0], group, dim, chunks) if ctx.regather and any(wants_weights) else []

        def product(j: int) -> Tensor:
            total: Tensor = functools.reduce(torch.add, [parts[j] @ w for parts, w in zip(pieces, weights, strict=True)])
            return total

        reduced = _scatter(product, group, dim, chunks) if wants_x else []
        inputs = [pending.wait() for pending in again] if ctx.regather else kept
        of_weights = [_weight_gradient(parts, inputs) if w else None for parts, w in zip(pieces, wants_weights, strict=True)]
        of_x = torch.cat([pending.wait() for pending in reduced], dim) if wants_x else None
        return (of_x, None, None, None, None, *of_weights)


class _ScatteredProduct(torch.autograd.Function):
    """``reduce_scatter(x @ weightᵀ)``, in ``chunks`` messages."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: comm.Group, dim: int, chunks: int) -> Tensor:
        ctx.group, ctx.dim, ctx.chunks = group, dim, chunks
        ctx.save_for_backward(x, weight)
        pieces = _pieces(x, group.size, dim, chunks)
        reduced = _scatter(lambda j: pieces[j] @ weight.t(), group, dim, chunks)
        return torch.cat([pending.wait() for pending in reduced], dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x, weight), group, dim, chunks = ctx.saved_tensors, ctx.group, ctx.dim, ctx.chunks
        gathered, of_x = [], []
        for pending in _gather(grad, group, dim, chunks):
            gathered.append(pending.wait())
            of_x.append(gathered[-1] @ weight)
        of_weight = _weight_gradient(gathered, _pieces(x, group.size, dim, chunks)) if ctx.needs_input_grad[1] else None
        return _assembled(of_x, group.size, dim), of_weight, None, None, None
