"""What engines save with a state: param groups' numbers, a scheduler's state, and which buffers are persistent."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from functional_ds import comm
from functional_ds.state_dict.all_or_none import gather_or_none
from functional_ds.state_dict.describe import describe
from functional_ds.state_dict.latest_file import latest_tag
from functional_ds.step.state.slots import Role
from functional_ds.step.state.state import State

from .plain_values import decoded, encoded, pickled_paths

LOOSE = ("params/*", f"{Role.BUFFER.value}.*")  # what may be missing or extra if names need not be the same


def latest_on_ranks(folder: Path) -> str | None:
    """The tag in the file ``latest`` of a folder, as rank 0 reads it; None without such a file. Collective.

    Raises:
        DamagedError: the file is damaged, on some rank; all ranks raise it.
    """
    return gather_or_none(comm.world(), lambda: latest_tag(folder), share=lambda tag: tag)[1][0]


def saved_buffers(module: nn.Module) -> list[str]:
    """The names of the buffers that are in the module's ``state_dict``; a state has the others, too."""
    saved = module.state_dict().keys()
    return [name for name, _ in module.named_buffers(remove_duplicate=False) if name in saved]


def tied_names(module: nn.Module) -> dict[str, str]:
    """From further names of tied parameters to the first."""
    first = {id(p): name for name, p in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in every if first[id(p)] != name}


def module_roles(state: State) -> tuple[str, ...]:
    """What a state has of a module: for ``only`` of ``load``, to read just weights."""
    buffers = any(shard.name.startswith(f"{Role.BUFFER.value}.") for shard in describe(state))
    return ("params", *([Role.BUFFER.value] if buffers else []))


def saved_values(held: Mapping[str, Any]) -> dict[str, Any]:
    """Values to store with a state, as JSON; warns on rank 0 of objects that are pickled."""
    encoded_values: dict[str, Any] = {name: encoded(value) for name, value in held.items()}
    pickled = [path for name, value in encoded_values.items() for path in pickled_paths(value, name)]
    if pickled and comm.world().rank == 0:
        warnings.warn(
            f"save_checkpoint: {', '.join(pickled)}, is pickled, so load_checkpoint will need allow_pickle=True; plain values, "
            "tensors and arrays need none",
            stacklevel=4,
        )
    return encoded_values


def loaded_values(held: Mapping[str, Any], *, allow_pickle: bool) -> dict[str, Any]:
    """The inverse of ``saved_values``.

    Raises:
        CheckpointError: it has pickled objects, and ``allow_pickle`` is False.
        DamagedError: no engine saved it.
    """
    return {name: decoded(value, name=name, allow_pickle=allow_pickle) for name, value in held.items()}


def numbers_of(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The param groups without their params."""
    return [{name: value for name, value in group.items() if name != "params"} for group in groups]


def check_resumable(
    place: Path,
    *,
    groups: Sequence[Any] = (),
    saved_groups: Sequence[Any] | None = None,
    scheduler: Any = None,
    saved_scheduler: Any = None,
) -> None:
    """Raises an error for a checkpoint whose groups or scheduler are not the engine's, before anything is changed.

    Args:
        place: of the checkpoint.
        groups: of the engine.
        saved_groups: None if they are not to be loaded.
        scheduler: the user's own, to resume; None if there is none.
        saved_scheduler: its state.

    Raises:
        ValueError: there are more or fewer groups; the checkpoint has no scheduler's state, or that of another class.
    """
    if saved_groups is not None and len(saved_groups) != len(groups):
        raise ValueError(
            f"load_checkpoint: {place} has {len(saved_groups)} param groups, and the engine {len(groups)}; make as many, or "
            "pass load_optimizer_states=False"
        )
    if not hasattr(scheduler, "load_state_dict"):
        return
    class_name, advice = type(scheduler).__name__, "pass load_lr_scheduler_states=False to begin with the scheduler as it is"
    if saved_scheduler is None:
        raise ValueError(f"load_checkpoint: {place} has no state of a scheduler, and the engine has a {class_name}; {advice}")
    known = scheduler.state_dict().keys()
    if known and not known & saved_scheduler.keys():
        held = f"the state of a scheduler with {', '.join(sorted(map(str, saved_scheduler)))}"
        raise ValueError(
            f"load_checkpoint: {place} has {held}, and the engine a {class_name}, which has no such thing; {advice}"
        )
