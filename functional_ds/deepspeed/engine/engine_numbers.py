"""An engine's updates, batches, ranks, and the step, function and state that it runs."""

from typing import Any

import torch
from torch.utils.data import DistributedSampler

from functional_ds import comm
from functional_ds.deepspeed.utils.loaders import EngineLoader, data_loader
from functional_ds.modules.functional import Apply
from functional_ds.step.phase_signatures import Metrics
from functional_ds.step.state.state import State
from functional_ds.step.step import Step

from .common.engine_counts import CountedEngine
from .engine_reports import Reports
from .loop.engine_loop import grad_norm_of
from .loop.monitors import Monitors

_ROUTES = ("train", "eval", "predict")


class EngineNumbers(CountedEngine):
    """Queries of an engine whose results may change, and the calls that change them."""

    _loop: Any
    collate_fn: Any
    optimizer: Any
    _reports: Reports

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    @property
    def micro_steps(self) -> int:
        """The number of ``step`` calls."""
        return self._counts.micro_steps

    @property
    def metrics(self) -> Metrics:
        """The last update's, as tensors: "loss" unless ``loss.backward()`` was called, "grad_norm" with clipping, "skipped"."""
        return self._loop.metrics  # type: ignore[no-any-return]

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last update's gradients before clipping; infinite if they were not finite.

        None before the first update, in stage 0 in fp32 without clipping, and with ``compute_grad_norm: false``.
        """
        return grad_norm_of(self._loop.metrics)

    def get_lr(self) -> list[float]:
        """The learning rate of each param group in the next update."""
        return [group.get("lr", 0.0) for group in self._groups()]

    def get_mom(self) -> list[Any]:
        """Each param group's momentum, or its betas."""
        return [group.get("momentum", group.get("betas", 0.0)) for group in self._groups()]

    def get_type(self) -> list[Any]:
        """Each param group's type."""
        return [group.get("type", 0.0) for group in self._groups()]

    @property
    def functional_step(self) -> Step:
        """The step that the engine runs."""
        return self._loop.step  # type: ignore[no-any-return]

    @property
    def functional_apply(self) -> Apply:
        """The module as a function. Changes of ``functional_apply.module`` apply from the next forward pass on."""
        return self._loop.live.apply  # type: ignore[no-any-return]

    @property
    def state(self) -> State:
        """The present state. An update donates it, so do not keep it."""
        return self._loop.settled()  # type: ignore[no-any-return]

    @state.setter
    def state(self, state: State) -> None:
        self._loop.replace(state)

    @property
    def monitor(self) -> Monitors:
        """The config's monitors: ``write_events([(name, value, engine.global_samples)])`` logs custom numbers."""
        return self._reports.monitor

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Milliseconds of the last update's "fwd", "bwd" and "step", with ``wall_clock_breakdown``."""
        return dict(self._reports.times)

    @property
    def device(self) -> torch.device:
        """Where params are."""
        return self._loop.state.step.device  # type: ignore[no-any-return]

    def get_data_parallel_rank(self) -> int:
        """This rank's rank among the data-parallel ranks."""
        return comm.world().rank

    @property
    def data_parallel_group(self) -> comm.Group:
        """The data-parallel ranks: all."""
        return comm.world()

    # -- batches -------------------------------------------------------------------------------------------------------

    def managed_gradient_accumulation(self) -> bool:
        """Whether the engine counts micro-batches; else each ``step`` is a boundary."""
        return self._counts.managed

    def get_batch_info(self) -> tuple[Any, Any, Any]:
        """The three methods above that give a batch's sizes."""
        return self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the number of micro-batches.

        Raises:
            ValueError: it is not a multiple of a micro-batch's size.
        """
        rows = self.train_micro_batch_size_per_gpu() * self.dp_world_size
        if train_batch_size < rows or train_batch_size % rows:
            raise ValueError(
                f"train_batch_size={train_batch_size} is not a multiple of the {rows} rows of a micro-batch on all ranks"
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
        """A loader of this rank's part of a data set, like that of ``training_data`` in ``initialize``.

        Args:
            dataset: torch's.
            batch_size: rows of a micro-batch on this rank; by default the config's.
            route: "train" for shuffled rows; "eval" and "predict" keep their order.
            pin_memory: has no effect: memory is pinned if there is a GPU.
            data_sampler: instead of ``DistributedSampler``.
            collate_fn: from rows to a batch; by default the one passed to ``initialize``.
            num_local_io_workers: has no effect: this process reads.

        Raises:
            ValueError: another route.
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
            drop_last=self.plan.value("dataloader_drop_last"),
            sampler=data_sampler,
        )
