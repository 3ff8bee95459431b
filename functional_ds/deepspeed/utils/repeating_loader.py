"""A loader that starts over."""

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

__all__ = ["RepeatingLoader"]

T = TypeVar("T")


class RepeatingLoader(Generic[T]):
    """Iterates over a loader again and again.

    Raises:
        ValueError: at ``next``: the loader has nothing at all.

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
