"""When a run is saved, what is kept beside its state, and how it goes on from there."""

import time
from pathlib import Path
from typing import Any

import attrs

from functional_ds.checkpointing import NoCheckpointError, Saver, load
from functional_ds.step.state import State

from .data import gathered
from .rng import Generators

__all__ = ["Keeper", "Place"]


@attrs.frozen
class Place:
    """Where a run stands, beside its state.

    Attributes:
        done: steps made; those that were rolled back do not count.
        data: the next batch's position on all ranks, as ``gathered`` gives it; None is the beginning.
        rollbacks: how often the run was rolled back.
        generators: torch's default generators, as ``Generators.kept`` gives them.
    """

    done: int = 0
    data: Any = None
    rollbacks: int = 0
    generators: Any = None


@attrs.define(eq=False)
class Keeper:
    """Saves a run into its folder; without a folder it saves nothing.

    Attributes:
        path: the folder, or None.
        every: steps between two checkpoints, None for none by count.
        minutes: between two checkpoints, None for none by time.
        saver: what writes.
        saved: after how many steps the last checkpoint was made.
    """

    path: Path | None
    every: int | None = None
    minutes: float | None = None
    saver: Saver | None = None
    saved: int | None = None
    _last: float = attrs.field(factory=time.monotonic)

    def late(self) -> bool:
        """Whether the last checkpoint is so many minutes old, by this rank's clock."""
        return self.minutes is not None and time.monotonic() - self._last >= 60 * self.minutes

    def due(self, done: int) -> bool:
        """Whether this step's count asks for a checkpoint."""
        return self.every is not None and done % self.every == 0

    def save(self, state: State, generators: Generators, *, done: int, data: Any, rollbacks: int) -> None:
        """Starts a checkpoint; waits for the one before. Collective."""
        self._last = time.monotonic()
        if self.saver is None or self.saved == done:
            return
        place = Place(done, gathered(data), rollbacks, generators.kept())
        self.saver.save(state, tag=f"step-{done:08}", extra={"fit": attrs.asdict(place)})
        self.saved = done

    def check(self) -> None:
        """Raises what went wrong with a checkpoint on this rank, if anything has by now."""
        if self.saver is not None:
            self.saver.check()

    def wait(self) -> None:
        """Returns once the last checkpoint is published. Collective."""
        if self.saver is not None:
            self.saver.wait()

    def newest(self, like: State, *, donate: bool = False) -> tuple[State, Place] | None:
        """The newest checkpoint that is whole, None where the folder has none. Collective.

        Raises:
            ValueError: it was not made by ``fit``.
        """
        if self.path is None:
            return None
        try:
            state, extra = load(self.path, like=like, with_extra=True, donate=donate)
        except NoCheckpointError:
            return None
        if "fit" not in (extra or {}):
            raise ValueError(
                f"path={str(self.path)!r}: its newest checkpoint was not made by fit, so nothing says where the data stand; "
                "pass fds.load(path, like=state) as the state, and another folder as path"
            )
        place = Place(**extra["fit"])
        self.saved = place.done
        return state, place
