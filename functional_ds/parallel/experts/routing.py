"""Token routing: ``route`` chooses each token's experts and weights, ``Routing`` is the result as data."""

import math
from typing import Literal, get_args

import attrs
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.prng import Key
from functional_ds.step.axes import IN_ORDER, note_asked

Drop = Literal["error", "position", "probability"]


@attrs.frozen
class Capacity:
    """Capacity: at most ``ceil(factor · rows · k / E)`` choices per expert in each group of ``rows`` tokens, as in GShard.

    Groups are counted from the first token, so as long as ranks and micro-batches hold whole groups, which choices are dropped
    does not depend on their number. A good value for ``rows`` is the sequence length.

    Attributes:
        factor: 1 accepts as many as an even routing gives.
        rows: the number of tokens in a group.
        drop: which choices to drop beyond the capacity. "position": those of the last tokens; "probability": those with the
            smallest weights, then those of the last tokens; "error": none, and ``exchange`` raises an error on all ranks.

    >>> Capacity(1.25, rows=16).limit(2, 8)
    5
    """

    factor: float
    rows: int = attrs.field(kw_only=True)
    drop: Drop = attrs.field(default="position", kw_only=True)

    def __attrs_post_init__(self) -> None:
        if not self.factor > 0:
            raise ValueError(f"factor={self.factor!r}: a number above 0")
        if not isinstance(self.rows, int) or self.rows < 1:  # type: ignore[redundant-expr]
            raise ValueError(f"rows={self.rows!r}: an integer above 0")
        if self.drop not in get_args(Drop):
            raise ValueError(f"drop={self.drop!r}: one of {', '.join(map(repr, get_args(Drop)))}")

    def limit(self, k: int, experts: int) -> int:
        """The number of choices that an expert accepts from a group."""
        return math.ceil(self.factor * self.rows * k / experts)

    def apply(self, chosen: Tensor, weights: Tensor, experts: int) -> tuple[Tensor | None, Tensor | None]:
        """Which of the choices [T, k] are kept, and the worst overflow.

        Returns:
            ``(kept, None)``, or with ``drop="error"`` ``(None, overflow)``: the number of choices above the limit (at most 0
            without an overflow), the expert and the group, as integers [3] on the device.

        Raises:
            ValueError: the tokens do not divide into groups.
        """
        tokens, k = chosen.shape
        if tokens % self.rows:
            raise ValueError(
                f"capacity: {tokens} tokens are not a whole number of groups of rows={self.rows}, so what is dropped would "
                "depend on the partition; let rows divide the tokens of every rank and micro-batch, such as the length of a "
                "sequence"
            )
        groups, limit = tokens // self.rows, self.limit(k, experts)
        buckets = (
            chosen + torch.arange(groups, device=chosen.device).repeat_interleave(self.rows)[:, None] * experts
        ).flatten()
        counts = torch.zeros(groups * experts, dtype=torch.int64, device=chosen.device)
        counts.index_add_(0, buckets, torch.ones_like(buckets))
        if self.drop == "error":
            if not groups:
                return None, counts.new_zeros(3)
            worst = counts.argmax()
            return None, torch.stack([counts.max() - limit, worst % experts, worst // experts])
        note_asked(IN_ORDER)
        order = torch.arange(tokens * k, device=chosen.device)
        if self.drop == "probability":
            order = weights.detach().flatten().argsort(descending=True, stable=True)
        order = order[buckets[order].argsort(stable=True)]
        first = (counts.cumsum(0) - counts)[buckets[order]]
        kept = torch.empty(tokens * k, dtype=torch.bool, device=chosen.device)
        kept[order] = torch.arange(tokens * k, device=chosen.device) - first < limit
        return kept.view(tokens, k), None


Gate = Literal["softmax", "sigmoid"]


@tree.record
class Routing:
    """The experts of T tokens, k for each, as a pytree of tensors.

    Attributes:
        experts: the chosen experts, [T, k] integers, counted over all ranks' experts.
        weights: [T, k], the factors of the experts' results.
        count: the number of experts E, over all ranks.
        probabilities: [T, E], each token's scores divided by their sum, for balance losses; None if unknown.
        kept: [T, k] bools, the choices within capacity; None if all are kept.
        overflow: [3] integers: by how many choices the fullest expert exceeds its capacity, which one, and in which group of
            rows; None except with ``drop="error"``. ``exchange`` raises an error on all ranks if any rank has an overflow.
        limit: the capacity of an expert in a group; None for unlimited.
        groups: the number of groups of neighbouring experts for group-limited routing; 1 for none.
        top_groups: the number of these from which a token's experts may come.

    >>> print(Routing(torch.tensor([[0, 1], [1, 2]]), torch.ones(2, 2), 4))
    2 tokens, 2 of 4 experts each: load 1 2 1 0, none dropped
    """

    experts: Tensor
    weights: Tensor
    count: int = tree.static()
    probabilities: Tensor | None = None
    kept: Tensor | None = None
    overflow: Tensor | None = None
    limit: int | None = tree.static(default=None)
    groups: int = tree.static(default=1)
    top_groups: int = tree.static(default=1)

    def reach(self, ranks: int) -> int:
        """The largest number of ranks that a token's experts can be on, if experts are split over so many ranks.

        >>> Routing(torch.empty(9, 6, dtype=torch.int64), torch.empty(9, 6), 64, groups=8, top_groups=3).reach(8)
        3
        """
        most = min(self.experts.shape[1], ranks)
        if self.groups == 1 or max(self.groups, ranks) % min(self.groups, ranks):
            return most  # a group may extend over two ranks
        return min(most, self.top_groups * max(1, ranks // self.groups))

    def demand(self, mask: Tensor | None = None) -> Tensor:
        """How many choices each expert got, including dropped ones: [E] integers, on the device.

        Args:
            mask: [...], true for the tokens that count; None for all.

        Raises:
            ValueError: the mask has another size.
        """
        which = None if mask is None else counted(mask, len(self.experts), self.experts)[:, None].expand_as(self.experts)
        return self._counts(which)

    def load(self) -> Tensor:
        """How many rows each expert gets: [E] integers, on the device."""
        return self._counts(self.kept)

    def _counts(self, which: Tensor | None) -> Tensor:
        flat = self.experts.flatten()
        ones = torch.ones_like(flat) if which is None else which.flatten().to(flat.dtype)
        return torch.zeros(self.count, dtype=flat.dtype, device=flat.device).index_add_(0, flat, ones)

    def __str__(self) -> str:
        """How many rows each expert gets; the host waits for the values."""
        tokens, k = self.experts.shape
        text = f"{tokens} tokens, {k} of {self.count} experts each"
        if self.experts.is_meta:
            return text
        load = self.load()
        dropped = tokens * k - int(load.sum())
        return f"{text}: load {' '.join(map(str, load.tolist()))}, {dropped or 'none'} dropped"

    def check(self) -> "Routing":
        """Validates and returns a routing that ``route`` has not made, or for debugging; the host waits for its values.

        Raises:
            ValueError: an expert out of range, twice for one token, above its capacity, or a weight that is not finite.
        """
        check_shapes(self)
        ids = self.experts
        if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < self.count):
            raise ValueError(f"routing: experts from {int(ids.min())} to {int(ids.max())}; there are {self.count}, from 0 on")
        twice = (ids.sort(1).values.diff(dim=1) == 0).any(1)
        if bool(twice.any()):
            token = int(twice.int().argmax())
            raise ValueError(f"routing: token {token} has an expert twice: {ids[token].tolist()}")
        if not bool(self.weights.isfinite().all()):
            raise ValueError(f"routing: {int((~self.weights.isfinite()).sum())} weights are not finite")
        overflow_error(self, [] if self.overflow is None else [self.overflow.tolist()])
        return self


def counted(mask: Tensor | None, tokens: int, like: Tensor) -> Tensor:
    """[tokens] integers, 1 for the tokens that count."""
    if mask is None:
        return torch.ones(tokens, dtype=torch.int64, device=like.device)
    if mask.numel() != tokens:
        raise ValueError(f"mask has shape {list(mask.shape)}, and the routing {tokens} tokens")
    return (mask.reshape(-1) != 0).to(torch.int64)


def check_shapes(routing: Routing) -> None:
    """Raises ValueError if the shapes of a routing do not match."""
    ids, shape = routing.experts, list(routing.experts.shape)
    if ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"routing: experts are {tree.summary(ids)}; integers [tokens, k] are needed")
    for name, tensor, needed in (
        ("weights", routing.weights, shape),
        ("kept", routing.kept, shape),
        ("probabilities", routing.probabilities, [shape[0], routing.count]),
    ):
        if tensor is not None and list(tensor.shape) != needed:
            raise ValueError(f"routing: {name} have shape {list(tensor.shape)}, and experts {shape}: {needed} is needed")


def overflow_error(routing: Routing, overflows: list[list[int]]) -> None:
    """Raises ValueError for the first rank of a group whose tokens overflow the capacity."""
    for rank, (excess, expert, group) in enumerate(overflows):
        if excess > 0 and routing.limit is not None:
            raise ValueError(
                f"drop='error': {routing.limit + excess} tokens of group {group} of rank {rank} of {len(overflows)} chose "
                f"expert {expert}, and its capacity is {routing.limit}: raise its factor, or drop by 'position' or "
                "'probability'"
            )


def route(
    logits: Tensor,
    k: int,
    *,
    gate: Gate = "softmax",
    normalise: bool = False,
    scale: float = 1.0,
    bias: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    group_top: int = 2,
    capacity: Capacity | None = None,
    noise: float = 0.0,
    key: Key | None = None,
    name: str = "route",
) -> Routing:
    """Top-k routing: each token goes to the k experts with the highest scores.

    Law: the softmax over the top k is ``normalise=True``, the renormalised top k of the softmax.

    Scores and weights are computed in fp32 at least. ``bias`` and noise affect only the choice: weights come from the scores
    without them, and they get no gradient. With ``groups`` a token chooses within its ``top_groups`` best groups of E / groups
    neighbouring experts. If groups are the ranks' experts, or parts of them, this is device-limited routing: ``exchange`` sends
    a token to at most ``top_groups`` ranks, once to each. docs/experts.md has the arguments of published routers.

    Args:
        logits: [..., E], the router's results.
        k: the number of experts per token.
        gate: the function from logits to scores.
        normalise: whether a token's k weights are divided by their sum.
        scale: the final factor of the weights.
        bias: [E], added to the scores for the choice (Wang et al., "Auxiliary-loss-free load balancing", 2024).
        groups: the number of groups of experts; 1 for no limit.
        top_groups: the number of groups from which a token's experts may come.
        group_top: a group's score is the sum of its best ``group_top`` experts': 2 in DeepSeek-V3, 1 in DeepSeek-V2.
        capacity: how many choices an expert accepts; None for all (dropless).
        noise: the scale of Gumbel noise on the logits for the choice; 1 samples experts by their probabilities.
        key: the source of the noise, drawn by position, so equal on any number of ranks.
        name: distinguishes the draws of several layers.

    Raises:
        ValueError: sizes that do not match, or noise without a key.

    >>> route(torch.tensor([[2.0, 1.0, 0.0]]), 2, normalise=True).weights
    tensor([[0.7311, 0.2689]])
    """
    experts = logits.shape[-1] if logits.dim() else 0
    _check(experts, k, gate, bias, groups, top_groups, group_top)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    scores = _scores(wide, gate).reshape(-1, experts)
    with torch.no_grad():
        choice = scores
        if noise:
            if key is None:
                raise ValueError(
                    f"noise={noise} without a key: pass the one that the step gives to a loss with a parameter key"
                )
            draws = key.uniform(wide, name).clamp(min=2.0**-25)
            choice = _scores(wide - noise * (-draws.log()).log(), gate).reshape(-1, experts)
        if bias is not None:
            choice = choice + bias
        if groups > 1:
            best = choice.view(-1, groups, experts // groups).topk(group_top).values.sum(-1).topk(top_groups).indices
            open_ = torch.zeros(len(choice), groups, dtype=torch.bool, device=choice.device).scatter_(1, best, True)
            choice = choice.masked_fill(~open_.repeat_interleave(experts // groups, 1), float("-inf"))
        chosen = choice.topk(k).indices  # [T, k]
    weights = scores.gather(1, chosen)
    if normalise:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    weights = weights * scale if scale != 1 else weights
    kept, overflow = (None, None) if capacity is None else capacity.apply(chosen, weights, experts)
    limit = None if capacity is None else capacity.limit(k, experts)
    probabilities = scores if gate == "softmax" else scores / (scores.sum(1, keepdim=True) + 1e-20)
    return Routing(chosen, weights, experts, probabilities, kept, overflow, limit, groups, top_groups)


def _scores(logits: Tensor, gate: Gate) -> Tensor:
    return logits.softmax(-1) if gate == "softmax" else logits.sigmoid()


def _check(experts: int, k: int, gate: str, bias: Tensor | None, groups: int, top_groups: int, group_top: int) -> None:
    if gate not in ("softmax", "sigmoid"):
        raise ValueError(f"gate={gate!r}: 'softmax' or 'sigmoid'")
    if not 1 <= k <= experts:
        raise ValueError(f"k={k} of {experts} experts: from 1 to the number of experts, the logits' last dim")
    if bias is not None and list(bias.shape) != [experts]:
        raise ValueError(f"bias has shape {list(bias.shape)}; [{experts}], one for each expert, is needed")
    if groups == 1:
        return
    if groups < 1 or experts % groups:
        raise ValueError(f"groups={groups}: {experts} experts do not divide by it")
    per_group = experts // groups
    if not 1 <= top_groups <= groups or k > top_groups * per_group:
        raise ValueError(
            f"top_groups={top_groups} of groups={groups} with {per_group} experts each: k={k} experts must fit into them"
        )
    if not 1 <= group_top <= per_group:
        raise ValueError(f"group_top={group_top}: a group has {per_group} experts")


def jitter(x: Tensor, epsilon: float, *, key: Key, name: str) -> Tensor:
    """Input jitter of a router: ``x`` times uniform noise in ``1 - epsilon`` to ``1 + epsilon`` (Fedus et al., 2021).

    Args:
        x: dim 0 counts the batch's rows.
        epsilon: the largest deviation of the factors from 1.
        key: the source of the noise, drawn by position.
        name: distinguishes draws.

    >>> from functional_ds import Key
    >>> noisy = jitter(torch.ones(1000), 0.1, key=Key.of(0), name="router")
    >>> bool((noisy - 1).abs().max() <= 0.1)
    True
    """
    return x * (1 + epsilon * (2 * key.uniform(x, name) - 1)).to(x.dtype)
