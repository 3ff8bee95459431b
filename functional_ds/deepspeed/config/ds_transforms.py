"""The transforms that a DeepSpeed config asks for."""

from collections.abc import Callable
from typing import Any

import torch

from functional_ds import comm
from functional_ds.sharding.grouping import UnitOf
from functional_ds.step.step import Transform
from functional_ds.transforms.precision.loss_scale import DynamicScale, LossScale, NoScale, StaticScale
from functional_ds.transforms.precision.mixed_precision import mixed_precision
from functional_ds.transforms.precision.policy import Policy
from functional_ds.transforms.zero.zero import zero

from .config_reader import Settings
from .keys.config_key import Fate

_ZERO = "zero_optimization"
_PLACES = {"cpu": "cpu", "nvme": "disk"}
_WORDS = {"half": "f16", "float": "f32"}


def precision(s: Settings) -> Transform | None:
    """Mixed precision, or only DeepSpeed's check that gradients are finite, for this stage."""
    fp16, bf16, autocast = s["fp16.enabled"], s["bf16.enabled"], s["torch_autocast.enabled"]
    if fp16 and bf16:
        s.refuse("bf16.enabled", "fp16 is enabled, too; enable one of them")
        return None
    held = "f16" if fp16 else "bf16" if bf16 else "f32"
    dtype = word_of(s["torch_autocast.dtype"] or "bf16") if autocast else held
    named = s["data_types.param_dtype"]
    if named is not None and word_of(named) != held:
        s.refuse("data_types.param_dtype", f"the params are {held}; leave it out, or enable fp16 or bf16")
        return None
    if autocast and dtype != held and (held, dtype) != ("f32", "bf16"):
        why = f"params are {held}" if held != "f32" else "without fp16.enabled it needs a second loss scaler, which is not here"
        s.refuse("torch_autocast.dtype", f"{why}; use {'bf16' if held == 'f32' else held}")
        return None
    sums = s["data_types.grad_accum_dtype"]
    if sums and word_of(sums) != held and not s[f"{_ZERO}.stage"]:
        s.refuse("data_types.grad_accum_dtype", f"DeepSpeed's stage 0 sums in the params' dtype, {held}; leave it out")
    low = (fp16 and s["fp16.fp16_master_weights_and_grads"]) or (bf16 and s["bf16.bf16_master_weights_and_grads"])
    states = torch.bfloat16 if bf16 and s["bf16.bf16_optimizer_states"] else None
    if states is not None and not low:
        s.refuse("bf16.bf16_optimizer_states", "DeepSpeed wants bf16_master_weights_and_grads with it")
    if low and s[f"{_ZERO}.stage"] == 0:
        s.refuse(f"{'fp16.fp16' if fp16 else 'bf16.bf16'}_master_weights_and_grads", "DeepSpeed has it in stages 1 to 3 alone")
    sent = s["communication_data_type"]
    reduce = word_of(sent) if sent else dtype
    policy = Policy.parse(f"params={dtype if low else 'f32'},compute={dtype},output=f32,reduce={reduce}")
    scale = _loss_scale(s, dtype)
    if dtype == "f32" and reduce == "f32" and isinstance(scale, NoScale):
        return None
    return mixed_precision(policy, scale, autocast=autocast, states=states)


def word_of(name: str) -> str:
    """This library's name of a config's dtype: "f32", "f16", "bf16"."""
    last = name.removeprefix("torch.")
    return _WORDS.get(last, last.replace("float", "f").replace("fp", "f"))


def _loss_scale(s: Settings, dtype: str) -> LossScale:
    stage = s[f"{_ZERO}.stage"]
    if dtype == "f16":
        if s["fp16.loss_scale"]:
            return StaticScale(s["fp16.loss_scale"])
        return DynamicScale(
            2.0 ** s["fp16.initial_scale_power"],
            window=s["fp16.loss_scale_window"],
            hysteresis=s["fp16.hysteresis"] if stage else 1,
            consecutive=bool(stage) and s["fp16.consecutive_hysteresis"],
            minimum=float(s["fp16.min_loss_scale"]),
            maximum=2.0**60,
            settle=1,
        )
    return StaticScale(1.0) if checks_finite(s) else NoScale()


def checks_finite(s: Settings) -> bool:
    """Whether DeepSpeed skips a step whose gradients are not finite.

    Stage 3 always does, as do half-precision params in stage 0. In stages 1 and 2 bf16 does by ``check_grad_overflow``, fp32 by
    the norm, and stage 1 with bf16 and fp32 sums always. Stage 0 in fp32 never does.
    """
    stage, bf16 = s[f"{_ZERO}.stage"], s["bf16.enabled"]
    if stage == 3:
        return True
    if stage == 0:
        return bool(bf16)
    if sums_bf16_in_fp32(s.__getitem__):
        return True
    return bool(s["bf16.check_grad_overflow"] if bf16 else s[f"{_ZERO}.compute_grad_norm"])


def sums_bf16_in_fp32(value: Callable[[str], Any]) -> bool:
    """Whether a config has DeepSpeed's ``BF16_Optimizer``: bf16 in stage 1, with sums in fp32, on the device."""
    sums = value("data_types.grad_accum_dtype")
    is_bf16 = value(f"{_ZERO}.stage") == 1 and value("bf16.enabled")
    return bool(is_bf16 and sums and word_of(sums) == "f32" and value(f"{_ZERO}.offload_optimizer.device") == "none")


def sharding(s: Settings, world_size: int, group: comm.Group | None, units: UnitOf | None) -> Transform:
    """ZeRO, with this stage's options."""
    stage = s[f"{_ZERO}.stage"]
    options: dict[str, Any] = {}
    factor = float(world_size) if s["prescale_gradients"] else s["gradient_predivide_factor"]
    if factor != 1:
        options["gradient_predivide_factor"] = factor
    if stage and not s[f"{_ZERO}.reduce_scatter"]:
        options["aggregate"] = "all_reduce"
    if stage == 3:
        options |= _stage_3(s, world_size)
        if units is not None:
            options["unit_of"] = units
    else:
        _only_in_stage_3(s)
    return zero(stage, group, **options)


def _only_in_stage_3(s: Settings) -> None:
    for name in ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients"):
        path = f"{_ZERO}.{name}"
        if s[path] is True or s[path] > 1:
            s.refuse(path, "it is for stage 3, and DeepSpeed reads it nowhere else")
    if s[f"{_ZERO}.compute_grad_norm"] is False and s[f"{_ZERO}.stage"] == 0:
        s.refuse(f"{_ZERO}.compute_grad_norm", "DeepSpeed allows false in stages 1 and 2 alone")


def _stage_3(s: Settings, world_size: int) -> dict[str, Any]:
    given = {name: s[f"{_ZERO}.{name}"] for name in ("prefetch_bucket_size", "param_persistence_threshold")}
    options: dict[str, Any] = {"prefetch": min(1, given["prefetch_bucket_size"])}
    if offload_places(s)[1] == "device":
        options["persistence_threshold"] = given["param_persistence_threshold"]
    elif f"{_ZERO}.param_persistence_threshold" in s:
        s.note(f"{_ZERO}.param_persistence_threshold", Fate.IGNORED, "With `offload_param` no params stay on the device.")
    ranks = s[f"{_ZERO}.zero_hpz_partition_size"]
    if ranks > 1:
        if world_size % ranks:
            s.refuse(f"{_ZERO}.zero_hpz_partition_size", f"{world_size} ranks are not a whole number of groups of {ranks}")
        options |= {"intra_node": ranks, "hpz": True}
    if s[f"{_ZERO}.zero_quantized_weights"]:
        options["all_gather"] = comm.codecs.compressed(comm.all_gather, comm.codecs.Blocks(8))
    if s[f"{_ZERO}.zero_quantized_gradients"]:
        if "aggregate" in options or not s[f"{_ZERO}.reduce_scatter"]:
            s.refuse(f"{_ZERO}.zero_quantized_gradients", "it needs reduce_scatter")
        options["reduce_scatter"] = comm.codecs.compressed(comm.reduce_scatter, comm.codecs.Blocks(4))
    if not s[f"{_ZERO}.compute_grad_norm"]:
        s.refuse(f"{_ZERO}.compute_grad_norm", "DeepSpeed allows false in stages 1 and 2 alone")
    return options


def offload_places(s: Settings) -> tuple[str, str]:
    """Where the optimizer's state and the params are stored: "device", "cpu" or "disk"."""
    places = []
    for block, old in (("offload_optimizer", "cpu_offload"), ("offload_param", "cpu_offload_param")):
        word = s[f"{_ZERO}.{block}.device"]
        place = _PLACES.get("cpu" if s[f"{_ZERO}.{old}"] else word, "device")
        if block == "offload_param" and s[f"{_ZERO}.stage"] < 3:
            for path in (f"{_ZERO}.{block}.device", f"{_ZERO}.{old}"):
                if place != "device" and path in s:
                    s.note(path, Fate.IGNORED, "It is for stage 3, as in DeepSpeed, which ignores it below: params stay whole.")
            place = "device"
        places.append(place)
    order = ("device", "cpu", "disk")
    return max(places, key=order.index), places[1]  # where params are updated, the state must be


def offloading(s: Settings) -> dict[str, Any] | None:
    """The arguments of ``T.offload``, which checks its folder as soon as it is called."""
    optimizer, params = offload_places(s)
    stage = s[f"{_ZERO}.stage"]
    if optimizer == "device":
        return None
    if stage == 0:
        where = f"{_ZERO}.cpu_offload" if s[f"{_ZERO}.cpu_offload"] else f"{_ZERO}.offload_optimizer.device"
        s.refuse(where, "DeepSpeed offloads in stages 1 to 3 alone; set stage to 1")
        return None
    options: dict[str, Any] = {"optimizer": optimizer}
    if params != "device":
        options["params"] = params
    ratio = s[f"{_ZERO}.offload_optimizer.ratio"]
    if ratio != 1:
        if stage != 3 or params != "device":
            s.refuse(
                f"{_ZERO}.offload_optimizer.ratio", "a part of the state can be offloaded in stage 3, with params on the device"
            )
        options["ratio"] = ratio
    if "disk" in (optimizer, params):
        path = s[f"{_ZERO}.offload_optimizer.nvme_path"] or s[f"{_ZERO}.offload_param.nvme_path"]
        if path is None:
            s.refuse(f"{_ZERO}.offload_optimizer.nvme_path", "nvme needs a folder")
        options["path"] = path
    return options
