"""``Saver``: checkpoints that are written while the training goes on."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import attrs
from torch import Tensor

from functional_ds import comm
from functional_ds.state_dict.describe import Held, as_tensors, describe
from functional_ds.step.state import State

from .directory import check_free, check_pointer, check_tag, clean, made, staging
from .errors import CheckpointError, agreed, together
from .lock import Lock
from .shard_plan import Offer, copies, divide, marked, marks, offers

__all__ = ["Saver", "save"]

if TYPE_CHECKING:  # it imports torch.distributed.checkpoint, which takes a second
    from .writer import Writer


class Saver:
    """Saves into one folder in the background; no other job can save there while it is open.

    ``save`` copies what this rank is to write and returns; a thread of each rank writes the copy, and the checkpoint is
    published as soon as all have. There is at most one copy, whose memory is kept for the next save: ``save`` first waits
    for the save before. An error of any rank's writer is raised on every rank by the next ``save`` or ``wait``; checkpoints
    from before are as they were.

    ``save`` and ``wait`` are collective over ``group``, and so are making a Saver and leaving its ``with`` block without an
    error, which waits. With an error, or by ``close``, a save under way is finished if this rank can finish it.

    Args:
        path: a folder that all ranks see; made where it is not there.
        group: the ranks that states are spread over; None for the whole world.
        keep_last: of the checkpoints that were saved with ``keep_last``, only so many of the newest stay.
        keep_every: those whose count of updates is a multiple of this stay, too.

    Raises:
        ValueError: numbers that make no sense.
        BusyError: another job, or another Saver, saves into this folder.
        CheckpointError: the folder cannot be made or written into, or is another library's.

    >>> import tempfile
    >>> import functional_ds as fds
    >>> step = fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(0.5))
    >>> state = step.init({"w": torch.ones(2)})
    >>> with tempfile.TemporaryDirectory() as folder, Saver(folder, keep_last=2) as saver:
    ...     for _ in range(3):
    ...         state, _ = step(state, torch.ones(2))
    ...         tag = saver.save(state, extra={"rows": 2})
    ...     saver.wait()
    ...     fds.checkpointing.tags(folder)
    ['2', '3']
    """

    def __init__(
        self,
        path: str | Path,
        *,
        group: comm.Group | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
    ) -> None:
        _check_retention(keep_last, keep_every)
        self._group = (comm.world() if group is None else group).channel("checkpoint")
        self._keep_last, self._keep_every = keep_last, keep_every
        self._lock: Lock | None = None
        self._writer: Writer | None = None
        self._room: Tensor | None = None
        self._closed = False
        try:
            self.folder: Path = together(self._group, lambda: self._open(Path(path)))
        except BaseException:  # another rank's, too: the folder must not stay locked
            self._release()
            raise

    def save(self, state: State, *, tag: str | None = None, extra: Mapping[str, Any] | None = None) -> str:
        """Starts a save of the state as it is now, and returns its tag; the step may then take the state's memory.

        Collective. It stalls for as long as one copy of what this rank writes takes, if the save before is over.
        ``tag`` is by default the count of updates, and ``extra`` holds JSON values to keep beside the state; rank 0's count.

        Raises:
            ValueError: a tag that is no plain name.
            TypeError: no state; an ``extra`` that JSON cannot hold; a leaf that is neither a tensor nor a number.
            CheckpointError: the save before, or the beginning of this one, went wrong on some rank; the folder has something
                of the tag's name that is no checkpoint; the Saver is closed.
        """
        return self._start(state, tag, extra, apart=True)

    def wait(self) -> None:
        """Returns once the last save is published; raises what went wrong with it. Collective."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            together(self._group, writer.join_write)
            together(self._group, writer.join)
        except BaseException:
            writer.give_up()
            raise

    def check(self) -> None:
        """Raises this rank's writer's error, if it has one by now. It waits for nothing, and asks no other rank."""
        if self._writer is not None:
            self._writer.check()

    def close(self) -> None:
        """Ends the save under way, if there is one, without the other ranks, and lets others save into the folder.

        Where all ranks still write what they have, the save is published; else given up after a while.
        """
        writer, self._writer, self._room, self._closed = self._writer, None, None, True
        try:
            if writer is not None:
                writer.join()
        finally:
            self._release()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                self.wait()
        finally:
            try:
                self.close()
            except CheckpointError:
                if error is None:
                    raise

    # -- the steps of a save -----------------------------------------------------------------------------------------------

    def _open(self, path: Path) -> Path:
        folder = path
        if self._group.rank == 0:
            folder = made(path)
            check_pointer(folder)
            self._lock = Lock.take(folder)
            clean(folder)
        return folder

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _start(self, state: State, tag: str | None, extra: Mapping[str, Any] | None, *, apart: bool) -> str:
        """A save of the state, or of a copy ``apart`` from it."""
        from .writer import Draft, Image, Writer, stored_tensors

        if self._closed:
            raise CheckpointError(f"this Saver of {self.folder} is closed; make another one")
        self.wait()
        group, held, made = self._group, list[Held](), list[Path]()
        try:
            asked = agreed(group, lambda: self._ask(state, tag, extra, held, made))
            ranks, wish = self._compared([found for found, _ in asked], held), asked[0][1]
            shares = divide(ranks)

            def image() -> Image:
                if not wish.staged.is_dir():
                    raise CheckpointError(
                        f"{wish.staged}: rank 0 made this folder; all ranks must see the same file system at path"
                    )
                found = Image.of(held, shares[group.rank])
                found = found.snapshot(self._room) if apart else found
                self._room = found.copy
                return found

            own = together(group, image)
        except BaseException:
            for staged in made:
                shutil.rmtree(staged, ignore_errors=True)
            raise
        draft = Draft(
            self.folder,
            wish.staged,
            wish.tag,
            wish.step,
            group.size,
            lambda: stored_tensors(ranks, shares),
            wish.extra,
            self._keep_last,
            self._keep_every,
        )
        self._writer = Writer(draft, group.rank, own)
        return wish.tag

    def _ask(
        self, state: State, tag: str | None, extra: Any, held: list[Held], made: list[Path]
    ) -> tuple[list[Offer], "_Wish"]:
        """What this rank has, which it puts into ``held``, and what it was asked for; rank 0 makes the folder to write into."""
        if not isinstance(state, State):
            raise TypeError(f"state={type(state).__name__}: save takes the state that a step made")
        step = int(state.step)
        kept = _json(extra)
        wish = _Wish(check_tag(str(step) if tag is None else tag), step, None, self.folder)
        held += describe(as_tensors(state))
        if self._group.rank == 0:
            check_free(self.folder, wish.tag)
            made.append(staging(self.folder))
            wish = attrs.evolve(wish, staged=made[0], extra=kept)
        return offers(held), wish

    def _compared(self, ranks: Sequence[Sequence[Offer]], held: Sequence[Held]) -> Sequence[Sequence[Offer]]:
        """The offers with marks where there are copies."""
        indices = copies(ranks)
        if not any(indices):
            return ranks
        found = agreed(self._group, lambda: marks([held[i].view for i in indices[self._group.rank]]))
        return [marked(*each) for each in zip(ranks, indices, found, strict=True)]


@attrs.frozen
class _Wish:
    tag: str
    step: int
    extra: Any
    staged: Path


def _json(extra: Any) -> Any:
    """A copy, which may change no more."""
    try:
        return json.loads(json.dumps({} if extra is None else dict(extra)))
    except (TypeError, ValueError) as error:
        raise TypeError(f"extra={extra!r} must be a dict of JSON values: {error}") from error


def _check_retention(keep_last: int | None, keep_every: int | None) -> None:
    for name, number in (("keep_last", keep_last), ("keep_every", keep_every)):
        if number is not None and (type(number) is not int or number < 1):
            raise ValueError(f"{name}={number!r} must be a whole number of at least 1, or None")
    if keep_every is not None and keep_last is None:
        raise ValueError(f"keep_every={keep_every} without keep_last: nothing is deleted then; say how many of the newest stay")


def save(
    state: State,
    path: str | Path,
    *,
    tag: str | None = None,
    group: comm.Group | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
    extra: Mapping[str, Any] | None = None,
) -> str:
    """Writes the state as the checkpoint ``tag`` in the folder ``path``, and returns the tag once it is published.

    Law 37: ``load_M ∘ save_N = id``, bitwise, for any numbers of ranks N and M, stages, units and meshes.

    Collective over ``group``. Every element is written once, by one of the ranks that have it, straight from the state's
    memory: beside it a rank needs a few MB. A checkpoint of the same tag is replaced. Whatever happens meanwhile, the
    checkpoints from before can be loaded.

    Args:
        state: any state that a step made; it is not changed.
        path: a folder that all ranks see; made where it is not there.
        tag: the checkpoint's name; by default the count of updates.
        group: the ranks that the state is spread over; None for the whole world.
        keep_last: of the checkpoints that were saved with ``keep_last``, only so many of the newest stay.
        keep_every: those whose count of updates is a multiple of this stay, too.
        extra: JSON values to keep beside the state (the data's position, say); rank 0's count.

    Raises:
        ValueError: a tag that is no plain name; numbers that make no sense.
        TypeError: no state; an ``extra`` that JSON cannot hold; a leaf that is neither a tensor nor a number.
        BusyError: another job, or an open Saver, saves into this folder.
        CheckpointError: it could not be written, on whichever rank; the folder has something of the tag's name that is no
            checkpoint, or is another library's.

    Cost: each rank sends a description of what it has, some 100 bytes a tensor, n - 1 times.

    >>> import tempfile, torch
    >>> import functional_ds as fds
    >>> from functional_ds import transforms as T
    >>> def program(stage, use):
    ...     step = T.zero(stage)(fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.adamw(0.1)))
    ...     state, _ = step(step.init({"w": torch.arange(5.0)}), torch.ones(5))
    ...     return use(step, state)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = comm.simulate(lambda: program(3, lambda step, state: fds.save(state, folder)), world_size=3)
    ...     loaded = comm.simulate(
    ...         lambda: program(1, lambda step, state: step.params(fds.load(folder, like=state))["w"].tolist()), world_size=2
    ...     )
    >>> loaded == [program(0, lambda step, state: step.params(state)["w"].tolist())] * 2
    True
    """
    saver = Saver(path, group=group, keep_last=keep_last, keep_every=keep_every)
    with saver:
        return saver._start(state, tag, extra, apart=False)
