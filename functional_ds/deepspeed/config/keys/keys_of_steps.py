"""DeepSpeed's top-level keys that say what a step does: batches, gradients, precision, optimizer, scheduler."""

from .config_key import ConfigKey, became, ignored, of_engine, refused

__all__ = ["KEYS"]

_DTYPES = ("fp32", "fp16", "bf16")
_WORDS = (
    *_DTYPES,
    "float32",
    "float16",
    "bfloat16",
    "float",
    "half",
    *(f"torch.{name}" for name in ("float32", "float16", "bfloat16")),
)
_ENGINE = "The engine of `deepspeed.initialize` does it; for a step alone `plan.value` has it."

BATCH = (
    became(
        "train_batch_size",
        "int",
        None,
        "`plan.batch`; the third of three is their quotient, rounded down, and three are checked.",
        least=1,
    ),
    became("train_micro_batch_size_per_gpu", "int", None, "`plan.batch`, as above.", least=1),
    became("gradient_accumulation_steps", "int", None, "`T.accumulate`.", least=1),
    of_engine("managed_gradient_accumulation", "bool", True, _ENGINE),
    of_engine("dataloader_drop_last", "bool", False, _ENGINE),
)

GRADIENTS = (
    became(
        "gradient_clipping",
        "float",
        1.0,
        "`T.clip`; 0 clips nothing. DeepSpeed clips at 1.0 where the key is left out.",
        least=0,
    ),
    became(
        "prescale_gradients",
        "bool",
        False,
        "`T.zero(gradient_predivide_factor=)`: gradients are divided by the number of ranks before they are summed.",
    ),
    became(
        "gradient_predivide_factor",
        "float",
        1.0,
        "`T.zero(gradient_predivide_factor=)`, unless `prescale_gradients`.",
        least=1e-30,
    ),
    became(
        "gradient_allreduce_op",
        "str",
        "mean",
        "With `sum`, gradients are multiplied by the number of ranks after the mean.",
        choices=("mean", "sum"),
    ),
    became(
        "communication_data_type",
        "str",
        None,
        "The policy's `reduce`: in which dtype gradients travel. By default the dtype of the params.",
        choices=_DTYPES,
    ),
    ignored(
        "seq_parallel_communication_data_type",
        "str",
        "fp32",
        "It is for sequence parallelism, which `T.sequence` configures.",
        choices=_DTYPES,
    ),
    ignored("disable_allgather", "bool", False, "DeepSpeed parses it and does nothing with it."),
    ignored(
        "allgather_size",
        "int",
        500_000_000,
        "A bucket's size for the boolean form of `zero_optimization`; units take its place.",
    ),
)

FP16 = (
    became("fp16.enabled", "bool", False, '`T.mixed_precision("fp16", ...)`.', auto=True),
    ignored("fp16.auto_cast", "bool", False, "Mixed precision casts the floats of every batch.", auto=True),
    became("fp16.loss_scale", "float", 0.0, "`T.StaticScale`; 0 is `T.DynamicScale`.", least=0, auto=True),
    became("fp16.initial_scale_power", "int", 16, "`DynamicScale(initial=2**power)`.", least=0, most=60, auto=True),
    became(
        "fp16.loss_scale_window",
        "int",
        1000,
        "`DynamicScale(window=, settle=1)`: the scale grows after window + 1 good steps, then after every window.",
        least=1,
        auto=True,
    ),
    became("fp16.hysteresis", "int", 2, "`DynamicScale(hysteresis=)`; DeepSpeed's stage 0 ignores it.", least=1, auto=True),
    became(
        "fp16.consecutive_hysteresis", "bool", False, "`DynamicScale(consecutive=)`; DeepSpeed's stage 0 ignores it.", auto=True
    ),
    became(
        "fp16.min_loss_scale",
        "int",
        1,
        "`DynamicScale(minimum=)`. In stages 1 to 3 a further overflow at the minimum raises, as in DeepSpeed.",
        least=1,
        auto=True,
    ),
    became("fp16.fp16_master_weights_and_grads", "bool", False, "The policy's `params=f16`: no masters.", auto=True),
)

BF16 = (
    became("bf16.enabled", "bool", False, '`T.mixed_precision("bf16")`.', auto=True),
    ignored("bf16.immediate_grad_update", "bool", False, "Gradients are summed as the backward pass yields them.", auto=True),
    became(
        "bf16.check_grad_overflow",
        "bool",
        True,
        "A loss scale of 1: a step whose gradients are not finite changes nothing. Stages 0 and 3 always check bf16.",
        auto=True,
    ),
    became("bf16.bf16_master_weights_and_grads", "bool", False, "The policy's `params=bf16`: no masters.", auto=True),
    became("bf16.bf16_optimizer_states", "bool", False, "`T.mixed_precision(states=torch.bfloat16)`.", auto=True),
)

DTYPES = (
    became("torch_autocast.enabled", "bool", False, "`T.mixed_precision(..., autocast=True)`, beside `bf16` and `fp16`, too."),
    became("torch_autocast.dtype", "str", None, "The policy's `compute`.", choices=_WORDS),
    refused(
        "torch_autocast.lower_precision_safe_modules",
        "list",
        None,
        "The policy names leaves, not classes of modules: `Policy(exceptions={pattern: dtype})`.",
    ),
    ignored(
        "data_types.grad_accum_dtype",
        "str",
        None,
        "Gradients of micro-batches are always summed in fp32, as with `fp32`. In stage 0 it must be the params' dtype.",
        choices=_WORDS,
    ),
    became("data_types.param_dtype", "str", None, "It must be the dtype that fp16 or bf16 enables.", choices=_WORDS),
    refused("data_types.buffer_dtype", "str", None, "Buffers keep their dtype; cast them in the module.", choices=_WORDS),
    ignored("data_types.keep_in_fp32_modules", "any", "auto", "It is about buffers, which always keep their dtype."),
)

OPTIMIZER = (
    became("optimizer.type", "str", None, "`plan.optimizer`; the names are below."),
    became("optimizer.params", "dict", {}, "The optimizer's arguments; which there are depends on its type."),
    ignored("optimizer.legacy_fusion", "bool", False, "It chooses among DeepSpeed's kernels."),
    ignored(
        "zero_allow_untested_optimizer", "bool", False, "ZeRO takes every elementwise optimizer, and says which it cannot take."
    ),
    ignored("zero_force_ds_cpu_optimizer", "bool", True, "`T.offload` runs any optimizer on the host."),
    became("scheduler.type", "str", None, "`plan.schedule`; the names are below, and those of `torch.optim.lr_scheduler`."),
    became("scheduler.params", "dict", {}, "The scheduler's arguments; which there are depends on its type."),
)

KEYS: dict[str, tuple[ConfigKey, ...]] = {
    "Batch": BATCH,
    "Gradients": GRADIENTS,
    "fp16": FP16,
    "bf16": BF16,
    "Other dtypes": DTYPES,
    "Optimizer and scheduler": OPTIMIZER,
}
