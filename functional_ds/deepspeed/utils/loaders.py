"""Loaders: one that repeats, and the one that ``initialize`` makes from ``training_data``."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from functional_ds import comm

T = TypeVar("T")


class RepeatingLoader(Generic[T]):
    """Iterates over a loader again and again.

    Raises:
        ValueError: at ``next``: the loader is empty.

    >>> batches = RepeatingLoader([1, 2])
    >>> [next(batches) for _ in range(5)]
    [1, 2, 1, 2, 1]
    """

    def __init__(self, loader: Iterable[T]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        for batch in self.data_iter:
            return batch
        self.data_iter = iter(self.loader)
        for batch in self.data_iter:
            return batch
        raise ValueError(f"RepeatingLoader: {type(self.loader).__name__} gives no batch, or it is an iterator that has ended")


class EngineLoader:
    """Micro-batches of this rank. ``next(loader)`` continues the iteration that ``iter(loader)`` has begun.

    Attributes:
        data_sampler: of torch; ``set_epoch`` reshuffles.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.dataloader, self.data_sampler = loader, loader.sampler
        self._iterator: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self.dataloader)

    def __iter__(self) -> Iterator[Any]:
        self._iterator = iter(self.dataloader)
        return self._iterator

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self.dataloader)
        return next(self._iterator)


def data_loader(
    dataset: Dataset[Any], rows: int, *, collate_fn: Callable[..., Any] | None, drop_last: bool, sampler: Any = None
) -> EngineLoader:
    """A loader of this rank's part of a data set, shuffled as in DeepSpeed; an ``IterableDataset`` is read in order.

    Args:
        dataset: torch's.
        rows: of a micro-batch.
        collate_fn: from rows to a batch.
        drop_last: whether an incomplete micro-batch is dropped.
        sampler: instead of ``DistributedSampler``.
    """
    if sampler is None and not isinstance(dataset, IterableDataset):
        world = comm.world()
        sampler = DistributedSampler(dataset, num_replicas=world.size, rank=world.rank)
    options: dict[str, Any] = {"collate_fn": collate_fn, "drop_last": drop_last, "sampler": sampler}
    return EngineLoader(DataLoader(dataset, rows, pin_memory=torch.cuda.is_available(), **options))
