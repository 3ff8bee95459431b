"""torch's default generators, which a step draws from beside its state's key: a resumed run must find them again."""

from contextlib import AbstractContextManager
from typing import Any

import torch

from functional_ds import comm
from functional_ds.base.device import forked_rng, in_use, rng_state, set_rng_state

from .positions import from_json, gathered

__all__ = ["Generators"]


class Generators:
    """torch's default generators of this rank.

    Law 37 holds for steps with ``nn.Dropout``, too: ``restore ∘ kept = id`` on as many ranks.
    """

    def kept(self) -> Any:
        """All ranks' values as JSON. Collective."""
        generators, device = {"cpu": torch.get_rng_state()}, in_use()
        if device is not None:
            generators[device.type] = rng_state(device)
        return {"count": comm.world().size, **gathered({"generators": generators})}

    def restore(self, kept: Any) -> None:
        """Puts this rank's values back; on another number of ranks generators stay as they are."""
        world = comm.world()
        if kept is None or world.size != kept["count"]:  # an older checkpoint, or other ranks
            return
        ranks = from_json([kept["all"]] * kept["count"] if "all" in kept else kept["ranks"])
        mine, device = ranks[world.rank]["generators"], in_use()
        torch.set_rng_state(mine["cpu"])
        if device is not None and device.type in mine:
            set_rng_state(device, mine[device.type])

    def apart(self) -> AbstractContextManager[None]:
        """Inside, draws leave the generators as they were: an evaluation is no part of the training."""
        return forked_rng()
