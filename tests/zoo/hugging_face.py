"""Models of transformers, from tiny configs."""

from collections.abc import Callable
from typing import Any

import transformers as hf
from torch import Tensor, nn

from .program import Program, labelled, tokens

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 13}
LONG = {**SIZES, "max_position_embeddings": 16}


class Causal(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Tensor) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss


class Pixels(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.model(pixel_values=batch[0], labels=batch[1]).loss


def _without_dropout(config: Any) -> Any:
    for name, value in vars(config).items():
        if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
            setattr(config, name, 0.0)
    return config


def causal(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: Causal(getattr(hf, model)(_without_dropout(getattr(hf, config)(**options))))


GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 13, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 13, "decoder_start_token_id": 0}
OPT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "ffn_dim": 24,
    "vocab_size": 13,
    "word_embed_proj_dim": 16,
}
GROUPED = {**LONG, "num_key_value_heads": 1}
VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 8,
    "patch_size": 4,
}
MOE = {**GROUPED, "num_local_experts": 3, "num_experts_per_tok": 2, "output_router_logits": False}

PROGRAMS = {
    "GPT-2": Program(causal("GPT2LMHeadModel", "GPT2Config", **GPT2), tokens()),
    "Llama": Program(causal("LlamaForCausalLM", "LlamaConfig", **GROUPED), tokens()),
    "Qwen3": Program(causal("Qwen3ForCausalLM", "Qwen3Config", **GROUPED, head_dim=8), tokens()),
    "Gemma": Program(causal("GemmaForCausalLM", "GemmaConfig", **GROUPED, head_dim=8), tokens()),
    "OPT": Program(causal("OPTForCausalLM", "OPTConfig", **OPT), tokens()),
    "Bloom": Program(causal("BloomForCausalLM", "BloomConfig", hidden_size=16, n_layer=2, n_head=2, vocab_size=13), tokens()),
    "BERT": Program(causal("BertForMaskedLM", "BertConfig", **LONG), tokens()),
    "DistilBERT": Program(
        causal("DistilBertForMaskedLM", "DistilBertConfig", dim=16, n_layers=2, n_heads=2, hidden_dim=24, vocab_size=13),
        tokens(),
    ),
    "T5": Program(causal("T5ForConditionalGeneration", "T5Config", **T5), tokens()),
    "Mixtral": Program(causal("MixtralForCausalLM", "MixtralConfig", **MOE), tokens()),
    "ViT": Program(
        lambda: Pixels(hf.ViTForImageClassification(_without_dropout(hf.ViTConfig(**VIT, num_labels=3)))), labelled(3, 8, 8)
    ),
}
