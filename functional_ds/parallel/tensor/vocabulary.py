"""Vocabulary-parallel embedding and cross entropy (Shoeybi et al. 2019)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from functional_ds import comm
from functional_ds.base.torch_private import is_fake
from functional_ds.base.weighted import Weighted
from functional_ds.comm.agreement.alike import alike

from .pairs import summed, tensor_group


def embed(
    ids: Tensor,
    weight: Tensor,
    *,
    padding: int | None = None,
    group: comm.Group | None = None,
    sequence_dim: int | None = None,
) -> Tensor:
    """Vocabulary-parallel embedding: each rank looks up the rows that it has, and the results are summed over ranks.

    Law: it equals ``F.embedding`` of the whole weight, bitwise, value and gradient.

    Args:
        ids: integers, replicated over the group.
        weight: [vocabulary / n, features], this rank's rows.
        padding: the id whose row gets no gradient.
        group: the n ranks; None for those of the running step's ``T.tensor_parallel``.
        sequence_dim: return this rank's part along this dim of ``ids``, instead of the whole.

    Returns:
        [*ids.shape, features], replicated; with ``sequence_dim`` this rank's part.

    Cost, N elements of the whole output: one all-reduce forward, 2 N (n - 1) / n elements, nothing backward; with
    ``sequence_dim`` one reduce-scatter forward and one all-gather backward, N (n - 1) / n each.

    Raises:
        IndexError: an id out of range (on a GPU a device assertion, as for ``F.embedding``).
        ValueError: there is no group, or no dim ``sequence_dim``.

    >>> from functional_ds import comm
    >>> def program():
    ...     here, whole = comm.world(), torch.arange(8.0).view(4, 2)
    ...     return embed(torch.tensor([3, 0]), whole.chunk(here.size)[here.rank], group=here).tolist()
    >>> comm.simulate(program, world_size=2)[0]
    [[6.0, 7.0], [0.0, 1.0]]
    """
    here = tensor_group(group, "tp.embed")
    if sequence_dim is not None and not -ids.dim() <= sequence_dim < ids.dim():
        raise ValueError(f"tp.embed: sequence_dim={sequence_dim} is not a dim of ids, of shape {list(ids.shape)}")
    index, inside = local_rows(ids, weight.shape[0], here)
    padding_row = None if padding is None else padding - here.rank * weight.shape[0]
    rows = F.embedding(index, weight, padding_row if padding_row is not None and 0 <= padding_row < weight.shape[0] else None)
    rows = rows.masked_fill(~inside[..., None], 0)
    with alike("tp.embed", here, ids=ids, padding=padding):
        if sequence_dim is None:
            return summed(rows, here)
        return comm.reduce_scatter(rows, here, dim=sequence_dim % ids.dim())


def local_rows(ids: Tensor, rows: int, group: comm.Group) -> tuple[Tensor, Tensor]:
    """The ids as rows of this rank's part of the vocabulary, row 0 for those of other ranks, and which are its own.

    An id out of range becomes a row out of range, so that a lookup fails.
    """
    local = ids - group.rank * rows
    inside = (local >= 0) & (local < rows)
    valid = (ids >= 0) & (ids < rows * group.size)
    return torch.where(inside, local, torch.where(valid, 0, rows)), inside


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    group: comm.Group | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
) -> Weighted:
    """Vocabulary-parallel cross entropy: the sum over tokens and their number.

    It is ``F.cross_entropy`` of the whole logits, with smoothing over the whole vocabulary, plus ``z_loss`` times the mean of
    ``logsumexp²`` (Chowdhery et al. 2022). With m the largest logit, ``log Σ_r Σ exp(z - m) + m - Σ_r z_label``.

    Args:
        logits: [*tokens, vocabulary / n], this rank's, as from ``column``.
        labels: [*tokens], of the whole vocabulary, replicated over the group.
        group: the n ranks; None for those of the running step's ``T.tensor_parallel``.
        label_smoothing: how much of the target is spread over the vocabulary, in [0, 1).
        z_loss: the factor of the squared log-partition function.
        ignore_index: the label of tokens that do not count.

    Returns:
        ``Weighted(sum, tokens)``, in fp32 at least and replicated: what a loss function of ``fds.train_step`` returns.

    Cost, T tokens: two all-reduces forward, of T and 2 T numbers (3 T with smoothing), nothing backward: the gradient is the
    local softmax minus the target. No rank holds all logits.

    Raises:
        ValueError: shapes do not match; ``label_smoothing`` is out of range; a label out of range (on a GPU the loss is nan
            instead, since the host does not wait for it); there is no group.

    >>> from functional_ds import comm
    >>> def program():
    ...     here, logits = comm.world(), torch.zeros(3, 4)
    ...     return cross_entropy(logits.chunk(here.size, 1)[here.rank], torch.tensor([0, 3, -100]), group=here).mean().item()
    >>> round(comm.simulate(program, world_size=2)[0], 4)  # log 4
    1.3863
    """
    here = tensor_group(group, "tp.cross_entropy")
    if logits.shape[:-1] != labels.shape or not logits.dim():
        raise ValueError(
            f"tp.cross_entropy: labels of shape {list(labels.shape)} for logits of shape {list(logits.shape)}; the logits have "
            "one more dim, this rank's part of the vocabulary"
        )
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"tp.cross_entropy: label_smoothing={label_smoothing} must be in [0, 1)")
    size = logits.shape[-1] * here.size
    counted = labels != ignore_index
    wrong = counted & ((labels < 0) | (labels >= size))
    reads = labels.device.type == "cpu" and not is_fake(labels)  # else the host would wait, or there are no values yet
    if reads and bool(wrong.any()):
        raise ValueError(f"tp.cross_entropy: the label {labels[wrong][0].item()} is not one of the vocabulary's {size}")
    labels = torch.where(counted, labels, -1)
    with alike("tp.cross_entropy", here, labels=labels, label_smoothing=label_smoothing, z_loss=z_loss):
        losses: Tensor = _TokenLosses.apply(logits, labels, here, label_smoothing, z_loss)
    if not reads:
        losses = losses.masked_fill(wrong, float("nan"))
    return Weighted(losses.sum(), counted.sum())


class _TokenLosses(torch.autograd.Function):
    """Each token's loss; negative labels do not count."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: comm.Group, smoothing: float, z_loss: float) -> Tensor:
        rows = logits.shape[-1]
        z = logits.to(torch.promote_types(logits.dtype, torch.float32))
        index, inside = local_rows(labels, rows, group)
        index = index.masked_fill(~inside, 0)
        top = comm.all_reduce(z.amax(-1), group, op="max")
        parts = [(z - top[..., None]).exp_().sum(-1), z.gather(-1, index[..., None])[..., 0].masked_fill(~inside, 0)]
        parts += [z.sum(-1)] if smoothing else []
        total, chosen, *mass = comm.all_reduce(torch.stack(parts), group).unbind()
        partition = top + total.log()
        losses = partition - (1 - smoothing) * chosen + z_loss * partition.square()
        if smoothing:
            losses = losses - smoothing / (rows * group.size) * mass[0]
        ctx.save_for_backward(logits, index, inside, partition, labels)
        ctx.shares = smoothing, z_loss, rows * group.size
        return losses.masked_fill(labels < 0, 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        logits, index, inside, partition, labels = ctx.saved_tensors
        smoothing, z_loss, size = ctx.shares
        grad = grad.masked_fill(labels < 0, 0.0)
        d_logits = (logits - partition[..., None]).exp_()
        d_logits *= (1 + 2 * z_loss * partition)[..., None]
        d_logits -= smoothing / size
        d_logits.scatter_add_(-1, index[..., None], -(1 - smoothing) * inside[..., None].to(d_logits.dtype))
        return (d_logits * grad[..., None]).to(logits.dtype), None, None, None, None
