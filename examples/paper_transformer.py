"""A transformer as pure functions, made from its sizes: what ``fds.scaling`` counts, as a program that can be run."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import functional_ds as fds
from functional_ds.scaling import MeshPlan, Transformer


def fresh(model: Transformer) -> dict[str, Any]:
    """The params, whole and without values."""

    def leaf(*shape: int) -> Tensor:
        return torch.empty(*shape, device="meta")

    h, kv, f = model.width, model.key_width, model.mlp

    def layer() -> dict[str, Tensor]:
        shapes = {"q": (h, h), "k": (kv, h), "v": (kv, h), "o": (h, h), "up": (f, h), "down": (h, f)}
        shapes |= {"gate": (f, h)} if model.gated else {}
        made = {name: leaf(*shape) for name, shape in shapes.items()} | {"norm": leaf(h), "mlp_norm": leaf(h)}
        if model.biased:
            made |= {f"{name}_bias": leaf(shape[0]) for name, shape in shapes.items()}
            made |= {"norm_bias": leaf(h), "mlp_norm_bias": leaf(h)}
        return made

    params: dict[str, Any] = {"embed": leaf(model.vocabulary, h), "layers": [layer() for _ in range(model.layers)]}
    params["norm"] = leaf(h)
    params |= {"norm_bias": leaf(h)} if model.biased else {}
    params |= {"places": leaf(model.length, h)} if model.learned_positions else {}
    return params | ({} if model.tied else {"head": leaf(model.vocabulary, h)})


def tensor_plan(model: Transformer) -> dict[str, Any]:
    """Which leaves tensor parallelism cuts, and how."""
    plan: dict[str, Any] = {"embed": "vocab", r"layers\.\d+\.(q|k|v|up|gate)(_bias)?$": 0, r"layers\.\d+\.(o|down)$": 1}
    return plan if model.tied else plan | {"head": "vocab"}


def _norm(x: Tensor, p: dict[str, Tensor], name: str) -> Tensor:
    if f"{name}_bias" in p:
        return F.layer_norm(x, x.shape[-1:], p[name], p[f"{name}_bias"])
    return F.rms_norm(x, x.shape[-1:], p[name])


def layer_of(model: Transformer) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    """A layer as a function of its params and x, [rows, length, width]."""
    size = model.width // model.heads

    def layer(p: dict[str, Tensor], x: Tensor) -> Tensor:
        qkv = fds.tp.column(_norm(x, p, "norm"), [p[n] for n in "qkv"], bias=[p.get(f"{n}_bias") for n in "qkv"])
        q, k, v = (each.unflatten(-1, (-1, size)).transpose(1, 2) for each in qkv)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])
        x = x + fds.tp.row(attended.transpose(1, 2).flatten(2), p["o"], bias=p.get("o_bias"))
        names = ("up", "gate") if model.gated else ("up",)
        ups = fds.tp.column(_norm(x, p, "mlp_norm"), [p[n] for n in names], bias=[p.get(f"{n}_bias") for n in names])
        hidden = F.silu(ups[1]) * ups[0] if model.gated else F.gelu(ups[0])
        return x + fds.tp.row(hidden, p["down"], bias=p.get("down_bias"))

    return layer


def loss_of(model: Transformer, *, recompute: bool = False) -> Callable[[Any, dict[str, Tensor]], fds.Weighted]:
    """The loss of params, or of a rank's slices of them, and of a micro-batch's tokens and labels."""
    layer = fds.remat(layer_of(model)) if recompute else layer_of(model)

    def loss(p: dict[str, Any], batch: dict[str, Tensor]) -> fds.Weighted:
        x = fds.tp.embed(batch["input_ids"], p["embed"])
        x = x + p["places"][: x.shape[1]] if model.learned_positions else x
        for each in p["layers"]:
            x = layer(each, x)
        logits = fds.tp.column(_norm(x, p, "norm"), p["embed"] if model.tied else p["head"])
        return fds.tp.cross_entropy(logits, batch["labels"])

    return loss


def batch_of(model: Transformer, plan: MeshPlan) -> dict[str, Tensor]:
    """A rank's rows of a step."""
    ids = torch.zeros(plan.micro_batch * plan.micro_batches, model.length, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}
