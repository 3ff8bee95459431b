"""Batches with a position, from which a resumed run continues without drawing again what it has seen."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import attrs

__all__ = ["BatchReader", "BatchSource", "Indexed", "Replayed", "Stateful", "as_source"]


class BatchReader(Protocol):
    """Batches from some position on, one after the other."""

    def __next__(self) -> Any:
        """The next batch; StopIteration if there is none."""
        ...

    @property
    def position(self) -> Any:
        """Where the next batch is: numbers, strings, tensors, bytes, and lists and dicts of these."""
        ...


@runtime_checkable
class BatchSource(Protocol):
    """Where batches come from.

    Law: for every position that a reader of this source has had, ``at(position)`` gives the batches that followed it.
    """

    def at(self, position: Any | None) -> BatchReader:
        """The batches from a position on; None is the beginning."""
        ...


@attrs.define
class _CountingReader:
    """A reader whose position is the number of batches that it has given."""

    draw: Callable[[int], Any]
    position: int

    def __next__(self) -> Any:
        batch = self.draw(self.position)
        self.position += 1
        return batch


@attrs.frozen
class Indexed:
    """Batches by index: the position is the index, and resuming costs nothing.

    >>> reader = Indexed(lambda index: 10 * index, 3).at(1)
    >>> list(iter(reader.__next__, 20)), reader.position
    ([10], 3)

    Attributes:
        function: from an index to this rank's part of that batch.
        count: the number of batches; None for no end.
    """

    function: Callable[[int], Any]
    count: int | None = None

    def at(self, position: int | None) -> BatchReader:
        """The batches from that index on."""
        return _CountingReader(self._draw, position or 0)

    def _draw(self, index: int) -> Any:
        if self.count is not None and index >= self.count:
            raise StopIteration
        return self.function(index)


@attrs.define
class _StatefulReader:
    loader: Any
    batches: Iterator[Any]

    def __next__(self) -> Any:
        return next(self.batches)

    @property
    def position(self) -> Any:
        return self.loader.state_dict()


@attrs.frozen
class Stateful:
    """An iterable with ``state_dict`` and ``load_state_dict``, such as a loader of torchdata: the position is its state."""

    loader: Any

    def at(self, position: Any | None) -> BatchReader:
        """The batches from that state on; None takes the loader as it is."""
        if position is not None:
            self.loader.load_state_dict(position)
        return _StatefulReader(self.loader, iter(self.loader))


@attrs.frozen
class Replayed:
    """Any iterable: to resume, batches are drawn from its beginning and dropped.

    So an iterator must be fresh, at the batch with which the run began, and give the same batches again.
    """

    batches: Iterable[Any]

    def at(self, position: int | None) -> BatchReader:
        """The batches after so many.

        Raises:
            ValueError: there are fewer.
        """
        drawn, behind = iter(self.batches), position or 0
        dropped = sum(1 for _ in itertools.islice(drawn, behind))
        if dropped < behind:
            raise ValueError(
                f"batches: the run stood behind {behind} batches, and this iterable has {dropped}; hand it over fresh, "
                "or pass a function of the index, which needs no replaying"
            )
        return _CountingReader(lambda index: next(drawn), behind)


def as_source(batches: Any) -> BatchSource:
    """What ``fit`` takes as batches, as a source.

    | batches | position | how it resumes |
    |---|---|---|
    | a ``BatchSource`` | its own | as it says |
    | with ``state_dict`` and ``load_state_dict`` | that state | with ``load_state_dict`` |
    | a sequence | the index | at once |
    | a function of the index | the index | at once |
    | any other iterable | a count | draws that many again, and drops them |

    Raises:
        TypeError: none of these.

    >>> [type(as_source(found)).__name__ for found in ([1, 2], lambda index: index, iter([1, 2]))]
    ['Indexed', 'Indexed', 'Replayed']
    """
    if isinstance(batches, BatchSource):
        return batches
    if hasattr(batches, "state_dict") and hasattr(batches, "load_state_dict"):
        return Stateful(batches)
    if hasattr(batches, "__getitem__") and hasattr(batches, "__len__"):
        return Indexed(batches.__getitem__, len(batches))
    if callable(batches):
        return Indexed(batches)
    if isinstance(batches, Iterable):
        return Replayed(batches)
    raise TypeError(
        f"batches={batches!r}: pass a function from an index to a batch, a sequence of batches, an iterable, "
        "or a source (an object with at(position))"
    )
