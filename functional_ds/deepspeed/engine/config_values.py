"""The engine's questions about its config, by DeepSpeed's names."""

from typing import Any

import torch

from functional_ds import comm
from functional_ds.deepspeed.config.ds_plan import ConfigPlan

__all__ = ["ConfigValues"]

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class ConfigValues:
    """Methods of an engine that only read its plan.

    ``plan.value(path)`` gives any key.
    """

    plan: ConfigPlan
    _loop: Any
    _counts: Any

    @property
    def config(self) -> dict[str, Any]:
        """The config with nothing left open."""
        return self.plan.to_ds_config()

    @property
    def device(self) -> torch.device:
        """Where params are."""
        return self._loop.state.step.device  # type: ignore[no-any-return]

    @property
    def local_rank(self) -> int:
        """This rank's place on its host."""
        return comm.get_local_rank()

    @property
    def global_rank(self) -> int:
        """This rank's place in the world."""
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
        """The number of model-parallel ranks, which an engine here has none of."""
        return 1

    def get_data_parallel_rank(self) -> int:
        """This rank's place among the data-parallel ranks."""
        return comm.world().rank

    # -- batches -------------------------------------------------------------------------------------------------------

    def train_batch_size(self) -> int:
        """Rows of an update, on all ranks."""
        return self.train_micro_batch_size_per_gpu() * self.gradient_accumulation_steps() * self.dp_world_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Rows of a micro-batch, on one rank."""
        return self._counts.micro_rows or self.plan.batch.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of an update."""
        return self._loop.micro_batches  # type: ignore[no-any-return]

    def managed_gradient_accumulation(self) -> bool:
        """Whether the engine counts micro-batches; else each ``step`` is a boundary."""
        return self._counts.managed  # type: ignore[no-any-return]

    def get_batch_info(self) -> tuple[Any, Any, Any]:
        """The three methods above that give a batch's sizes."""
        return self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the number of micro-batches.

        Raises:
            ValueError: it is no whole number of micro-batches.
        """
        rows = self.train_micro_batch_size_per_gpu() * self.dp_world_size
        if train_batch_size < rows or train_batch_size % rows:
            raise ValueError(
                f"train_batch_size={train_batch_size} is no multiple of the {rows} rows of a micro-batch on all ranks"
            )
        self._loop.micro_batches = self._counts.micro_batches = train_batch_size // rows

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Changes the rows of a micro-batch, for counts and loaders made later."""
        self._counts.micro_rows = micro_batch_size

    # -- precision and gradients ---------------------------------------------------------------------------------------

    def fp16_enabled(self) -> bool:
        """``fp16.enabled``."""
        return bool(self.plan.value("fp16.enabled"))

    def bfloat16_enabled(self) -> bool:
        """``bf16.enabled``."""
        return bool(self.plan.value("bf16.enabled"))

    def torch_autocast_enabled(self) -> bool:
        """``torch_autocast.enabled``."""
        return bool(self.plan.value("torch_autocast.enabled"))

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """The dtypes of the forward pass and of sums of gradients."""
        found = next((_DTYPES[name] for name in _DTYPES if self.plan.value(f"{name}.enabled")), torch.float32)
        return found, torch.float32

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale moves."""
        return self.fp16_enabled() and not self.plan.value("fp16.loss_scale")

    def loss_scale(self) -> float:
        """``fp16.loss_scale``: 0 where the scale moves; ``optimizer.cur_scale`` is what the next loss is multiplied by."""
        return float(self.plan.value("fp16.loss_scale"))

    def gradient_clipping(self) -> float:
        """The limit of the gradients' norm; 0 for none."""
        return float(self.plan.value("gradient_clipping"))

    def steps_per_print(self) -> Any:
        """``steps_per_print``."""
        return self.plan.value("steps_per_print")

    def wall_clock_breakdown(self) -> bool:
        """``wall_clock_breakdown``."""
        return bool(self.plan.value("wall_clock_breakdown"))

    def memory_breakdown(self) -> bool:
        """``memory_breakdown``."""
        return bool(self.plan.value("memory_breakdown"))

    def flops_profiler_enabled(self) -> bool:
        """``flops_profiler.enabled``."""
        return bool(self.plan.value("flops_profiler.enabled"))

    def dump_state(self) -> bool:
        """``dump_state``."""
        return bool(self.plan.value("dump_state"))

    def dataloader_drop_last(self) -> bool:
        """``dataloader_drop_last``."""
        return bool(self.plan.value("dataloader_drop_last"))

    def optimizer_name(self) -> str | None:
        """``optimizer.type``."""
        return self.plan.value("optimizer.type")  # type: ignore[no-any-return]

    def optimizer_params(self) -> dict[str, Any]:
        """``optimizer.params``."""
        return dict(self.config.get("optimizer", {}).get("params", {}))

    def scheduler_name(self) -> str | None:
        """``scheduler.type``."""
        return self.plan.value("scheduler.type")  # type: ignore[no-any-return]

    def scheduler_params(self) -> dict[str, Any]:
        """``scheduler.params``."""
        return dict(self.config.get("scheduler", {}).get("params", {}))

    # -- ZeRO ----------------------------------------------------------------------------------------------------------

    def zero_optimization_stage(self) -> int:
        """The stage."""
        return int(self.plan.value("zero_optimization.stage"))

    def zero_optimization(self) -> bool:
        """Whether the stage is not 0."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded: stages 2 and 3."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether params are sharded: stage 3."""
        return self.zero_optimization_stage() == 3

    def zero_offload_optimizer(self) -> bool:
        """Whether the optimizer's state is offloaded."""
        return bool(self.plan.value("zero_optimization.offload_optimizer.device") != "none")

    def zero_offload_param(self) -> bool:
        """Whether params are offloaded."""
        return bool(self.plan.value("zero_optimization.offload_param.device") != "none")

    def zero_cpu_offload(self) -> bool:
        """Whether the optimizer's state is on the host."""
        return bool(self.plan.value("zero_optimization.offload_optimizer.device") == "cpu")

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """True: ``save_16bit_model`` writes whole weights in every stage."""
        return True
