"""The engine's sizes and place: what its config says, and what programs have changed since."""

from typing import Any

import torch
from torch.utils.data import DistributedSampler

from functional_ds import comm
from functional_ds.deepspeed.utils.loaders import EngineLoader, data_loader

from .loop.config_questions import ConfigQuestions

__all__ = ["ConfigValues"]

_ROUTES = ("train", "eval", "predict")


class ConfigValues(ConfigQuestions):
    """Questions of an engine whose answers may change, and the calls that change them."""

    _loop: Any
    _counts: Any
    collate_fn: Any

    @property
    def device(self) -> torch.device:
        """Where params are."""
        return self._loop.state.step.device  # type: ignore[no-any-return]

    def get_data_parallel_rank(self) -> int:
        """This rank's place among the data-parallel ranks."""
        return comm.world().rank

    @property
    def data_parallel_group(self) -> comm.Group:
        """The data-parallel ranks: all."""
        return comm.world()

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

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> EngineLoader:
        """A loader of this rank's part of a data set, as ``initialize`` makes one of ``training_data``.

        Args:
            dataset: torch's.
            batch_size: rows of a micro-batch on this rank; by default the config's.
            route: "train" for shuffled rows; "eval" and "predict" leave them in order.
            pin_memory: of no effect: memory is pinned where there is a GPU.
            data_sampler: another than ``DistributedSampler``.
            collate_fn: from rows to a batch; by default the one that ``initialize`` was given.
            num_local_io_workers: of no effect: this process reads.

        Raises:
            ValueError: the route is another.
        """
        del pin_memory, num_local_io_workers
        if route not in _ROUTES:
            raise ValueError(f"route={route!r}: one of {', '.join(_ROUTES)}")
        if data_sampler is None and route != "train":
            here = comm.world()
            data_sampler = DistributedSampler(dataset, num_replicas=here.size, rank=here.rank, shuffle=False)
        return data_loader(
            dataset,
            batch_size or self.train_micro_batch_size_per_gpu(),
            collate_fn=collate_fn or self.collate_fn,
            drop_last=self.dataloader_drop_last(),
            sampler=data_sampler,
        )
