"""An engine's weights as a ``state_dict``, whole, and in a file."""

from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from functional_ds import comm
from functional_ds.deepspeed.api_names import ENGINE, REFUSED

from .common.engine_files import write_weights

__all__ = ["EngineWeights"]


class EngineWeights:
    """Calls of an engine that read the weights of all ranks, and unsupported calls of DeepSpeed."""

    module: Any
    _loop: Any

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The module's ``state_dict``; in stage 3 ``whole_state_dict`` has the values."""
        frozen = {name for name, p in self.module.named_parameters() if exclude_frozen_parameters and not p.requires_grad}
        return {name: value for name, value in self.module.state_dict().items() if name not in frozen}

    def whole_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """The module's ``state_dict`` with whole params in the dtype of the forward pass, on the host. Collective in stage 3.

        Args:
            exclude_frozen_parameters: whether to omit those.
        """
        return self._loop.live.whole(self._loop.step, self._loop.state, frozen=not exclude_frozen_parameters)  # type: ignore[no-any-return]

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """For accelerate and transformers: the whole ``state_dict`` on rank 0, None on others. Collective."""
        state_dict = self.whole_state_dict(exclude_frozen_parameters)
        return state_dict if comm.world().rank == 0 else None

    def save_16bit_model(
        self, save_dir: Any, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Writes ``whole_state_dict`` into one file, by ``torch.save``, or as safetensors if its name ends so. Collective.

        Args:
            save_dir: created if missing.
            save_filename: the file.
            exclude_frozen_parameters: whether to leave frozen params out.
        """
        weights = self.whole_state_dict(exclude_frozen_parameters)
        if comm.world().rank == 0:
            write_weights(weights, Path(save_dir, save_filename))
        comm.barrier()
        return True

    save_fp16_model = save_16bit_model

    # -- refused -------------------------------------------------------------------------------------------------------

    def compile(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises an error."""
        raise RuntimeError(f"engine.compile: {REFUSED[f'{ENGINE}.compile']}")

    @property
    def enable_backward_allreduce(self) -> bool:
        """True: ranks sum in an update's last backward pass. Setting it to False raises an error."""
        return True

    @enable_backward_allreduce.setter
    def enable_backward_allreduce(self, value: bool) -> None:
        if not value:
            raise RuntimeError("enable_backward_allreduce=False: use engine.no_sync(), whose gradients the next step() sums")
