"""Blocks under ``T.compiled`` next to blocks under ``torch.compile``, in training steps of Hugging Face models.

    python benchmarks/compiled.py                          seven models, inductor, one process and thread
    python benchmarks/compiled.py --only Llama --rounds 20

"ours" is this library's step with compiled blocks; "torch" is a loop of plain PyTorch whose same blocks were compiled in
place, with torch's AdamW; "eager" and "torch eager" are those two without compilation. All four start from equal params, get
equal batches and take turns; the losses of the first steps, in which blocks are compiled, are compared before all are timed.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from interleaved import compared, run, seconds, shown, verdict
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import transforms as T

RESULTS = Path(__file__).parent / "results"
TOLERANCE = 1e-4  # of losses; generated code rounds otherwise
FIRST_STEPS = 3
SIZES = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 768}
LONG = {**SIZES, "vocab_size": 1024, "max_position_embeddings": 128}
GROUPED = {**LONG, "num_key_value_heads": 2}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2": ("GPT2LMHeadModel", {"n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 128, "vocab_size": 1024}),
    "Llama": ("LlamaForCausalLM", GROUPED),
    "Qwen3": ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 64}),
    "Gemma": ("GemmaForCausalLM", {**GROUPED, "head_dim": 64}),
    "Phi3": ("Phi3ForCausalLM", {**GROUPED, "pad_token_id": 0}),
    "GPTNeoX": ("GPTNeoXForCausalLM", LONG),
    "Bert": ("BertForMaskedLM", LONG),
}
Contender = Callable[[], Tensor]  # trains for a step and returns the loss before it


class Loss(nn.Module):
    """The loss of a language model on its own tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


def model_of(name: str) -> Loss:
    """The model without dropout, from seed 0."""
    kind, sizes = CONFIGS[name]
    config = getattr(hf, name + "Config")(**sizes)
    for key, value in vars(config).items():
        if isinstance(value, float) and ("dropout" in key or key.endswith("pdrop")):
            setattr(config, key, 0.0)
    torch.manual_seed(0)
    return Loss(getattr(hf, kind)(config))


def ours(name: str, compiles: bool, flags: argparse.Namespace, tokens: Tensor) -> Contender:
    """A step of this library."""
    apply, params = fds.functional(model_of(name))
    step = fds.train_step(apply, fds.adamw(1e-3))
    step = T.compiled(backend=flags.backend)(step) if compiles else step
    state = step.init(params)

    def once() -> Tensor:
        nonlocal state
        state, metrics = step(state, tokens)
        return metrics["loss"]

    return once


def plain(name: str, compiles: bool, flags: argparse.Namespace, tokens: Tensor) -> Contender:
    """A loop of PyTorch; the blocks are the members of the model's longest list of modules."""
    model = model_of(name)
    for block in max((each for each in model.modules() if isinstance(each, nn.ModuleList)), key=len) if compiles else ():
        block.compile(backend=flags.backend, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)

    def once() -> Tensor:
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return once


def contest(name: str, flags: argparse.Namespace) -> list[dict[str, Any]]:
    """All contenders on one model."""
    vocabulary = CONFIGS[name][1]["vocab_size"]
    tokens = torch.randint(vocabulary, (flags.batch, flags.context), generator=torch.Generator().manual_seed(1))
    makers = {"ours": (ours, True), "torch": (plain, True), "eager": (ours, False), "torch eager": (plain, False)}
    passes = {who: make(name, compiles, flags, tokens) for who, (make, compiles) in makers.items()}
    losses = {who: [once().item() for _ in range(FIRST_STEPS)] for who, once in passes.items()}
    gaps = {who: max(abs(a / b - 1) for a, b in zip(losses[who], losses["torch eager"], strict=True)) for who in passes}
    times = seconds(passes, flags.rounds)
    rows = [
        {
            "model": name,
            "against": who,
            "difference": max(gaps[who], gaps["ours"]),
            **compared(times, who),
        }
        for who in passes
        if who != "ours"
    ]
    for row in rows:
        print(shown(name, row), flush=True)
    return rows


def measure(flags: argparse.Namespace) -> list[dict[str, Any]]:
    """What the process runs."""
    torch.set_num_threads(1)
    return [row for name in flags.only for row in contest(name, flags)]


def main() -> int:
    """Runs the contests and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"rounds": 10, "batch": 4, "context": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", nargs="+", default=list(CONFIGS), choices=list(CONFIGS))
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--out", type=Path, default=RESULTS)
    flags = parser.parse_args()
    flags.ranks = 1
    rows = run(measure, flags, "compiled")
    return verdict([f"{row['model']} {row['against']}" for row in rows if row["difference"] > TOLERANCE], TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
