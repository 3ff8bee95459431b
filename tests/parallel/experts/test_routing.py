"""Routers: those of published models, as Hugging Face computes them; what chooses and what weighs; draws by position."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

import functional_ds as fds
from functional_ds import moe, tree
from tests.parallel.experts.oracle import numbers

WIDTH, EXPERTS = 6, 8


def _mixtral(k: int, scale: float) -> tuple[Any, dict[str, Any]]:
    return MixtralTopKRouter(MixtralConfig(hidden_size=WIDTH, num_local_experts=EXPERTS, num_experts_per_tok=k)), {
        "normalise": True
    }


def _qwen3(k: int, scale: float, normalise: bool = False) -> tuple[Any, dict[str, Any]]:
    config = Qwen3MoeConfig(hidden_size=WIDTH, num_experts=EXPERTS, num_experts_per_tok=k, norm_topk_prob=normalise)
    return Qwen3MoeTopKRouter(config), {"normalise": normalise}


def _deepseek_v2(k: int, scale: float) -> tuple[Any, dict[str, Any]]:
    config = DeepseekV2Config(
        hidden_size=WIDTH,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=k,
        n_group=4,
        topk_group=2,
        topk_method="group_limited_greedy",
        num_attention_heads=1,
        routed_scaling_factor=scale,
    )
    return DeepseekV2TopkRouter(config), {"groups": 4, "top_groups": 2, "group_top": 1, "scale": scale}


def _deepseek_v3(k: int, scale: float) -> tuple[Any, dict[str, Any]]:
    config = DeepseekV3Config(
        hidden_size=WIDTH,
        n_routed_experts=EXPERTS,
        num_local_experts=EXPERTS,
        num_experts_per_tok=k,
        n_group=2,
        topk_group=1,
        routed_scaling_factor=scale,
    )
    router = DeepseekV3TopkRouter(config)
    router.e_score_correction_bias.copy_(numbers(EXPERTS, seed=9).float())
    bias = router.e_score_correction_bias
    return router, {"gate": "sigmoid", "normalise": True, "groups": 2, "top_groups": 1, "bias": bias, "scale": scale}


@given(
    router=st.sampled_from((_mixtral, _qwen3, lambda k, s: _qwen3(k, s, True), _deepseek_v2, _deepseek_v3)),
    k=st.sampled_from((1, 2, 4)),
    scale=st.sampled_from((1.0, 2.5)),
    seed=st.integers(0, 100),
)
def test_published_routers(router: Any, k: int, scale: float, seed: int) -> None:
    """Experts, weights and the gradient of the router's matrix are those of Hugging Face's modules."""
    module, arguments = router(k, scale)
    matrix = numbers(EXPERTS, WIDTH, seed=seed).float().requires_grad_()
    module.weight = torch.nn.Parameter(matrix.detach().clone())
    x = numbers(10, WIDTH, seed=seed + 1).float()
    _, weights, chosen = module(x)
    found = moe.route(x @ matrix.T, k, **arguments)
    order, expected = found.experts.argsort(1), chosen.argsort(1)
    assert torch.equal(found.experts.gather(1, order), chosen.gather(1, expected))
    torch.testing.assert_close(found.weights.gather(1, order), weights.gather(1, expected))
    probe = numbers(10, k, seed=seed + 2).float()
    (weights.gather(1, expected) * probe).sum().backward()
    (found.weights.gather(1, order) * probe).sum().backward()
    torch.testing.assert_close(matrix.grad, module.weight.grad)


def test_the_softmax_over_the_top_k_is_the_renormalised_top_k_of_the_softmax() -> None:
    logits = numbers(20, 7)
    found = moe.route(logits, 3, normalise=True)
    torch.testing.assert_close(found.weights, logits.topk(3).values.softmax(1))
    torch.testing.assert_close(moe.route(logits, 3).weights, logits.softmax(1).topk(3).values)


def test_a_bias_chooses_and_has_no_gradient() -> None:
    """The weights are of the scores without it; what is chosen otherwise is what it says."""
    logits = numbers(6, 4).requires_grad_()
    bias = torch.tensor([0.0, 0.0, 9.0, 0.0], dtype=torch.float64, requires_grad=True)
    found = moe.route(logits, 1, gate="sigmoid", bias=bias)
    assert torch.equal(found.experts, torch.full((6, 1), 2))
    assert torch.equal(found.weights, logits.sigmoid()[:, 2:3])
    found.weights.sum().backward()
    assert bias.grad is None


@given(groups=st.sampled_from((2, 4)), top=st.sampled_from((1, 2)), seed=st.integers(0, 50))
def test_experts_lie_in_the_best_groups(groups: int, top: int, seed: int) -> None:
    """Device-limited routing: with groups that are the ranks' experts a token reaches at most ``top`` ranks."""
    logits, each = numbers(12, 8, seed=seed), 8 // groups
    found = moe.route(logits, 2, groups=groups, top_groups=top, group_top=1)
    for row, ids in zip(logits.softmax(1), found.experts, strict=True):
        best = row.view(groups, each).max(1).values.topk(top).indices.tolist()
        assert {int(i) // each for i in ids} <= set(best)


@pytest.mark.law(49)
@given(cut=st.integers(0, 6), seed=st.integers(0, 3))
def test_noise_depends_on_the_position_alone(cut: int, seed: int) -> None:
    """Gumbel noise, and jitter: two ranks' rows draw the one device's; the weights are of the scores without noise."""
    logits, key = numbers(6, 5, 4, seed=seed), fds.Key.of(seed)  # [rows, sequence, E]
    whole = moe.route(logits, 2, noise=1.0, key=key, name="layer 0")
    parts = [(logits[:cut], key), (logits[cut:], key.at(rows=cut))]
    found = [moe.route(rows, 2, noise=1.0, key=own, name="layer 0") for rows, own in parts]
    assert torch.equal(torch.cat([part.experts for part in found]), whole.experts)
    assert torch.equal(whole.weights, logits.softmax(-1).view(-1, 4).gather(1, whole.experts))
    jittered = [moe.jitter(rows, 0.1, key=own, name="x") for rows, own in parts]
    assert torch.equal(torch.cat(jittered), moe.jitter(logits, 0.1, key=key, name="x"))
    assert not torch.equal(whole.experts, moe.route(logits, 2, noise=1.0, key=key, name="layer 1").experts)


def test_noise_draws_experts_by_their_probabilities() -> None:
    """The Gumbel-max trick, for one expert a token."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0]).expand(20000, 4)
    found = moe.route(logits, 1, noise=1.0, key=fds.Key.of(0))
    torch.testing.assert_close(found.load() / 20000, logits[0].softmax(0), atol=0.02, rtol=0)


def test_masks_say_which_tokens_count() -> None:
    """Whatever their dtype, everywhere alike; of another size they are refused."""
    routing = moe.Routing(torch.tensor([[0], [1]]), torch.ones(2, 1), 2, probabilities=torch.eye(2))
    for mask in (torch.tensor([True, False]), torch.tensor([[0.5], [0.0]]), torch.tensor([2, 0])):
        assert routing.demand(mask).tolist() == [1, 0]
        assert moe.load_metrics(routing, mask=mask)["load.0"].mean().item() == 2
    with pytest.raises(ValueError, match=r"mask has shape \[3\], and the routing 2 tokens"):
        routing.demand(torch.ones(3))


def test_a_routing_is_data() -> None:
    """A pytree with checks, whose text says where the tokens go."""
    routing = moe.route(torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]]), 2, capacity=moe.Capacity(0.7, rows=2))
    assert str(routing) == "2 tokens, 2 of 3 experts each: load 1 1 0, 2 dropped"
    assert tree.unflatten(tree.structure(routing), tree.leaves(routing)).limit == 1
    assert routing.demand().tolist() == [2, 2, 0]
    assert routing.demand(torch.tensor([True, False])).tolist() == [1, 1, 0]
    assert routing.check() is routing
    assert "int64[2, 2]" in repr(routing)

    def refused(words: str, experts: Tensor, weights: Tensor) -> None:
        with pytest.raises(ValueError, match=words):
            moe.Routing(experts, weights, 3).check()

    refused("experts from 0 to 3; there are 3", torch.tensor([[0, 3]]), torch.ones(1, 2))
    refused(r"token 1 has an expert twice: \[2, 2\]", torch.tensor([[0, 1], [2, 2]]), torch.ones(2, 2))
    refused("1 weights are not finite", torch.tensor([[0, 1]]), torch.tensor([[0.5, float("nan")]]))
    with pytest.raises(ValueError, match="2 tokens of group 0 of rank 0 of 1 chose expert 0"):
        moe.route(torch.tensor([[3.0, 2.0], [3.0, 2.0]]), 1, capacity=moe.Capacity(1.0, rows=2, drop="error")).check()


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("k=9 of 8 experts", {"k": 9}),
        ("gate='relu'", {"gate": "relu"}),
        (r"bias has shape \[3\]; \[8\]", {"bias": torch.zeros(3)}),
        ("groups=3: 8 experts do not divide", {"groups": 3}),
        ("top_groups=1 of groups=4 with 2 experts each: k=3", {"k": 3, "groups": 4}),
        ("group_top=3: a group has 2 experts", {"groups": 4, "group_top": 3}),
        ("noise=1.0 without a key", {"noise": 1.0}),
        ("6 tokens are not a whole number of groups of rows=4", {"capacity": moe.Capacity(1.0, rows=4)}),
    ],
)
def test_arguments_that_do_not_fit_are_named(words: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=words):
        moe.route(numbers(6, 8), **{"k": 2, **arguments})
