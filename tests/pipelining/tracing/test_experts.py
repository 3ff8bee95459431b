"""Mixtures of experts of transformers, cut as they are, are the module; what cannot be cut says what would do."""

import warnings
from typing import Any

import pytest
import torch

import functional_ds as fds
from functional_ds import comm
from functional_ds import pipelining as pp
from functional_ds import transforms as T

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "use_cache": False,
    "num_experts_per_tok": 2,
}
QWEN = {"num_experts": 4, "moe_intermediate_size": 16}
MODELS = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {**QWEN, "shared_expert_intermediate_size": 16},
    "Qwen3Moe": {**QWEN, "head_dim": 8},
}


def built(name: str, **more: Any) -> Any:
    """The same model every time, in eager mode as ``from_pretrained`` and users' ``train()`` have it: training."""
    torch.manual_seed(5)
    config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name], **more)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(transformers, f"{name}ForCausalLM")(config).train()


def batch(rows: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 32, (rows, 8), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids}


def alone(model: Any, steps: int) -> list[float]:
    """Plain PyTorch on one device."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(steps):
        loss = model(**batch(8)).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


@pytest.mark.sample(1)
@pytest.mark.law(36)
@pytest.mark.parametrize("name", MODELS)
def test_a_pipeline_of_experts_is_plain_torch(name: str) -> None:
    """Three steps of 1F1B on two ranks, micro-batches of two rows; experts are grouped products in fp32."""
    expected = alone(built(name), 3)

    def program() -> list[float]:
        stages, params = pp.cut(built(name), 2, example=batch(2), loss=lambda y, _: y["loss"])
        step = T.pipeline(pp.one_f_one_b(2, 4), stages)(fds.train_step(stages, fds.sgd(0.1)))
        state, losses = step.init(params), []
        for _ in range(3):
            state, metrics = step(state, batch(8))
            losses.append(metrics["loss"].item())
        return losses

    for found in comm.simulate(program, world_size=2):
        assert found == pytest.approx(expected, rel=1e-5)


def test_products_of_experts_count() -> None:
    """A layer's estimate has each token's products with two experts: two of width 32, up and gate, and one back."""
    stages, params = pp.cut(built("Mixtral"), 4, example=batch(2), loss=lambda y, _: y["loss"])
    costs = pp.estimated(stages, params, batch(2), flops=1.0)
    tokens, width, inner = 16, 16, 32
    experts = 2 * tokens * 2 * 3 * width * inner
    projections = 2 * tokens * width * (16 + 8 + 8 + 16)
    router, attention = 2 * tokens * width * 4, 2 * 2 * (2 * 8 * 8 * 16)
    assert costs.forward[1] == pytest.approx(experts + projections + router + attention, rel=0.02)
    assert costs.inputs[1] + costs.weights[1] == pytest.approx(2 * costs.forward[1], rel=0.1)


def test_experts_that_cannot_be_cut() -> None:
    """One expert after the other, as the routing has it; and router logits that hooks take out of the layers."""
    with pytest.raises(ValueError, match=r"model\.layers\.0: .*value.*experts_implementation='grouped_mm'"):
        pp.cut(built("Mixtral", experts_implementation="eager"), 2, example=batch(2))
    with pytest.raises(ValueError, match=r"output_router_logits=True\) cannot be used outside"):
        pp.cut(built("Mixtral", output_router_logits=True), 2, example=batch(2))
