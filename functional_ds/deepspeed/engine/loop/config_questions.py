"""An engine's queries that only need its config, by DeepSpeed's names."""

from collections.abc import Callable
from typing import Any

import torch

from functional_ds import comm
from functional_ds.deepspeed.config.ds_optimizers import rule_of
from functional_ds.deepspeed.config.ds_plan import ConfigPlan
from functional_ds.deepspeed.config.ds_transforms import word_of
from functional_ds.deepspeed.config.keys.config_table import QUESTIONS

_DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
_STAGE, _STATES, _PARAMS = (f"zero_optimization.{key}" for key in ("stage", "offload_optimizer.device", "offload_param.device"))


def _asks(path: str, means: Callable[[Any], Any] = lambda value: value) -> Callable[[Any], Any]:
    """A method that returns a key's value, or what follows from it."""

    def answer(self: Any) -> Any:
        return means(self.plan.value(path))

    answer.__doc__ = f"By ``{path}``."
    return answer


def _no(self: Any) -> bool:
    """False: it is unsupported, and a config that enables it raises an error."""
    return False


class ConfigQuestions:
    """Methods of engines that only read a plan. ``plan.value(path)`` gives any key.

    Law: each returns what DeepSpeed's engine does for the same config, except the dtype of sums in ``get_data_types``, which is
    fp32 here, and ``zero_gather_16bit_weights_on_model_save``.
    """

    plan: ConfigPlan

    @property
    def config(self) -> dict[str, Any]:
        """The complete config."""
        return self.plan.to_ds_config()

    # -- ranks ---------------------------------------------------------------------------------------------------------

    @property
    def local_rank(self) -> int:
        """This rank's local rank on its host."""
        return comm.get_local_rank()

    @property
    def global_rank(self) -> int:
        """This rank's rank in the world."""
        return comm.world().rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return comm.world().size

    @property
    def dp_world_size(self) -> int:
        """The number of data-parallel ranks."""
        return self.plan.batch.world_size

    @property
    def mp_world_size(self) -> int:
        """1: an engine here has no model parallelism."""
        return 1

    def get_model_parallel_rank(self) -> int:
        """0: engines here have no model parallelism except a pipeline's."""
        return 0

    get_tensor_parallel_rank = get_model_parallel_rank

    def get_sequence_parallel_group(self) -> None:
        """None: sequence parallelism is ``T.sequence``'s."""

    # -- precision and gradients ---------------------------------------------------------------------------------------

    postscale_gradients = _asks("prescale_gradients", lambda prescales: not prescales)
    dynamic_loss_scale = _asks("fp16.loss_scale", lambda scale: not scale)
    loss_scale = _asks("fp16.loss_scale", float)  # 0 if it is dynamic; ``optimizer.cur_scale`` multiplies the next loss
    initial_dynamic_scale = _asks("fp16.initial_scale_power", lambda power: 1 << int(power))

    @property
    def communication_data_type(self) -> torch.dtype:
        """The dtype that gradients are summed in over ranks: ``communication_data_type``, or the forward pass's."""
        asked = self.plan.value("communication_data_type")
        return _DTYPES[word_of(asked)] if asked else self.get_data_types()[0]

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of the forward pass and of sums of gradients."""
        half = next((name for name in ("fp16", "bf16") if self.plan.value(f"{name}.enabled")), "fp32")
        return _DTYPES[word_of(half)], torch.float32

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """``torch_autocast.dtype``; None where it is off."""
        return _DTYPES[word_of(self.plan.value("torch_autocast.dtype"))] if self.plan.value("torch_autocast.enabled") else None

    # -- optimizer and scheduler ---------------------------------------------------------------------------------------

    optimizer_name = _asks("optimizer.type", lambda name: name.lower() if name and rule_of(name) else name)

    def optimizer_params(self) -> dict[str, Any]:
        """``optimizer.params``."""
        return dict(self.config.get("optimizer", {}).get("params", {}))

    def scheduler_params(self) -> dict[str, Any] | None:
        """``scheduler.params``; None without a scheduler."""
        return dict(self.config["scheduler"].get("params", {})) if self.plan.value("scheduler.type") else None

    # -- logs and data -------------------------------------------------------------------------------------------------

    steps_per_print = _asks("steps_per_print", lambda steps: int(steps) if steps and steps != float("inf") else steps)
    checkpoint_tag_validation_enabled = _asks("checkpoint.tag_validation", lambda word: word.lower() != "ignore")
    checkpoint_tag_validation_fail = _asks("checkpoint.tag_validation", lambda word: word.lower() == "fail")
    curriculum_learning_enabled = data_sampling_enabled = random_ltd_enabled = _no
    is_compiled = is_deepcompile_enabled = is_deepcompile_active = _no

    # -- ZeRO ----------------------------------------------------------------------------------------------------------

    zero_optimization_stage = _asks(_STAGE)
    zero_optimization = _asks(_STAGE, lambda stage: stage > 0)
    zero_optimization_partition_gradients = _asks(_STAGE, lambda stage: stage >= 2)
    zero_optimization_partition_weights = is_first_weights_partition_group = _asks(_STAGE, lambda stage: stage == 3)
    zero_offload_optimizer = zero_use_cpu_optimizer = _asks(_STATES, lambda device: device != "none")
    zero_cpu_offload = _asks(_STATES, lambda device: device == "cpu")
    zero_nvme_offload_optimizer = _asks(_STATES, lambda device: device == "nvme")
    zero_offload_param = _asks(_PARAMS, lambda device: device != "none")

    def zero_overlap_comm(self) -> bool:
        """``zero_optimization.overlap_comm``, by default only in stage 3. Here communication always overlaps."""
        given = self.plan.value("zero_optimization.overlap_comm")
        return self.plan.value(_STAGE) == 3 if given is None else bool(given)

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """True: ``save_16bit_model`` writes whole weights in every stage."""
        return True


for _name, _path in QUESTIONS.items():
    setattr(ConfigQuestions, _name, _asks(_path))
