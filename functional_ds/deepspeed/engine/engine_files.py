"""An engine's checkpoints in DeepSpeed's layout: a folder for each tag, and the file ``latest``."""

from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from functional_ds import comm
from functional_ds.base.files import write_atomically, written_atomically
from functional_ds.step.state import State

from .config_scheduler import ConfigScheduler
from .engine_counts import EngineCounts
from .loop.engine_loop import EngineLoop
from .loop.saved_beside import (
    LOOSE,
    check_resumable,
    latest_on_ranks,
    loaded_values,
    module_roles,
    numbers_of,
    saved_buffers,
    saved_values,
)

__all__ = ["load_engine", "save_engine", "save_weights"]

_STATE = "state"  # the tag within a tag's folder


class Saved(Protocol):
    """What is saved of an engine."""

    module: nn.Module
    lr_scheduler: Any
    optimizer: Any
    _loop: EngineLoop
    _counts: EngineCounts


def save_engine(engine: Saved, folder: Any, tag: Any, client_state: Mapping[str, Any], *, save_latest: bool) -> bool:
    """Writes ``folder/tag`` and ``folder/latest``. Collective.

    The folder of a tag is one that ``fds.load`` reads, for any number of ranks. What ``client_state`` and the scheduler hold is
    written as JSON: numbers, strings, containers, tensors, arrays. An object of another class is pickled, which a warning says.

    Args:
        engine: whose state it is.
        folder: seen by all ranks.
        tag: its name; None for ``global_step{N}``.
        client_state: rank 0's counts.
        save_latest: whether ``latest`` names it from now on.

    Raises:
        ValueError: no folder, or a tag that leads out of it.
        CheckpointError: a rank could not write; ``latest`` is as it was.
    """
    from functional_ds.checkpointing.save import save  # may be left out of an installation

    counts, loop = engine._counts, engine._loop
    state = loop.settled()
    counts.settle()
    place, name = _place(folder, f"global_step{counts.global_steps}" if tag is None else tag)
    scheduler = engine.lr_scheduler
    held = {
        "client_state": dict(client_state),
        "lr_scheduler": scheduler.state_dict() if hasattr(scheduler, "state_dict") else None,
        "groups": numbers_of(_param_groups(engine)),
    }
    numbers = {
        each: getattr(counts, each) for each in ("global_steps", "global_samples", "skipped_steps", "updates", "micro_steps")
    }
    extra = {"engine": numbers, "held": saved_values(held), "buffers": saved_buffers(engine.module)}
    save(state, place, tag=_STATE, extra=extra)
    if save_latest and comm.world().rank == 0:
        write_atomically(Path(folder) / "latest", name.encode())
    comm.barrier()
    return True


def load_engine(
    engine: Saved, folder: Any, tag: Any, *, strict: bool, optimizer: bool, scheduler: bool, counts: bool, allow_pickle: bool
) -> tuple[str | None, Any]:
    """Goes on from ``folder/tag``. Collective.

    Args:
        engine: whose state is replaced.
        folder: that of ``save_engine``, or of DeepSpeed's ``save_checkpoint``.
        tag: which; None for the one that ``latest`` names.
        strict: whether params must have the same names.
        optimizer: whether to read more than params and buffers; with it the param groups' numbers, rates among them.
        scheduler: whether to read the scheduler's state. A config's goes on from where it is, otherwise.
        counts: whether to read the counts of steps.
        allow_pickle: whether objects that were pickled are unpickled, which can run any code.

    Returns:
        the tag's folder and the saved ``client_state``; (None, None) where there is no ``latest``.

    Raises:
        NoCheckpointError: there is no such tag.
        StructureError: names or shapes differ.
        CheckpointError: it has pickled objects, and ``allow_pickle`` is False.
        ValueError: the checkpoint has another number of param groups, or no state of the user's scheduler.
    """
    tag = latest_on_ranks(Path(folder)) if tag is None else tag
    if tag is None:
        return None, None
    place, name = _place(folder, tag)
    loop, own = engine._loop, _param_groups(engine)
    loop.discard()
    options: dict[str, Any] = {} if optimizer else {"only": module_roles(loop.state)}
    if not strict:
        options |= {"allow_missing": LOOSE, "allow_extra": LOOSE}
    if any(place.glob("*model_states.pt")):
        state, numbers, held = _of_deepspeed(folder, name, engine, options)
    else:
        from functional_ds.checkpointing.load import load  # may be left out of an installation

        state, extra = load(place, like=loop.state, tag=_STATE, with_extra=True, **options)
        numbers, held = extra["engine"], loaded_values(extra, place, allow_pickle=allow_pickle)
    groups = held.get("groups") if optimizer else None
    resumed = engine.lr_scheduler if scheduler and not isinstance(engine.lr_scheduler, ConfigScheduler) else None
    check_resumable(place, groups=own, saved_groups=groups, scheduler=resumed, saved_scheduler=held["lr_scheduler"])
    position = engine.lr_scheduler.state_dict() if isinstance(engine.lr_scheduler, ConfigScheduler) else None
    loop.replace(state)
    if counts:
        engine._counts.restart(numbers if optimizer else {**numbers, "updates": int(loop.state.step)})
    moved = held["lr_scheduler"] if scheduler else position
    if moved is not None and hasattr(engine.lr_scheduler, "load_state_dict"):
        engine.lr_scheduler.load_state_dict(moved)
    for group, now in zip(own, groups or (), strict=False):
        group.update(now)
    return str(place), held["client_state"]


def _of_deepspeed(
    folder: Any, tag: str, engine: Saved, options: dict[str, Any]
) -> tuple[State, dict[str, int], dict[str, Any]]:
    """The state of a checkpoint of DeepSpeed's, its counts, and what ``save_engine`` keeps beside. Collective."""
    from functional_ds.interchange.deepspeed import from_deepspeed  # may be left out of an installation
    from functional_ds.interchange.deepspeed_files import ZeroFiles

    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    order = [[names[id(parameter)] for parameter in group["params"]] for group in _param_groups(engine)] or None
    state = from_deepspeed(folder, like=engine._loop.state, tag=tag, order=order, **options)
    files = ZeroFiles.open(Path(folder), tag, order)
    known = {name for group in _param_groups(engine) for name in group} | {"initial_lr"}  # theirs have more of their own
    groups = [{name: value for name, value in group.items() if name in known} for group in files.groups]
    held = {"client_state": files.client_state(), "lr_scheduler": files.entries.get("lr_scheduler"), "groups": groups or None}
    return state, {**files.counts, "updates": int(state.step)}, held


def _param_groups(engine: Saved) -> list[dict[str, Any]]:
    return [] if engine.optimizer is None else engine.optimizer.param_groups


def save_weights(weights: Mapping[str, Tensor], folder: Any, name: str) -> bool:
    """Writes a ``state_dict`` on rank 0. Collective.

    Args:
        weights: on the host.
        folder: created if missing.
        name: of the file; one that ends with ".safetensors" is written so.
    """
    if comm.world().rank == 0:
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            from functional_ds.interchange.export import export  # may be left out of an installation

            export(dict(weights), path, overwrite=True)
        else:
            with written_atomically(path) as file:
                torch.save(dict(weights), file)
    comm.barrier()
    return True


def _place(folder: Any, tag: Any) -> tuple[Path, str]:
    name = str(tag)
    parts = PurePath(name).parts
    if not folder:
        raise ValueError(f"save_dir={folder!r}: pass a folder")
    if not parts or PurePath(name).is_absolute() or ".." in parts:
        raise ValueError(f"tag={tag!r}: pass the name of a folder in {folder}")
    return Path(folder) / name, name
