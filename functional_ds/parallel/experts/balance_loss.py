"""Router losses as sums over tokens, and the load of experts as metrics."""

import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base.weighted import Weighted
from functional_ds.step.axes import axes

from .routing import Routing, counted


def balance_loss(
    routing: Routing,
    *,
    sequence: int | None = None,
    group: comm.Group | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """The load-balancing loss ``E Σ_i f_i P_i``, as a sum over this rank's tokens (Fedus et al., "Switch Transformers", 2021).

    f_i is the fraction of the choices that fell on expert i (dropped ones included, without gradient), P_i the mean probability
    of expert i; the mean loss is 1 for even routing. As a sum, it is divided by the weight of the loss that it is added to:

        fds.Weighted(cross_entropy_sum + 0.01 * balance_loss(routing, group=dp), tokens)

    With the counts of f summed over ``group``, the sum over its ranks, divided by their tokens, is the loss of all
    their tokens at once. No factor depends on the number of ranks.

    Args:
        routing: of this rank's tokens; with probabilities.
        sequence: computes f and P for each run of so many of this rank's tokens, as in DeepSeek-V3's loss; None for all tokens
            together. Where ranks have parts of sequences it is the length of this rank's part, not that of the sequence. Only
            the loss by sequence does not depend on the split into micro-batches.
        group: the ranks over which f counts: all data-parallel ranks for the loss of the global batch; with ``sequence`` those
            that have parts of the same sequences. None: f counts this rank's tokens only.
        mask: true for the tokens that the loss's weight counts; None for all.

    Cost: an all-reduce of E + 1 integers (for each sequence), none backward.

    Raises:
        ValueError: a routing without probabilities; tokens that do not divide into sequences; in a step with ``T.sequence``,
            sequences longer than this rank's part of them; a mask of another size.

    >>> even = Routing(torch.tensor([[0], [1]]), torch.ones(2, 1), 2, probabilities=torch.eye(2))
    >>> balance_loss(even)
    tensor(2.)
    """
    if routing.probabilities is None:
        raise ValueError("a routing without probabilities: route() gives them, Routing(..., probabilities=scores) takes them")
    tokens, k = routing.experts.shape
    if sequence is not None and (sequence < 1 or tokens % sequence):
        raise ValueError(f"sequence={sequence}: {tokens} tokens are not a whole number of sequences")
    cut = axes().get("sp")  # that of T.sequence has a length
    length = getattr(cut, "length", None)
    if cut is not None and sequence is not None and length is not None and sequence > length // cut.group.size:
        raise ValueError(
            f"sequence={sequence}: T.sequence splits sequences of {length} positions over the {cut.group.size} ranks of "
            f"{cut.group.name!r}, so a run of {sequence} of this rank's tokens is not in one sequence: pass the length of this "
            f"rank's part, sequence={length // cut.group.size}, with the group"
        )
    rows, parts = (tokens, 1) if sequence is None else (sequence, tokens // sequence)
    counts = counted(mask, tokens, routing.experts)
    places = routing.experts + torch.arange(parts, device=counts.device).repeat_interleave(rows)[:, None] * routing.count
    chosen = torch.zeros(parts * routing.count, dtype=torch.int64, device=counts.device)
    chosen = chosen.index_add_(0, places.flatten(), counts.repeat_interleave(k)).view(parts, routing.count)
    number = counts.view(parts, rows).sum(1, keepdim=True)
    if group is not None:
        chosen, number = comm.all_reduce([chosen, number], group)
    wide = routing.probabilities.dtype
    part = chosen.to(wide) / (number * k).clamp(min=1).to(wide)  # f, [parts, E]
    mass = (routing.probabilities * counts[:, None].to(wide)).view(parts, rows, routing.count).sum(1)
    return routing.count * (part * mass).sum()


def z_loss(logits: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """The router z-loss ``Σ_t (log Σ_i exp logits_ti)²``, a sum over tokens (Zoph et al., "ST-MoE", 2022).

    Args:
        logits: [..., E], the router's.
        mask: true for the tokens that count.

    >>> z_loss(torch.zeros(3, 1))
    tensor(0.)
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    losses = wide.logsumexp(-1).square().flatten()
    return losses.sum() if mask is None else (losses * counted(mask, len(losses), losses).to(losses.dtype)).sum()


def load_metrics(routing: Routing, *, mask: Tensor | None = None, prefix: str = "") -> dict[str, Weighted]:
    """Metrics of a loss: each expert's load relative to an even one, and the fraction of dropped choices.

    They are sums over tokens with their weights, so a step's metrics are those of the global batch.

    Args:
        routing: of this rank's tokens.
        mask: true for the tokens that count.
        prefix: of the names ``load.0``, ``load.1``, ..., ``dropped``.

    >>> load_metrics(Routing(torch.tensor([[0], [0]]), torch.ones(2, 1), 2))["load.0"].mean()
    tensor(2.)
    """
    tokens, k = routing.experts.shape
    counts = counted(mask, tokens, routing.experts)
    choices = (counts.sum() * k).float()
    demand = routing.demand(mask).float()
    loads = {f"{prefix}load.{i}": Weighted(load, choices / routing.count) for i, load in enumerate(demand.unbind())}
    kept = choices if routing.kept is None else (routing.kept * counts[:, None]).sum().float()
    return {**loads, f"{prefix}dropped": Weighted(choices - kept, choices)}
