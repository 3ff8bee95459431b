"""DeepSpeed's router: top 1 with random selection, top 2 as in GShard, top k; its capacities, and its balance loss."""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from functional_ds.parallel.experts.routing import Routing

__all__ = ["Gated", "TopKGate"]

NoisyGate = Literal["Jitter", "RSample", "None"]


class Gated(NamedTuple):
    """A gate's result for T tokens: their experts, the balance loss, and tokens per expert, including dropped ones."""

    routing: Routing
    balance: Tensor
    counts: Tensor


class TopKGate(nn.Module):
    """Each token's ``k`` experts, as DeepSpeed 0.19.8 chooses them; everything is computed in fp32.

    ```
    top 1:   weight p₁;            balance E Σ mean(p) mean(chosen)
    top 2:   weights p_j / Σ p_j   over what capacity left; balance E² mean(mean(p) mean(first))
    top k:   as top 2;             balance E²/k mean(mean(p) mean(chosen))
    ```
    """

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: NoisyGate | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.k, self.min_capacity, self.noisy_gate_policy = k, min_capacity, noisy_gate_policy
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.drop_tokens, self.use_rts, self.top2_2nd_expert_sampling = drop_tokens, use_rts, top2_2nd_expert_sampling

    def forward(self, tokens: Tensor, used_token: Tensor | None = None) -> Gated:
        """The routing of tokens [T, M]; ``used_token`` [T] excludes those with 0, for top 1."""
        wide = tokens.float()
        if self.noisy_gate_policy == "Jitter" and self.training:
            wide = wide * torch.empty_like(wide).uniform_(1 - 1e-2, 1 + 1e-2)
        logits = F.linear(wide, self.wg.weight.float())
        gates = logits.softmax(1)
        count, factor = gates.shape[1], self.capacity_factor if self.training else self.eval_capacity_factor
        scaled = torch.tensor(factor * self.k, dtype=torch.float32)  # DeepSpeed rounds the product up in fp32
        room = max(int((len(gates) / count * scaled).ceil()), self.min_capacity)
        choose = _top_1 if self.k == 1 else _top_2 if self.k == 2 else _top_k
        return choose(self, logits, gates, min(room, len(gates)), used_token)


def _top_1(gate: TopKGate, logits: Tensor, gates: Tensor, room: int, used_token: Tensor | None) -> Gated:
    noisy = gate.noisy_gate_policy == "RSample" and gate.training
    chosen = (logits + _gumbel(logits) if noisy else gates).argmax(1)
    mask = F.one_hot(chosen, gates.shape[1])  # [T, E]
    if used_token is not None:
        mask = mask * used_token.reshape(-1, 1).to(mask.dtype)
    balance = (gates.mean(0) * mask.float().mean(0)).sum() * gates.shape[1]
    kept = mask
    if gate.drop_tokens:
        order = mask * torch.rand(mask.shape, device=mask.device) if gate.use_rts else mask
        kept = mask * torch.zeros_like(mask).scatter_(0, order.topk(room, dim=0).indices, 1)
    column = chosen[:, None]
    kept = kept.gather(1, column) != 0
    return Gated(Routing(column, gates.gather(1, column) * kept, gates.shape[1], gates, kept), balance, mask.sum(0).detach())


def _top_2(gate: TopKGate, logits: Tensor, gates: Tensor, room: int, used_token: Tensor | None) -> Gated:
    count, first = gates.shape[1], gates.argmax(1)
    mask1 = F.one_hot(first, count)
    others = logits + _gumbel(logits) if gate.top2_2nd_expert_sampling else logits
    second = others.masked_fill(mask1.bool(), float("-inf")).argmax(1)
    mask2 = F.one_hot(second, count)
    balance = (gates.mean(0) * mask1.float().mean(0)).mean() * count * count
    if gate.drop_tokens:  # second choices queue behind all first ones
        kept = torch.stack(
            [
                (mask1 * (mask1.cumsum(0) <= room)).any(1),
                (mask2 * (mask2.cumsum(0) + mask1.sum(0) <= room)).any(1),
            ],
            1,
        )
    else:
        kept = torch.ones(len(gates), 2, dtype=torch.bool, device=gates.device)
    chosen = torch.stack([first, second], 1)
    return Gated(_normalised(chosen, gates, kept), balance, (mask1 + mask2).sum(0).detach())


def _top_k(gate: TopKGate, logits: Tensor, gates: Tensor, room: int, used_token: Tensor | None) -> Gated:
    count = gates.shape[1]
    top, chosen = gates.topk(gate.k, dim=1)
    mask = torch.zeros_like(gates, dtype=torch.bool).scatter_(1, chosen, True)
    counts = mask.sum(0).detach()
    balance = (gates.mean(0) * mask.float().mean(0)).mean() * count * count / gate.k
    if gate.drop_tokens:  # those with the smallest weights
        likely = torch.zeros_like(gates).scatter(1, chosen, top).topk(room, dim=0, sorted=False).indices
        mask = mask & torch.zeros_like(mask).scatter_(0, likely, True)
    return Gated(_normalised(chosen, gates, mask.gather(1, chosen)), balance, counts)


def _normalised(chosen: Tensor, gates: Tensor, kept: Tensor) -> Routing:
    weights = gates.gather(1, chosen) * kept
    total = weights.sum(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)
    return Routing(chosen, weights / total, gates.shape[1], gates, kept)


def _gumbel(like: Tensor) -> Tensor:
    return torch.distributions.gumbel.Gumbel(like.new_zeros(()), like.new_ones(())).rsample(like.shape)
