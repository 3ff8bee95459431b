"""What transforms say of themselves, so that others can ask without knowing their names."""

from enum import Enum, auto

__all__ = ["Trait"]


class Trait(Enum):
    """What a transform does to a step, where the order of composition depends on it.

    A transform hands its traits to ``wrap``; ``Step.has`` asks for them.
    """

    SHARDS_PARAMS = auto()  # stores params in shards and gathers them while they are used: ZeRO-3
    SHARDS_STATE = auto()  # keeps the optimizer's state in shards: ZeRO 1 to 3
    KEEPS_WHOLE = auto()  # keeps some params whole although it stores the rest in shards
    SUMS_LAST = auto()  # does so after the last micro-batch, in its backward pass
    SPLITS_BATCHES = auto()  # its ``gradients`` only cut the batch: whoever has micro-batches can do without
    COPIES_PARAMS = auto()  # keeps a copy of the params in its slot: masters, averages
    OFFLOADS = auto()  # moves params, slots or the optimizer's state off the device
    RESIDENT_SLOT = auto()  # its slot must stay on the device
    USES_FILES = auto()  # reads and writes files in each step
    CASTS = auto()  # stores params in another dtype than the optimizer updates
    HEEDS_SKIPS = auto()  # its update and its slot change in a step that a loss scale skips only as they must
