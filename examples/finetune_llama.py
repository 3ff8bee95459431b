"""Fine-tunes a Hugging Face Llama: LoRA, bf16, ZeRO-3 and activation checkpointing, from a folder to a folder.

    python examples/finetune_llama.py                                     a tiny random model, two local processes
    python examples/finetune_llama.py --steps 12                          again: resumes, and trains to step 12
    python examples/finetune_llama.py --model path/to/a/llama             a model that is there, as save_pretrained writes it
    torchrun --nproc-per-node 8 examples/finetune_llama.py --model ...    the ranks that torchrun starts

The weights are read straight into each rank's shards: no rank holds the whole model. Writes out/llama/checkpoints while it
trains and out/llama/finetuned at the end, which transformers' from_pretrained reads. Needs transformers and safetensors.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm, fitting
from functional_ds import transforms as T

TINY = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
ADAPTED = ("q_proj", "v_proj")  # the layers of each block that get an adapter


class LoRALinear(nn.Linear):
    """A frozen linear layer and a trained product of two thin matrices: W x + (alpha / rank) B A x (Hu et al. 2021)."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.scale = alpha / rank
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.scale * (x @ self.lora_a.T) @ self.lora_b.T

    def merged(self) -> Tensor:
        """The weight of one plain linear layer that computes the same."""
        return self.weight + self.scale * self.lora_b @ self.lora_a


def adapted(config: transformers.LlamaConfig, rank: int) -> nn.Module:
    """A Llama whose weights are frozen, with adapters."""
    model = transformers.LlamaForCausalLM(config)
    for block in model.model.layers:
        for name in ADAPTED:
            setattr(block.self_attn, name, LoRALinear(getattr(block.self_attn, name), rank, alpha=2.0 * rank))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return model  # type: ignore[no-any-return]


class Windows(torch.utils.data.Dataset[Tensor]):
    """Windows of consecutive bytes of a text, as token ids."""

    def __init__(self, text: bytes, length: int) -> None:
        self.ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.length = length

    def __len__(self) -> int:
        return len(self.ids) // self.length

    def __getitem__(self, index: int) -> Tensor:
        return self.ids[index * self.length : (index + 1) * self.length]


def finetune(flags: argparse.Namespace) -> list[float]:
    """What each rank runs, wherever it runs; the losses of the steps that were made."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig.from_pretrained(flags.model)
    apply, params = fds.deferred(lambda: adapted(config, flags.lora))  # shapes; adapters get their values in step.init
    params = fds.load_params(flags.model, like=params, module=apply, allow_missing="*lora_*")  # so do weights, from the files

    def loss_fn(params: Any, ids: Tensor) -> Tensor:  # ids: [B, T]
        logits = apply(params, input_ids=ids, use_cache=False).logits[:, :-1].float()  # [B, T - 1, V]
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    step = fds.compose(
        T.mixed_precision("bf16"),
        T.zero(3),
        T.remat("model.layers"),  # activation checkpointing, block by block
        T.accumulate(2),
        T.schedule(T.warmup_cosine(2, flags.steps)),
        T.clip(1.0),
    )(fds.train_step(loss_fn, fds.adamw(flags.lr)))

    data, world = Windows(flags.data.read_bytes(), flags.context), comm.world()
    sampler = torch.utils.data.DistributedSampler(data, world.size, world.rank, seed=0)
    loader = torch.utils.data.DataLoader(data, batch_size=flags.batch // world.size, sampler=sampler, drop_last=True)

    losses: list[float] = []
    state = fds.fit(
        step,
        step.init(params),
        fitting.Epochs(loader),
        steps=flags.steps,
        checkpoints=fds.Checkpoints(flags.out / "checkpoints", every=5),
        logging=fds.Logging([Printed(losses)], every=1),
    )
    fds.export(state, flags.out / "adapted", module=apply, overwrite=True)  # weights and adapters, streamed through rank 0
    return losses


class Printed:
    """A logger that prints, and keeps the losses."""

    def __init__(self, losses: list[float]) -> None:
        self.losses = losses

    def begin(self, done: int) -> None:
        print(f"begins after step {done}", flush=True)

    def log(self, done: int, numbers: dict[str, float]) -> None:
        self.losses.append(numbers["loss"])
        print(f"step {done}: loss {numbers['loss']:.3f}", flush=True)

    def close(self) -> None:
        pass


def merge(flags: argparse.Namespace) -> None:
    """Folds the adapters into the weights, on one process: a plain Llama for from_pretrained."""
    config = transformers.LlamaConfig.from_pretrained(flags.model)
    model = adapted(config, flags.lora)
    model.load_state_dict(load_file(flags.out / "adapted/model.safetensors"))
    plain = transformers.LlamaForCausalLM(config)
    weights = {name: value for name, value in model.state_dict().items() if "lora_" not in name}
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoRALinear)}
    plain.load_state_dict(weights | {f"{name}.weight": layer.merged() for name, layer in layers.items()})
    plain.save_pretrained(flags.out / "finetuned")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None, help="a folder with config and safetensors; else a tiny one")
    licence = Path(__file__).parents[1] / "LICENSE"
    parser.add_argument("--data", type=Path, default=licence, help="a text, read as bytes; by default the licence")
    parser.add_argument("--out", type=Path, default=Path("out/llama"))
    parser.add_argument("--ranks", type=int, default=2, help="local processes, where torchrun has not started them")
    parser.add_argument("--lora", type=int, default=4, metavar="RANK", help="of the adapters")
    parser.add_argument("--steps", type=int, default=6, help="in all, over restarts")
    parser.add_argument("--batch", type=int, default=8, help="rows of a step, over all ranks")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-2)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Makes a tiny model if none is named, starts the ranks or is one, and merges the adapters."""
    flags = parse(argv)
    distributed = "RANK" in os.environ  # torchrun has started this process
    if flags.model is None:
        if distributed:
            raise SystemExit("under torchrun name a model: --model FOLDER; without torchrun this script makes out/llama/tiny")
        flags.model = flags.out / "tiny"
        torch.manual_seed(1)
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)).save_pretrained(flags.model)
    if distributed:
        comm.init_distributed()
        finetune(flags)
    else:
        comm.spawn(finetune, flags, world_size=flags.ranks)
    if comm.world().rank == 0:
        merge(flags)
        print(f"merged: {flags.out / 'finetuned'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
