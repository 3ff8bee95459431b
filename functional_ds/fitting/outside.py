"""What a step reads and writes outside its state, and a resumed run must find again: generators and buffers."""

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import attrs
import torch

from functional_ds import comm
from functional_ds.functional import Apply, with_changed_buffers

from .position import as_json, from_json

__all__ = ["Outside"]


@attrs.define(eq=False)
class Outside:
    """torch's default generators of this rank, and the buffers of modules.

    Law 37 holds for steps with ``nn.Dropout`` and ``nn.BatchNorm``, too: ``restore ∘ kept = id`` on as many ranks.

    Attributes:
        applies: modules as ``fds.functional`` gives them; of their buffers those are kept that change.
    """

    applies: Sequence[Apply] = ()
    _told: bool = False

    def __attrs_post_init__(self) -> None:
        for apply in self.applies:
            if not isinstance(apply, Apply):
                raise TypeError(f"buffers={apply!r}: pass the function of a module that fds.functional gives, or several")

    def kept(self) -> Any:
        """All ranks' values as JSON. Collective."""
        self._look()
        generators, device = {"cpu": torch.get_rng_state()}, self._device()
        if device is not None:
            generators["cuda"] = torch.cuda.get_rng_state(device)
        own = {"generators": generators, "buffers": [dict(apply.changed_buffers) for apply in self.applies]}
        return comm.all_gather_object(as_json(own))

    def restore(self, kept: Any, *, generators: bool = True) -> None:
        """Puts this rank's values back.

        On another number of ranks each takes the buffers of one that there was, and generators stay as they are. After a
        roll-back they stay, too, as the data do.

        Raises:
            ValueError: the modules are others than those that were saved.
        """
        if kept is None:  # an older checkpoint
            return
        world = comm.world()
        own = from_json(kept[world.rank % len(kept)])
        if len(own["buffers"]) != len(self.applies):
            raise ValueError(
                f"buffers: the checkpoint has those of {len(own['buffers'])} modules, and fit was given {len(self.applies)}; "
                "pass the modules of the run that saved it"
            )
        for apply, buffers in zip(self.applies, own["buffers"], strict=True):
            apply.put_buffers(buffers)
        if generators and world.size == len(kept):
            device = self._device()
            torch.set_rng_state(own["generators"]["cpu"])
            if device is not None and "cuda" in own["generators"]:
                torch.cuda.set_rng_state(own["generators"]["cuda"], device)

    def apart(self) -> AbstractContextManager[None]:
        """Inside, draws leave the generators as they were: an evaluation is no part of the training."""
        device = self._device()
        return torch.random.fork_rng([] if device is None else [device])

    def _device(self) -> torch.device | None:
        device = comm.world().world.device
        return device if device.type == "cuda" else None

    def _look(self) -> None:
        if not self._told and set(with_changed_buffers()) - set(self.applies):
            self._told = True
            if comm.world().rank == 0:
                warnings.warn(
                    "the step changes buffers of a module (running statistics, say), which are in no checkpoint: pass "
                    "fit(..., buffers=apply), where apply is what fds.functional gave for it",
                    stacklevel=2,
                )
