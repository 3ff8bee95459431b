"""Column- and row-parallel linears (Shoeybi et al. 2019), with sequence parallelism (Korthikanti et al. 2022)."""

from collections.abc import Sequence
from typing import overload

import torch.nn.functional as F
from torch import Tensor

from functional_ds import comm

from .pairs import shared, summed, tensor_group
from .sequence_products import gathered_products, scattered_product

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
        products = gathered_products(x, weights, group=here, dim=dim, chunks=chunks, regather=regather)
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
        y = scattered_product(local_x, weight, group=here, dim=dim, chunks=chunks)
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
