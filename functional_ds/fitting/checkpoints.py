"""When a run is saved, what its checkpoints contain besides the state, and how it resumes."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from functional_ds.base.disk.files import checked_path
from functional_ds.state_dict.errors import NoCheckpointError
from functional_ds.step.state.state import State

from .checks import positive_steps
from .positions import gathered, gathered_generators

if TYPE_CHECKING:
    from functional_ds.checkpointing.save import Saver


def _positive(record: Any, field: Any, value: float | None) -> None:
    if value is not None and not value > 0:
        raise ValueError(f"{field.name}={value!r}: must be above 0")


@attrs.frozen
class Checkpoints:
    """When ``fit`` saves, and which checkpoints to keep. The end of a run is always saved.

    Attributes:
        path: a folder that all ranks see; created if missing.
        every: steps between two checkpoints; None for none by steps.
        minutes: between two checkpoints, by rank 0's clock; None for none by time.
        keep_last: how many checkpoints to keep; None for all.
        keep_every: also keep those whose number of updates is a multiple of this.
        resume: whether to resume from the newest checkpoint in ``path``; False starts from the given state.

    >>> Checkpoints("run", every=1000)
    Checkpoints('run', every=1000)
    """

    path: Path = attrs.field(converter=checked_path)
    every: int | None = attrs.field(default=None, kw_only=True, validator=positive_steps)
    minutes: float | None = attrs.field(default=None, kw_only=True, validator=_positive)
    keep_last: int | None = attrs.field(default=3, kw_only=True)
    keep_every: int | None = attrs.field(default=None, kw_only=True)
    resume: bool = attrs.field(default=True, kw_only=True)

    def __repr__(self) -> str:
        values = [(field, getattr(self, field.name)) for field in attrs.fields(Checkpoints)[1:]]
        changed = [f", {field.name}={value!r}" for field, value in values if value != field.default]
        return f"Checkpoints({str(self.path)!r}{''.join(changed)})"


@attrs.frozen
class Progress:
    """Where a run is, in addition to its state.

    Attributes:
        done: steps made; those that were rolled back do not count.
        data: the next batch's position on all ranks, from ``gathered``; None is the beginning.
        rollbacks: how often the run was rolled back.
        generators: torch's default generators, from ``gathered_generators``.
    """

    done: int = 0
    data: Any = attrs.field(default=None, repr=False)
    rollbacks: int = 0
    generators: Any = attrs.field(default=None, repr=False)


@attrs.define(eq=False)
class CheckpointManager:
    """Saves a run into its folder, and loads it. Without a policy it does nothing.

    Attributes:
        policy: where and when to save.
        saved: the number of steps at the last checkpoint; None if there is none.
    """

    policy: Checkpoints | None
    saved: int | None = None
    _saver: "Saver | None" = None
    _last: float = attrs.field(factory=time.monotonic)

    def open(self) -> None:
        """Locks the folder. Collective."""
        if self.policy is not None:
            from functional_ds.checkpointing.save import Saver

            self._saver = Saver(self.policy.path, keep_last=self.policy.keep_last, keep_every=self.policy.keep_every)

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, *error: Any) -> None:
        if self._saver is not None:
            self._saver.__exit__(*error)

    def due(self, done: int) -> bool:
        """Whether a checkpoint is due by the number of steps."""
        return self.policy is not None and self.policy.every is not None and done % self.policy.every == 0

    def late(self) -> bool:
        """Whether a checkpoint is due by time, by this rank's clock."""
        minutes = None if self.policy is None else self.policy.minutes
        return minutes is not None and time.monotonic() - self._last >= 60 * minutes

    def save(self, state: State, *, done: int, data: Any, rollbacks: int) -> None:
        """Starts to save; waits for the previous checkpoint. Collective.

        Args:
            state: the run's.
            done: the number of steps made.
            data: the next batch's position on this rank.
            rollbacks: how often the run was rolled back.
        """
        self._last = time.monotonic()
        if self._saver is None or self.saved == done:
            return
        progress = Progress(done, gathered(data), rollbacks, gathered_generators())
        self._saver.save(state, tag=f"step-{done:08}", extra={"fit": attrs.asdict(progress)})
        self.saved = done

    @property
    def failed(self) -> bool:
        """Whether this rank's writer has failed so far. ``wait`` raises its error on all ranks."""
        return self._saver is not None and self._saver.failed

    def wait(self) -> None:
        """Waits until the last checkpoint is published. Collective."""
        if self._saver is not None:
            self._saver.wait()

    def newest(self, like: State, *, donate: bool = False) -> tuple[State, Progress] | None:
        """The newest complete checkpoint; None if there is none. Collective.

        Raises:
            ValueError: ``fit`` did not make it.
        """
        if self.policy is None:
            return None
        from functional_ds.checkpointing.load import load

        path = self.policy.path
        try:
            state, extra = load(path, like=like, with_extra=True, donate=donate)
        except NoCheckpointError:
            return None
        if "fit" not in (extra or {}):
            raise ValueError(
                f"path={str(path)!r}: its newest checkpoint was not made by fit, so the position in the data is unknown; "
                "pass fds.load(path, like=state) as the state, and another folder as path"
            )
        progress = Progress(**extra["fit"])
        self.saved = progress.done
        return state, progress
