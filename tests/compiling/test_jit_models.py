"""Law 58 for unmodified models of Hugging Face: their rotary tables are buffers that no state has."""

from typing import Any

import pytest
import torch
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T

transformers = pytest.importorskip("transformers")
SHAPE = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 0}
Run = tuple[list[float], dict[str, Tensor], list[str]]


def gpt2() -> Any:
    torch.manual_seed(0)
    none = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=8, **none, **SHAPE))


def grouped(name: str = "Llama", dtype: torch.dtype = torch.float32) -> Any:
    """Fewer key-value heads than heads, with torch's attention kernels."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": True}
    config = getattr(transformers, f"{name}Config")(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, attn_implementation="sdpa", **heads, **SHAPE
    )
    return getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)


def llama() -> Any:
    return grouped()


def trained(model: Any, stage: int, backend: str = "", halve: bool = False) -> Run:
    apply, params = fds.functional(model)
    step = fds.compose(T.zero(stage), T.clip(1.0))(
        fds.train_step(lambda p, ids: apply(p, input_ids=ids, labels=ids, use_cache=False).loss, fds.sgd(0.1))
    )
    jitted = fds.jit(step, backend=backend) if backend else step
    state, losses = step.init(params), []
    for i in range(4):
        if halve and i == 3:
            apply.module.model.rotary_emb.inv_freq.mul_(0.5)
        ids = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(10 * i + comm.world().rank))
        state, metrics = jitted(state, ids)
        losses.append(metrics["loss"].item())
    return losses, {path: x.clone() for path, x in step.params(state).items()}, getattr(jitted, "reasons", [])


@pytest.mark.sample(1)
@pytest.mark.law(58)
@pytest.mark.parametrize(("make", "stage", "backend"), [(gpt2, 3, "aot_eager"), (llama, 1, "aot_eager"), (llama, 3, "fx")])
def test_models_as_they_are(make: Any, stage: int, backend: str) -> None:
    for found, expected in comm.simulate(lambda: (trained(make(), stage, backend), trained(make(), stage)), world_size=2):
        assert found[2] == []
        assert found[0] == expected[0]
        assert all(torch.equal(found[1][path], x) for path, x in expected[1].items())


@pytest.mark.law(58)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("Llama", torch.bfloat16), ("Qwen3", torch.float32), ("Qwen3", torch.bfloat16), ("Mixtral", torch.float32)],
)
def test_grouped_queries_without_a_mask(name: str, dtype: torch.dtype) -> None:
    """transformers reads in the trace, too, that positions are consecutive, and builds no mask; its experts are traced."""
    found, expected = trained(grouped(name, dtype), 1, "fx"), trained(grouped(name, dtype), 1)
    assert found[2] == []
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][path], x) for path, x in expected[1].items())


@pytest.mark.law(58)
def test_buffers_that_no_state_has_are_read_in_each_step() -> None:
    found, expected = trained(llama(), 0, "fx", halve=True), trained(llama(), 0, halve=True)
    assert found[0] == expected[0] != trained(llama(), 0, "fx")[0]
    assert found[2] == []
