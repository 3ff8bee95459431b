"""torch's default generators, which a step draws from beside its state's key: a resumed run must find them again."""

from contextlib import AbstractContextManager
from typing import Any

import torch

from functional_ds import comm

from .data import from_json, gathered

__all__ = ["Generators"]


class Generators:
    """torch's default generators of this rank.

    Law 37 holds for steps with ``nn.Dropout``, too: ``restore ∘ kept = id`` on as many ranks.
    """

    def kept(self) -> Any:
        """All ranks' values as JSON. Collective."""
        generators, device = {"cpu": torch.get_rng_state()}, self._device()
        if device is not None:
            generators["cuda"] = torch.cuda.get_rng_state(device)
        return {"count": comm.world().size, **gathered({"generators": generators})}

    def restore(self, kept: Any) -> None:
        """Puts this rank's values back; on another number of ranks generators stay as they are."""
        world = comm.world()
        if kept is None or world.size != kept["count"]:  # an older checkpoint, or other ranks
            return
        ranks = from_json([kept["all"]] * kept["count"] if "all" in kept else kept["ranks"])
        mine, device = ranks[world.rank]["generators"], self._device()
        torch.set_rng_state(mine["cpu"])
        if device is not None and "cuda" in mine:
            torch.cuda.set_rng_state(mine["cuda"], device)

    def apart(self) -> AbstractContextManager[None]:
        """Inside, draws leave the generators as they were: an evaluation is no part of the training."""
        device = self._device()
        return torch.random.fork_rng([] if device is None else [device])

    def _device(self) -> torch.device | None:
        device = comm.world().world.device
        return device if device.type == "cuda" else None
