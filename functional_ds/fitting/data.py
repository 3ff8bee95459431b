"""Sources of batches with positions, from which a resumed run continues."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor


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
    """A source of batches.

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
    """Batches by index: the position is the index, and resuming is immediate.

    >>> reader = Indexed(lambda index: 10 * index, 3).at(1)
    >>> list(iter(reader.__next__, 20)), reader.position
    ([10], 3)

    Attributes:
        function: from an index to this rank's part of that batch.
        count: the number of batches; None for endless.
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
    """An iterable with ``state_dict`` and ``load_state_dict``, such as a loader of torchdata: the position is its state.

    >>> class Loader:
    ...     drawn = 0
    ...
    ...     def state_dict(self):
    ...         return {"drawn": self.drawn}
    ...
    ...     def load_state_dict(self, state):
    ...         self.drawn = state["drawn"]
    ...
    ...     def __iter__(self):
    ...         while self.drawn < 3:
    ...             self.drawn += 1
    ...             yield self.drawn
    >>> reader = Stateful(Loader()).at({"drawn": 1})
    >>> next(reader), reader.position
    (2, {'drawn': 2})
    """

    loader: Any

    def at(self, position: Any | None) -> BatchReader:
        """The batches from that state on; None uses the loader's present state."""
        if position is not None:
            self.loader.load_state_dict(position)
        return _StatefulReader(self.loader, iter(self.loader))


@attrs.frozen
class Replayed:
    """Any iterable: to resume, batches are drawn again from its beginning and dropped.

    An iterator must be fresh, start at the run's first batch, and repeat the same batches.

    >>> reader = Replayed([1, 2, 3]).at(2)
    >>> next(reader), reader.position
    (3, 3)
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
                f"batches: the run had consumed {behind} batches, and this iterable yields {dropped}; pass a new one, "
                "or pass a function of the index, which needs no replaying"
            )
        return _CountingReader(lambda index: next(drawn), behind)


def as_source(batches: Any) -> BatchSource:
    """A source from what ``fit`` takes as batches.

    | batches | position | how it resumes |
    |---|---|---|
    | a ``BatchSource`` | its own | its ``at`` |
    | with ``state_dict`` and ``load_state_dict`` | that state | with ``load_state_dict`` |
    | a sequence | the index | immediately |
    | a function of the index | the index | immediately |
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
    if hasattr(batches, "__getitem__") and hasattr(batches, "__len__") and not isinstance(batches, Mapping):
        return Indexed(batches.__getitem__, len(batches))
    if callable(batches):
        return Indexed(batches)
    if isinstance(batches, Iterable) and not isinstance(batches, Mapping):
        return Replayed(batches)
    raise TypeError(
        f"batches={batches!r}: pass a function from an index to a batch, a sequence of batches, an iterable, "
        "or a source (an object with at(position))"
    )


@attrs.define
class _Aside:
    """A separate state of torch's default generator."""

    state: Tensor

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """A context in which the default generator has this state; afterwards the program's again."""
        before = torch.get_rng_state()
        torch.set_rng_state(self.state)
        try:
            yield
        finally:
            self.state = torch.get_rng_state()
            torch.set_rng_state(before)


@attrs.define
class _EpochReader:
    """A reader of one epoch after another.

    Attributes:
        epochs: what it reads.
        epoch: the current epoch.
        drawn: the number of batches that it has returned in this epoch.
        aside: the generator's state for draws of this epoch.
        reader: of this epoch.
        replayed: whether resuming draws earlier batches again, so that all draws of the epoch use ``aside``.
    """

    epochs: "Epochs"
    epoch: int
    drawn: int
    aside: _Aside
    reader: BatchReader
    replayed: bool

    @staticmethod
    def begin(epochs: "Epochs", epoch: int, drawn: int = 0, within: Any | None = None) -> "_EpochReader":
        """A reader from a position in an epoch on; empty after the last epoch."""
        source = as_source(epochs.batches)
        if epochs.over(epoch):
            drawn, within, source = 0, None, Indexed(lambda index: None, 0)
        else:
            epochs.begin_epoch(epoch)
        aside = _Aside(torch.Generator().manual_seed(_mixed(epochs.seed, epoch)).get_state())
        with aside.drawing():
            reader = source.at(within)
        return _EpochReader(epochs, epoch, drawn, aside, reader, isinstance(source, Replayed))

    def __next__(self) -> Any:
        with suppress(StopIteration):
            return self._next()
        if self.epochs.over(self.epoch):
            raise StopIteration
        following = _EpochReader.begin(self.epochs, self.epoch + 1)
        self.epoch, self.drawn, self.aside, self.reader = following.epoch, 0, following.aside, following.reader
        if self.epochs.over(self.epoch):
            raise StopIteration
        try:
            return self._next()
        except StopIteration:
            raise ValueError(f"batches: epoch {self.epoch} of {self.epochs.batches!r} has no batch") from None

    def _next(self) -> Any:
        first = not self.drawn  # many loaders draw their shuffle with the first batch
        with self.aside.drawing() if first or self.replayed else nullcontext():
            batch = next(self.reader)
        self.drawn += 1
        return batch

    @property
    def position(self) -> Any:
        return {"epoch": self.epoch, "drawn": self.drawn, "within": self.reader.position}


@attrs.frozen
class Epochs:
    """Repeats the same batches, as a ``DataLoader`` does. The position is the epoch, and the position within it.

    Each epoch begins with ``set_epoch(epoch)`` on the batches, their ``dataset``, ``sampler`` and ``batch_sampler``, if they
    have this method. Draws from torch's default generator up to the first batch, and from a generator that the batches have,
    depend only on ``seed`` and the epoch. So a ``DataLoader`` shuffles the same after a resume, independently of the step's
    draws. If batches are replayed to resume, this applies to all draws.

    >>> reader = Epochs([1, 2]).at({"epoch": 4, "drawn": 1, "within": 1})
    >>> [next(reader) for _ in range(4)], reader.position
    ([2, 1, 2, 1], {'epoch': 6, 'drawn': 1, 'within': 1})

    Attributes:
        batches: anything that ``fit`` takes as batches, except an iterator, which cannot be repeated.
        count: the number of epochs; None for endless.
        seed: of the shuffles; None for the seed that the program gave torch on this rank, which must be the same to resume.
    """

    batches: Any
    count: int | None = None
    seed: int | None = None
    _seeds: dict[int, int] = attrs.field(factory=dict, init=False, repr=False, eq=False)  # of other generators, by id

    def __attrs_post_init__(self) -> None:
        if isinstance(self.batches, Iterator):
            raise TypeError(f"batches={self.batches!r} is an iterator, which cannot begin again; pass what it iterates over")
        if self.count is not None and self.count < 1:
            raise ValueError(f"count={self.count}: there is at least one epoch")

    def at(self, position: Any | None) -> BatchReader:
        """The batches from that epoch and position on."""
        epoch, drawn, within = (0, 0, None) if position is None else (position[k] for k in ("epoch", "drawn", "within"))
        stateful = isinstance(as_source(self.batches), Stateful)
        if stateful and drawn and drawn == self._length():  # many loaders cannot resume at an epoch's end
            epoch, drawn, within = epoch + 1, 0, None
        return _EpochReader.begin(self, epoch, drawn, within if drawn else None)

    def over(self, epoch: int) -> bool:
        """Whether this epoch comes after the last one."""
        return self.count is not None and epoch >= self.count

    def begin_epoch(self, epoch: int) -> None:
        """Calls ``set_epoch``, and seeds the generators that the batches have."""
        batch_sampler = getattr(self.batches, "batch_sampler", None)
        parts = [getattr(self.batches, name, None) for name in ("dataset", "sampler")]
        holders = (self.batches, *parts, batch_sampler, getattr(batch_sampler, "sampler", None))
        for holder in {id(holder): holder for holder in holders}.values():
            set_epoch = getattr(holder, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
            generator = getattr(holder, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(_mixed(self._seeds.setdefault(id(generator), generator.initial_seed()), epoch))

    def _length(self) -> int | None:
        try:
            return len(self.batches)
        except TypeError:
            return None


def _mixed(seed: int | None, epoch: int) -> int:
    """A seed for an epoch; None stands for the default generator's seed."""
    return ((torch.initial_seed() if seed is None else seed) * 0x9E3779B1 + epoch) % 2**32
