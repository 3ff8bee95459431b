"""Has DeepSpeed itself train a tiny model, save a checkpoint and train one step more; writes down what its engine had.

    python tests/tools/deepspeed_checkpoint.py FOLDER --stage 3 --dtype bf16 --ranks 2

Needs DeepSpeed (the extra ``bench``) and nothing of this project. FOLDER gets the checkpoint and, in ``truth.pt``, the
fp32 masters and moments by parameter name as DeepSpeed's own accessors give them, at the checkpoint and one step later.
"""

import argparse
import json
import os
import socket
import sys
import warnings
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

STEPS = 3
ROWS = 4  # a rank
ADAMW: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}


class Model(nn.Module):
    """Odd sizes, a tied head, a frozen layer, a buffer, and a norm without weight decay of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.blocks[1].requires_grad_(False)
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(self.norm(x) * self.scale)


def model() -> Model:
    torch.manual_seed(1)
    return Model()


def batch(step: int, rank: int) -> Tensor:
    return torch.randint(0, 11, (ROWS, 5), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.roll(-1, 1).flatten())


def groups(net: nn.Module) -> list[dict[str, Any]]:
    """Two param groups: matrices decay, vectors do not."""
    named = [p for p in net.parameters() if p.requires_grad]
    return [
        {"params": [p for p in named if p.dim() > 1], "weight_decay": ADAMW["weight_decay"]},
        {"params": [p for p in named if p.dim() <= 1], "weight_decay": 0.0},
    ]


def whole(engine: Any) -> dict[str, dict[str, Tensor]]:
    """Masters and moments of stage 0, which has no accessors: in half precision the optimizer's own parameters are masters."""
    names = [
        [name for name, p in engine.module.named_parameters() if p.requires_grad and (p.dim() > 1) == big] for big in (1, 0)
    ]
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    found = {}
    for own, group in zip(names, inner.param_groups, strict=True):
        for name, p in zip(own, group["params"], strict=True):
            found[name] = {"master": p, **{key: inner.state[p][key] for key in ("exp_avg", "exp_avg_sq")}}
    return {name: {key: value.detach().clone() for key, value in entry.items()} for name, entry in found.items()}


def run(rank: int, port: int, ranks: int, folder: str, stage: int, dtype: str, further: dict[str, Any]) -> None:
    warnings.simplefilter("ignore")
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in place.items()}, MASTER_ADDR="127.0.0.1")
    torch.set_num_threads(1)
    import deepspeed as ds
    import torch.distributed as dist
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    ds.utils.logger.setLevel("ERROR")
    ds.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # serves inference only, and would be compiled here
    if dtype == "fp16":  # torch computes in fp16 on any CPU; DeepSpeed asks for one that is fast at it
        ds.accelerator.get_accelerator().is_fp16_supported = lambda: True
    dist.init_process_group("gloo")
    net = model()
    zero = further.pop("zero_optimization", {})
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "zero_optimization": {"stage": stage, **zero},
        **further,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        dtype: {"enabled": True, **({"initial_scale_power": 4} if dtype == "fp16" else {})},
    }
    config.pop("fp32", None)
    optimizer = torch.optim.AdamW(groups(net), **ADAMW)
    engine, *_ = ds.initialize(model=net, optimizer=optimizer, config=config, dist_init_required=False)

    def train(step: int) -> float:
        tokens = batch(step, rank)
        loss = loss_of(engine(tokens), tokens)
        engine.backward(loss)
        engine.step()
        return float(loss)

    def truth() -> dict[str, dict[str, Tensor]]:
        found = {}
        if stage == 0:
            return whole(engine)
        if stage < 3:  # 0.19.8 links the moments after its first param group's first step, when the others have none
            engine.optimizer._hp_optimizer_states_linked = False
            engine.optimizer._lazy_init_hp_params_optimizer_state()
        for name, p in engine.module.named_parameters():
            if p.requires_grad:
                moments = {key: safe_get_full_optimizer_state(p, key) for key in ("exp_avg", "exp_avg_sq")}
                found[name] = {"master": safe_get_full_fp32_param(p), **moments}
        return {name: {key: value.detach().clone() for key, value in entry.items()} for name, entry in found.items()}

    losses = [train(step) for step in range(STEPS)]
    saved = truth()
    engine.save_checkpoint(folder)
    following = train(STEPS)
    after = truth()
    if rank == 0:
        torch.save({"saved": saved, "after": after, "losses": losses, "loss": following}, Path(folder) / "truth.pt")
    dist.barrier()
    dist.destroy_process_group()


def write(path: Path, *, stage: int, dtype: str, ranks: int = 2, **further: Any) -> Path:
    """A checkpoint in ``path``, by an engine whose config has these further entries."""
    path.mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = get_context("spawn")
    target = partial(run, port=port, ranks=ranks, folder=str(path), stage=stage, dtype=dtype, further=further)
    team = [context.Process(target=target, args=(rank,)) for rank in range(ranks)]
    for process in team:
        process.start()
    for process in team:
        process.join()
    if any(process.exitcode for process in team):
        sys.exit(f"DeepSpeed ended with exit codes {[process.exitcode for process in team]}")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stage", type=int, default=3, choices=(0, 1, 2, 3))
    parser.add_argument("--dtype", default="bf16", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--config", type=json.loads, default={}, help="further entries of DeepSpeed's config, as JSON")
    args = parser.parse_args()
    print(write(args.folder, stage=args.stage, dtype=args.dtype, ranks=args.ranks, **args.config))


if __name__ == "__main__":
    main()
