"""DeepSeek-V3's mixture as transformers has it: its experts over ep, its biases, which are buffers, moved by T.balance."""

from typing import Any

import pytest
import torch

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T

transformers = pytest.importorskip("transformers")
BIAS = "e_score_correction_bias"


def trained(chain: Any, part: tuple[int, int]) -> Any:
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=12,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        use_cache=False,
    )
    model = transformers.DeepseekV3ForCausalLM(config)
    model.set_experts_implementation(fds.moe.register_experts())
    apply, params = fds.functional(model)
    step = fds.train_step(lambda p, ids: apply(p, input_ids=ids, labels=ids).loss, fds.adamw(1e-2, eps=1e-4))
    step = fds.compose(*chain, T.balance(0.01, f"{BIAS}$"))(step)
    state = step.init(params)
    ids = torch.randint(0, 61, (8, 6), generator=torch.Generator().manual_seed(5)).tensor_split(part[1])[part[0]]
    losses, violations = [], []
    for _ in range(3):
        state, metrics = step(state, ids)
        losses.append(metrics["loss"].item())
        violations.append(metrics["max_violation"].item())
    biases = {name: buffer for name, buffer in step.module_buffers(state).items() if BIAS in name}
    return losses, violations, biases


@pytest.mark.law(48)
def test_deepseek_v3() -> None:
    """Losses and biases of 2 x 2 ranks are one device's."""

    def program() -> Any:
        mesh = comm.mesh(dp=4).split("dp", edp=2, ep=2)
        dp = mesh["edp", "ep"]
        chain = [T.zero(3, dp), T.experts(r"mlp\.experts\.", mesh["ep"], edp=mesh["edp"]), T.remat()]
        return trained(chain, (dp.rank, dp.size))

    losses, violations, biases = trained([], (0, 1))
    assert len(biases) == 2
    assert all(bias.abs().max() > 0 for bias in biases.values())
    for found in comm.simulate(program, world_size=4):
        assert found[0] == pytest.approx(losses, rel=1e-4)
        assert found[1] == pytest.approx(violations, rel=1e-6)
        for name, bias in biases.items():
            assert torch.equal(found[2][name], bias), name
