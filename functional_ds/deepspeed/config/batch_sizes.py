"""DeepSpeed's three batch sizes, of which two determine the third."""

import attrs

from .config_reader import Settings
from .explain import ConfigError
from .keys.config_key import Fate

__all__ = ["BatchSizes", "batch_sizes", "check_world_size"]

_TRAIN, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@attrs.frozen
class BatchSizes:
    """The sizes of a batch, in rows.

    Law: ``train_batch_size = train_micro_batch_size_per_gpu · gradient_accumulation_steps · world_size``.

    Attributes:
        train_batch_size: in an update, on all ranks.
        train_micro_batch_size_per_gpu: in a micro-batch, on one rank.
        gradient_accumulation_steps: micro-batches in an update.
        world_size: data-parallel ranks.
    """

    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int
    world_size: int

    @property
    def rows(self) -> int:
        """What a rank passes to a step: the rows of all its micro-batches."""
        return self.train_micro_batch_size_per_gpu * self.gradient_accumulation_steps


def batch_sizes(settings: Settings, world_size: int) -> BatchSizes | None:
    """The sizes by DeepSpeed's rules: quotients are rounded down, then the product is checked. None if they are invalid."""
    train, micro, steps = (settings[name] for name in (_TRAIN, _MICRO, _STEPS))
    if train is None and micro is None:
        settings.refuse(_TRAIN, f"the config must have `{_TRAIN}` or `{_MICRO}`; `{_STEPS}` alone gives neither")
        return None
    if train is None:
        steps = steps or 1
        train = micro * steps * world_size
    elif micro is None:
        steps = steps or 1
        micro = train // world_size // steps
    elif steps is None:
        steps = train // micro // world_size
    if min(micro, steps) < 1 or train != micro * steps * world_size:
        settings.refuse(
            _TRAIN,
            f"{train} rows are not {micro} rows of a micro-batch · {steps} micro-batches · {world_size} ranks = "
            f"{micro * steps * world_size}; change one of the three sizes",
        )
        return None
    for name in (_TRAIN, _MICRO, _STEPS):
        if name in settings:
            settings.note(name, Fate.BECAME, f"Rows: micro-batch {micro} · accumulation {steps} · ranks {world_size}.")
    return BatchSizes(train, micro, steps, world_size)


def check_world_size(world_size: int) -> None:
    """Raises an error for an invalid number of ranks."""
    if type(world_size) is not int or world_size < 1:
        raise ConfigError(f"world_size={world_size!r} must be the number of data-parallel ranks")
