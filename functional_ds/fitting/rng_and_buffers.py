"""What a step reads and writes outside its state, and a resumed run must find again: generators and buffers."""

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.modules.functional import Apply, alike, with_changed_buffers

from .positions import from_json, gathered

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
    _before: dict[Apply, dict[str, Tensor]] = attrs.field(factory=dict)  # what other modules have come with
    _taken: dict[Apply, dict[str, Tensor]] = attrs.field(factory=dict)  # what other ranks had, which may go stale here

    def __attrs_post_init__(self) -> None:
        for apply in self.applies:
            if not isinstance(apply, Apply):
                raise TypeError(f"buffers={apply!r}: pass the function of a module that fds.functional gives, or several")
        for apply in with_changed_buffers():
            self._before[apply] = {name: buffer.clone() for name, buffer in apply.changed_buffers.items()}

    def kept(self) -> Any:
        """All ranks' values as JSON. Collective."""
        generators, device = {"cpu": torch.get_rng_state()}, self._device()
        if device is not None:
            generators["cuda"] = torch.cuda.get_rng_state(device)
        buffers, others = [], []
        for apply in self.applies:
            changed, taken = apply.changed_buffers, self._taken.get(apply, {})
            stale = {name for name in taken if name in changed and alike(changed[name], taken[name])}
            buffers.append({name: buffer for name, buffer in changed.items() if name not in stale})
            others.append({name: taken[name] for name in stale})
        own = {"generators": generators, "buffers": buffers, "others": others}
        found = {"count": comm.world().size, **gathered(own)}
        self._look()
        return found

    def restore(self, kept: Any, *, generators: bool = True) -> None:
        """Puts this rank's values back.

        A buffer that this rank did not have, or of which there were other ranks, is the first rank's that had it; one that had
        not changed is as the module has it. On another number of ranks generators stay as they are. After a roll-back they
        stay, too, as the data do.

        Raises:
            ValueError: the modules are others than those that were saved.
        """
        if kept is None:  # an older checkpoint
            return
        world, same = comm.world(), comm.world().size == kept["count"]
        ranks = from_json([kept["all"]] * kept["count"] if "all" in kept else kept["ranks"])
        saved = len(ranks[0]["buffers"])
        if saved == len(self.applies):
            for index, apply in enumerate(self.applies):
                held = [each[kind][index] for kind in ("others", "buffers") for each in reversed(ranks)]
                mine = ranks[world.rank]["buffers"][index] if same else {}
                taken = {name: value for one in held for name, value in one.items() if name not in mine}
                apply.put_buffers({**dict(apply.module.named_buffers()), **taken, **mine})
                self._taken[apply] = taken
        elif saved:
            raise ValueError(
                f"buffers: the checkpoint has those of {saved} modules, and fit was given {len(self.applies)}; "
                "pass the modules of the run that saved it"
            )
        elif world.rank == 0:
            warnings.warn("buffers: the checkpoint has none, so modules begin with their own", stacklevel=2)
        if generators and same:
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

    def _look(self) -> None:
        if self._told or not any(map(self._forgets, with_changed_buffers())):
            return
        self._told = True
        if comm.world().rank == 0:
            warnings.warn(
                "the step changes buffers of a module (running statistics, say), which are in no checkpoint: pass "
                "fit(..., buffers=apply), where apply is what fds.functional gave for it",
                stacklevel=2,
            )

    def _forgets(self, apply: Apply) -> bool:
        before = self._before.get(apply, {})
        changes = apply not in self.applies and any(
            name not in before or not alike(buffer, before[name]) for name, buffer in apply.changed_buffers.items()
        )
        return changes
