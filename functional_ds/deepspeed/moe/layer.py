"""``MoE``: DeepSpeed's mixture-of-experts layer and its router, over this library's token exchange."""

import copy
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from functional_ds.deepspeed.utils.groups import _get_expert_parallel_group
from functional_ds.parallel.experts.grouped import RowGroups
from functional_ds.parallel.experts.routing import Routing
from functional_ds.parallel.experts.token_exchange import exchange

__all__ = ["LocalExperts", "MOELayer", "MoE"]

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
            [(mask1 * (mask1.cumsum(0) <= room)).any(1), (mask2 * (mask2.cumsum(0) + mask1.sum(0) <= room)).any(1)], 1
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


class LocalExperts(nn.Module):
    """This rank's experts, initially copies of one module. Their params are marked by ``allreduce = False``."""

    def __init__(self, expert: nn.Module, num_local_experts: int = 1, expert_group_name: str | None = None) -> None:
        super().__init__()
        self.deepspeed_experts = nn.ModuleList(copy.deepcopy(expert) for _ in range(num_local_experts))
        self.num_local_experts = num_local_experts
        for param in self.parameters():
            param.allreduce, param.group_name = False, expert_group_name  # type: ignore[attr-defined]

    def forward(self, rows: Tensor, groups: RowGroups) -> Tensor:
        """The results of rows that are sorted by expert."""
        outputs = [_first(expert(part)) for expert, part in zip(self.deepspeed_experts, rows.split(groups.read()), strict=True)]
        return torch.cat(outputs)


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]


class MOELayer(nn.Module):
    """A gate, and the experts that it sends tokens to."""

    def __init__(self, gate: TopKGate, experts: LocalExperts, ep_group_name: str, ep_size: int) -> None:
        super().__init__()
        self.gate, self.experts, self.ep_group_name, self.ep_size = gate, experts, ep_group_name, ep_size

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The experts' weighted results, the balance loss, and how many tokens chose each expert."""
        gated = self.gate(hidden_states.reshape(-1, hidden_states.shape[-1]), used_token)
        group = _get_expert_parallel_group(self.ep_group_name) if self.ep_size > 1 else None
        routing = gated.routing
        out = exchange(self.experts, hidden_states, routing=routing, group=group)
        return out.to(hidden_states.dtype), gated.balance, gated.counts


class MoE(nn.Module):
    """A mixture-of-experts layer, in which each token goes to ``k`` experts. Parameters have DeepSpeed's names.

    Law: the result, the balance loss, the counts and all gradients are those of DeepSpeed's layer with these arguments, random
    choices included if torch's generator is in the same state. Rows dropped by capacity add nothing; no padding is computed.

    Attributes:
        num_experts: over all ranks.
        num_local_experts: of this rank.

    >>> layer = MoE(4, nn.Linear(4, 4), num_experts=2, k=2, min_capacity=0)
    >>> out, balance, counts = layer(torch.ones(3, 4))
    >>> out.shape, balance.shape, counts.sum()
    (torch.Size([3, 4]), torch.Size([]), tensor(6))
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: NoisyGate | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        if ep_size < 1 or num_experts % ep_size:
            raise ValueError(f"num_experts={num_experts} does not divide by ep_size={ep_size}")
        if not 1 <= k <= max(2, num_experts):
            raise ValueError(f"k={k}: a token goes to at least 1 expert, and to no more than num_experts={num_experts}")
        if noisy_gate_policy not in (None, "None", "Jitter", "RSample"):
            raise ValueError(f"noisy_gate_policy={noisy_gate_policy!r}: 'Jitter', 'RSample' or None")
        if enable_expert_tensor_parallelism:
            raise ValueError("enable_expert_tensor_parallelism: split experts with T.tensor_parallel; see docs/experts.md")
        self.use_residual, self.ep_size, self.num_experts = use_residual, ep_size, num_experts
        self.num_local_experts, self.expert_group_name = num_experts // ep_size, f"ep_size_{ep_size}"
        experts = LocalExperts(expert, self.num_local_experts, self.expert_group_name)
        capacity = capacity_factor, eval_capacity_factor, min_capacity
        choice = drop_tokens, use_rts, top2_2nd_expert_sampling
        gate = TopKGate(hidden_size, num_experts, k, *capacity, noisy_gate_policy, *choice)
        self.deepspeed_moe = MOELayer(gate, experts, self.expert_group_name, ep_size)
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Does nothing: groups are made when the layer first runs.

        Raises:
            ValueError: ``use_data_before_expert_parallel_``: the ranks of an expert group are neighbours here.
        """
        if use_data_before_expert_parallel_:
            raise ValueError("use_data_before_expert_parallel_: the ranks of an expert group are neighbours here")

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The result, the balance loss, and how many tokens chose each expert.

        Args:
            hidden_states: [..., M].
            used_token: [T], 0 for tokens that no expert gets; for top 1.
        """
        out, balance, counts = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            share = self.coefficient(hidden_states).softmax(-1)
            out = out * share[..., 0:1] + _first(self.mlp(hidden_states)) * share[..., 1:]
        return out, balance, counts
