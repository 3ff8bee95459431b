"""Configs in the manner of those that DeepSpeed's documentation, its examples and programs around it show: keys and values.

Each has the number of ranks it is for, what takes the place of "auto", and the keys for which it is refused.
"""

from typing import Any

import attrs

__all__ = ["EXAMPLES", "Example"]

_HF = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "optimizer.params.lr": 2e-5,
    "optimizer.params.betas": [0.9, 0.999],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.0,
    "scheduler.params.warmup_min_lr": 0,
    "scheduler.params.warmup_max_lr": 2e-5,
    "scheduler.params.warmup_num_steps": 100,
    "scheduler.params.total_num_steps": 1000,
}
_AUTO_BATCH = {
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
_AUTO_ADAMW = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
_FP16 = {
    "enabled": True,
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
_AUTO_FP16 = {**_FP16, "enabled": "auto"}
_CPU = {"device": "cpu", "pin_memory": True}
_BUCKETS = {
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
}
_STAGE_3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
_ADAM = {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}}
_ONE_BIT = {"lr": 4e-4, "weight_decay": 0.01, "bias_correction": False, "cuda_aware": False, "comm_backend_name": "nccl"}
_CYCLE = {
    "cycle_min_lr": 0.004,
    "cycle_max_lr": 0.015,
    "cycle_first_step_size": 1000,
    "cycle_second_step_size": 100,
    "cycle_first_stair_count": 100,
    "cycle_second_stair_count": 100,
    "decay_step_size": 1000,
    "decay_lr_rate": 0.01,
}


@attrs.frozen
class Example:
    """A config, its ranks, its words for "auto", and what of it is refused."""

    config: dict[str, Any]
    ranks: int = 1
    auto: dict[str, Any] = attrs.field(factory=dict)
    refused: tuple[str, ...] = ()


def _hf(config: dict[str, Any], *refused: str) -> Example:
    return Example({**_AUTO_BATCH, "steps_per_print": 2000, "wall_clock_breakdown": False, **config}, 8, _HF, refused)


def _warmup(kind: str, *names: str) -> dict[str, Any]:
    return {"type": kind, "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", *names), "auto")}


EXAMPLES: dict[str, Example] = {
    # transformers
    "transformers zero 2": _hf(
        {
            "fp16": _AUTO_FP16,
            "bf16": {"enabled": "auto"},
            "optimizer": _AUTO_ADAMW,
            "scheduler": _warmup("WarmupLR"),
            "zero_optimization": {"stage": 2, "offload_optimizer": _CPU, **_BUCKETS},
        }
    ),
    "transformers zero 3": _hf(
        {
            "fp16": _AUTO_FP16,
            "bf16": {"enabled": "auto"},
            "optimizer": _AUTO_ADAMW,
            "scheduler": _warmup("WarmupLR"),
            "zero_optimization": {**_STAGE_3, "offload_optimizer": _CPU, "offload_param": _CPU},
        }
    ),
    "transformers, devices of none": _hf(
        {
            "optimizer": _AUTO_ADAMW,
            "scheduler": _warmup("WarmupDecayLR", "total_num_steps"),
            "zero_optimization": {**_STAGE_3, "offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"}},
        }
    ),
    "transformers, numbers": Example(
        {
            "train_batch_size": 16,
            "fp16": _FP16,
            "zero_optimization": {
                **_STAGE_3,
                "offload_optimizer": _CPU,
                "offload_param": _CPU,
                "sub_group_size": 1e14,
                "stage3_prefetch_bucket_size": 0,
                "stage3_param_persistence_threshold": 0,
            },
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500}},
        },
        2,
    ),
    "transformers, a bucket of nothing": _hf(
        {"optimizer": _AUTO_ADAMW, "zero_optimization": {"stage": 3, "reduce_bucket_size": 0}},
        "zero_optimization.reduce_bucket_size",
    ),
    "transformers, torch's adam": _hf(
        {"optimizer": {"type": "AdamW", "params": {**_AUTO_ADAMW["params"], "torch_adam": True, "adam_w_mode": True}}}  # type: ignore[dict-item]
    ),
    "axolotl zero 1": _hf(
        {
            "zero_optimization": {"stage": 1, "overlap_comm": True},
            "bf16": {"enabled": "auto"},
            "fp16": {"enabled": "auto", "auto_cast": False, "loss_scale": 0, "initial_scale_power": 32, "hysteresis": 2},
            "optimizer": _AUTO_ADAMW,
            "scheduler": _warmup("WarmupDecayLR", "total_num_steps"),
        }
    ),
    "a scale below one": _hf({"fp16": {**_AUTO_FP16, "min_loss_scale": 1e-5}}, "fp16.min_loss_scale"),
    "a scheduler inside of the optimizer": Example(
        {"train_micro_batch_size_per_gpu": 4, "optimizer": {**_ADAM, "scheduler": _warmup("WarmupLR")}},
        1,
        {},
        ("optimizer.scheduler",),
    ),
    "a resumed scheduler": _hf(
        {
            "optimizer": _AUTO_ADAMW,
            "scheduler": {"type": "WarmupLR", "params": {"last_batch_iteration": -1, "warmup_max_lr": 1e-4}},
            "zero_allow_untested_optimizer": True,
            "tensorboard": {"enabled": True, "output_path": "logs/", "job_name": "train"},
        }
    ),
    # DeepSpeed's documentation
    "the first example": Example(
        {
            "train_batch_size": 8,
            "gradient_accumulation_steps": 1,
            "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
            "fp16": {"enabled": True},
            "zero_optimization": True,
        }
    ),
    "every log": Example(
        {
            "train_batch_size": 8,
            "wall_clock_breakdown": True,
            "dump_state": True,
            "flops_profiler": {
                "enabled": True,
                "profile_step": 1,
                "module_depth": -1,
                "top_modules": 3,
                "detailed": True,
                "output_file": None,
            },
            "comms_logger": {"enabled": True, "verbose": False, "prof_all": True, "debug": False, "prof_ops": ["all_reduce"]},
            "csv_monitor": {"enabled": True, "output_path": "output/", "job_name": "train"},
            "wandb": {"enabled": True, "group": "g", "team": "t", "project": "p"},
            "comet": {"enabled": True, "workspace": "w", "project": "p", "samples_log_interval": 50, "experiment_name": "e"},
            "checkpoint": {
                "tag_validation": "Warn",
                "load_universal": False,
                "use_node_local_storage": False,
                "parallel_write": {"pipeline_stage": False},
            },
            "data_types": {"grad_accum_dtype": "fp32"},
            "timers": {"throughput": {"enabled": True, "synchronized": False}},
        }
    ),
    "activation checkpointing": Example(
        {
            "train_batch_size": 8,
            "activation_checkpointing": {
                "partition_activations": False,
                "cpu_checkpointing": False,
                "contiguous_memory_optimization": False,
                "number_checkpoints": None,
                "synchronize_checkpoint_boundary": False,
                "profile": False,
            },
        }
    ),
    "ZeRO++": Example(
        {
            "train_batch_size": 8,
            "zero_optimization": {
                "stage": 3,
                "reduce_bucket_size": 10000000,
                "reduce_scatter": True,
                "zero_quantized_weights": True,
                "zero_hpz_partition_size": 4,
                "zero_quantized_gradients": True,
                "contiguous_gradients": True,
                "overlap_comm": True,
            },
        },
        8,
    ),
    "MiCS": Example(
        {
            "train_batch_size": 8,
            "zero_optimization": {"stage": 3, "mics_shard_size": 4, "mics_hierarchical_params_gather": True},
        },
        8,
        {},
        ("zero_optimization.mics_shard_size", "zero_optimization.mics_hierarchical_params_gather"),
    ),
    "Muon": Example(
        {
            "train_batch_size": 8,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2},
            "optimizer": {
                "type": "Muon",
                "params": {"lr": 0.001, "momentum": 0.9, "weight_decay": 0.0, "muon_lr": 0.001, "ns_method": "gram"},
            },
        }
    ),
    "autocast": Example(
        {"train_batch_size": 8, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}, "zero_optimization": {"stage": 3}}
    ),
    "autocast with named modules": Example(
        {
            "train_batch_size": 8,
            "torch_autocast": {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": ["torch.nn.Linear"]},
        },
        1,
        {},
        ("torch_autocast.lower_precision_safe_modules",),
    ),
    "data efficiency": Example(
        {
            "train_batch_size": 8,
            "data_efficiency": {
                "enabled": True,
                "seed": 1234,
                "data_routing": {"enabled": True, "random_ltd": {"enabled": True}},
            },
        },
        1,
        {},
        ("data_efficiency.enabled",),
    ),
    "ZenFlow": Example(
        {
            "train_batch_size": 32,
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": _CPU,
                "zenflow": {"topk_ratio": 0.1, "update_interval": 4, "full_warm_up_rounds": 0, "overlap_step": True},
            },
        },
        1,
        {},
        ("zero_optimization.zenflow",),
    ),
    # DeepSpeedExamples
    "cifar": Example(
        {
            "train_batch_size": 16,
            "steps_per_print": 2000,
            "optimizer": _ADAM,
            "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}},
            "gradient_clipping": 1.0,
            "prescale_gradients": False,
            "bf16": {"enabled": False},
            "fp16": {**_FP16, "fp16_master_weights_and_grads": False, "loss_scale_window": 500, "initial_scale_power": 15},
            "wall_clock_breakdown": False,
            "zero_optimization": {"stage": 0, **_BUCKETS, "cpu_offload": False},
        },
        2,
    ),
    "cifar, an old offload": Example(
        {
            "train_batch_size": 4,
            "optimizer": _ADAM,
            "fp16": {**_FP16, "fp16_master_weights_and_grads": True},
            "zero_optimization": {"stage": 2, **_BUCKETS, "cpu_offload": True},
        }
    ),
    "QANet, one cycle": Example(
        {
            "train_batch_size": 512,
            "train_micro_batch_size_per_gpu": 32,
            "optimizer": _ADAM,
            "scheduler": {"type": "OneCycle", "params": _CYCLE},
        },
        4,
    ),
    "QANet, one cycle of the rate": Example(
        {
            "train_batch_size": 512,
            "optimizer": _ADAM,
            "scheduler": {"type": "OneCycle", "params": {**_CYCLE, "cycle_momentum": False}},
        },
        4,
    ),
    "BERT with LAMB": Example(
        {
            "train_batch_size": 65536,
            "train_micro_batch_size_per_gpu": 64,
            "prescale_gradients": False,
            "optimizer": {
                "type": "Lamb",
                "params": {"lr": 11e-3, "weight_decay": 0.01, "bias_correction": False, "max_coeff": 0.3, "min_coeff": 0.01},
            },
            "gradient_clipping": 1.0,
            "fp16": {"enabled": True, "loss_scale": 0},
        },
        64,
    ),
    "cifar with LAMB": Example(
        {
            "train_batch_size": 1024,
            "train_micro_batch_size_per_gpu": 16,
            "optimizer": {"type": "Lamb", "params": {"lr": 5e-3, "weight_decay": 0.01, "max_coeff": 0.3, "min_coeff": 0.01}},
            "fp16": {"enabled": False, "loss_scale": 0},
        },
        8,
    ),
    "imagenet": Example(
        {
            "train_batch_size": 256,
            "gradient_accumulation_steps": 1,
            "optimizer": _ADAM,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "fp16": {"enabled": True, "auto_cast": True},
            "gradient_clipping": 0,
            "cuda_visible_devices": 0,
        },
        8,
        {},
        ("cuda_visible_devices",),
    ),
    "SQuAD, clipped by the optimizer": Example(
        {
            "train_batch_size": 24,
            "train_micro_batch_size_per_gpu": 6,
            "optimizer": {"type": "Adam", "params": {"lr": 3e-5, "max_grad_norm": 1.0, "bias_correction": False}},
            "fp16": {"enabled": True},
        },
        4,
        {},
        ("optimizer.params.max_grad_norm",),
    ),
    "SQuAD": Example(
        {
            "train_batch_size": 24,
            "train_micro_batch_size_per_gpu": 3,
            "optimizer": {"type": "Adam", "params": {"lr": 3e-5, "weight_decay": 0.0, "bias_correction": False}},
            "gradient_clipping": 1.0,
            "fp16": {"enabled": True},
        },
        4,
    ),
    "alpaca with LoRA": Example(
        {
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": 1,
            "fp16": {**_FP16, "initial_scale_power": 8},
            "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
            "zero_optimization": {
                "stage": 3,
                "stage3_gather_16bit_weights_on_model_save": False,
                "offload_optimizer": _CPU,
                "offload_param": _CPU,
                "overlap_comm": False,
                "stage3_param_persistence_threshold": 1e5,
                "stage3_prefetch_bucket_size": 1e8,
            },
        },
        2,
    ),
    "GPT with fewer tokens in layers": Example(
        {
            "train_batch_size": 4,
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": _ADAM,
            "prescale_gradients": True,
            "data_efficiency": {
                "enabled": True,
                "data_routing": {"enabled": True, "random_ltd": {"enabled": True, "total_layer_num": 24}},
            },
        },
        2,
        {},
        ("data_efficiency.enabled",),
    ),
    "BERT with sparse attention": Example(
        {"train_batch_size": 64, "sparse_attention": {"mode": "fixed", "block": 16}}, 1, {}, ("sparse_attention",)
    ),
    "BERT with 1-bit Adam": Example(
        {
            "train_micro_batch_size_per_gpu": 16,
            "optimizer": {"type": "OneBitAdam", "params": {**_ONE_BIT, "freeze_step": 23000}},
            "fp16": {"enabled": True, "loss_scale": 0},
        },
        4,
    ),
    "BERT with 1-bit Adam, clipped": Example(
        {
            "train_micro_batch_size_per_gpu": 16,
            "optimizer": {"type": "OneBitAdam", "params": {**_ONE_BIT, "freeze_step": 23000}},
            "gradient_clipping": 1.0,
        },
        4,
        {},
        ("gradient_clipping",),
    ),
    "BERT with 0/1 Adam": Example(
        {
            "train_batch_size": 4096,
            "train_micro_batch_size_per_gpu": 16,
            "optimizer": {"type": "ZeroOneAdam", "params": {**_ONE_BIT, "var_freeze_step": 12500, "local_step_scaler": 32678}},
            "gradient_clipping": 0,
        },
        8,
    ),
    "BERT with 1-bit LAMB": Example(
        {"train_batch_size": 64, "optimizer": {"type": "OneBitLamb", "params": {"lr": 11e-3, "freeze_step": 1000}}},
        1,
        {},
        ("optimizer.type",),
    ),
    "BERT with layer drop": Example(
        {"train_batch_size": 64, "progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.001}},
        1,
        {},
        ("progressive_layer_drop",),
    ),
    "Megatron, an offload that overlaps": Example(
        {
            "train_batch_size": 30,
            "gradient_accumulation_steps": 3,
            "zero_optimization": {"stage": 2, "cpu_offload": True, "comm_overlap": True, "reduce_bucket_size": 50000000},
            "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
            "fp16": {"enabled": True, "loss_scale": 4096},
        },
        10,
        {},
        ("zero_optimization.comm_overlap",),
    ),
    "Megatron, infinity": Example(
        {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {
                "stage": 3,
                "stage3_max_live_parameters": 1e9,
                "sub_group_size": 1e8,
                "offload_optimizer": {
                    "device": "nvme",
                    "nvme_path": "/nvme",
                    "buffer_count": 4,
                    "pipeline_read": False,
                    "pin_memory": True,
                },
                "offload_param": {"device": "nvme", "nvme_path": "/nvme", "max_in_cpu": 1, "pin_memory": True},
            },
            "fp16": {"enabled": True, "loss_scale": 1024},
            "aio": {"block_size": 1048576, "queue_depth": 16, "single_submit": False, "overlap_events": True},
        }
    ),
    "Megatron, infinity, misspelt": Example(
        {
            "train_batch_size": 4,
            "zero_optimization": {"stage": 3, "stage3_param_persitance_threshold": 1e5},
            "aio": {"thread_count": 2},
        },
        1,
        {},
        ("zero_optimization.stage3_param_persitance_threshold", "aio.thread_count"),
    ),
    "a curriculum": Example(
        {"train_batch_size": 4, "curriculum_learning": {"enabled": True, "curriculum_type": "seqlen"}},
        1,
        {},
        ("curriculum_learning",),
    ),
    "mixture of quantization": Example(
        {"train_batch_size": 4, "quantize_training": {"enabled": True, "quantize_bits": {"start_bits": 16, "target_bits": 8}}},
        1,
        {},
        ("quantize_training",),
    ),
    "compression": Example(
        {"train_batch_size": 4, "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}},
        1,
        {},
        ("compression_training",),
    ),
    "a tuner": Example(
        {
            "train_micro_batch_size_per_gpu": "auto",
            "autotuning": {
                "enabled": True,
                "overwrite": False,
                "fast": True,
                "arg_mappings": {"gradient_accumulation_steps": "--steps"},
            },
        },
        1,
        {"train_micro_batch_size_per_gpu": 2},
        ("autotuning.enabled",),
    ),
    "AutoTP": _hf(
        {
            "bf16": {"enabled": "auto"},
            "optimizer": _AUTO_ADAMW,
            "zero_optimization": {"stage": 2, "gather_16bit_weights_on_model_save": True},
            "tensor_parallel": {"autotp_size": 4},
        },
        "tensor_parallel.autotp_size",
    ),
    "AutoEP": Example(
        {
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 1},
            "expert_parallel": {"enabled": True, "autoep_size": 8, "preset_model": "qwen3_5_moe", "load_balance_coeff": None},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {"total_num_steps": 1000, "warmup_num_steps": 100, "cos_min_ratio": 0.001, "warmup_type": "linear"},
            },
        },
        8,
        {},
        ("expert_parallel.enabled",),
    ),
    "leaf modules": Example(
        {
            "train_batch_size": 8,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3, "leaf_module": {"classes": ["SparseMoeBlock"]}},
        }
    ),
    "AutoSP": Example(
        {
            "train_batch_size": 8,
            "compile": {"deepcompile": True, "passes": ["autosp"]},
            "sequence_parallel_size": 4,
            "data_parallel_size": 2,
        },
        2,
        {},
        ("compile.deepcompile", "sequence_parallel_size"),
    ),
    "chat, a hybrid engine": Example(
        {
            "train_batch_size": 32,
            "train_micro_batch_size_per_gpu": 4,
            "steps_per_print": 10,
            "zero_optimization": {
                "stage": 2,
                "offload_param": {"device": "none"},
                "offload_optimizer": {"device": "none"},
                "stage3_param_persistence_threshold": 1e4,
                "stage3_max_live_parameters": 3e7,
                "stage3_prefetch_bucket_size": 3e7,
                "memory_efficient_linear": False,
            },
            "fp16": {"enabled": True, "loss_scale_window": 100},
            "gradient_clipping": 1.0,
            "prescale_gradients": False,
            "wall_clock_breakdown": False,
            "hybrid_engine": {"enabled": True, "max_out_tokens": 512, "inference_tp_size": 1, "pin_parameters": True},
        },
        8,
        {},
        ("hybrid_engine.enabled",),
    ),
    # others
    "accelerate": Example(
        {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"}},
            "steps_per_print": float("inf"),
            "bf16": {"enabled": True},
            "fp16": {"enabled": False},
        },
        2,
        {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2},
    ),
    "LLaMA-Factory": Example(
        {
            "train_batch_size": 8,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2, **_BUCKETS, "round_robin_gradients": True},
            "monitor_config": {"enabled": True},
            "comms_config": {"verbose": False},
        },
        1,
        {},
        ("monitor_config", "comms_config"),
    ),
}
