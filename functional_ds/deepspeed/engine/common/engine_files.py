"""Engines' checkpoints in DeepSpeed's layout: a folder for each tag, and the file ``latest``."""

import warnings
from collections.abc import Mapping
from os import PathLike
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base.disk.files import write_atomically, written_atomically
from functional_ds.deepspeed.config.explain import UsageError
from functional_ds.deepspeed.engine.loop.saved_beside import (
    LOOSE,
    check_resumable,
    latest_on_ranks,
    loaded_values,
    module_roles,
    numbers_of,
    saved_buffers,
    saved_values,
    tied_names,
)
from functional_ds.step.state.state import State

from .config_scheduler import ConfigScheduler

_STATE = "state"  # the tag within a tag's folder
_COUNTS = ("global_steps", "global_samples", "skipped_steps", "updates", "micro_steps")


class EngineFiles:
    """``save_checkpoint`` and ``load_checkpoint``.

    A tag's folder can be read by ``fds.load``, on any number of ranks and any stage. ``client_state`` and the scheduler's state
    are written as JSON: numbers, strings, containers, tensors, arrays. Other objects are pickled, with a warning. An engine has
    a ``state``, which a load replaces, and ``_groups()``, its present param groups.
    """

    _reads_deepspeed = False  # whether DeepSpeed's own files of such an engine are read

    def _discard(self) -> None:
        """Ends the open passes."""

    def save_checkpoint(
        self: Any,
        save_dir: Any,
        tag: Any = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Writes the state of all ranks into ``save_dir/tag``, and ``save_dir/latest``. Collective.

        Args:
            save_dir: a folder that all ranks see.
            tag: its name; by default ``global_step{N}``.
            client_state: what ``load_checkpoint`` will return: plain values, tensors, arrays, or other objects, which are
                pickled. Rank 0's is used.
            save_latest: whether the file ``latest`` names it from now on.
            exclude_frozen_parameters: has no effect, with a warning: a state is always saved whole.

        Raises:
            ValueError: no folder, or a tag outside of it; ranks with different tags, if ``checkpoint.tag_validation`` is FAIL.
                Otherwise rank 0's is used.
            CheckpointError: a rank could not write; ``latest`` is unchanged.
        """
        from functional_ds.checkpointing.save import save  # may be left out of an installation

        if exclude_frozen_parameters:
            warnings.warn("exclude_frozen_parameters=True: a state is saved whole; see save_16bit_model", stacklevel=2)
        state, counts, scheduler = self.state, self._counts, self.lr_scheduler
        counts.settle()
        tag = f"global_step{counts.global_steps}" if tag is None else tag
        if not isinstance(client_state, Mapping | None):
            raise UsageError(f"client_state is a {type(client_state).__name__}; pass a dict")
        place, name = _place(save_dir, _one_tag(str(tag), self.plan.value("checkpoint.tag_validation")))
        held = {
            "client_state": dict(client_state or {}),
            "lr_scheduler": scheduler.state_dict() if hasattr(scheduler, "state_dict") else None,
            "groups": numbers_of(self._groups()),
        }
        numbers = {name: getattr(counts, name) for name in _COUNTS}
        extra = {"engine": numbers, "held": saved_values(held), "buffers": saved_buffers(self.module)}
        extra["tied"] = tied_names(self.module)
        save(state, place, tag=_STATE, extra=extra)
        if save_latest and comm.world().rank == 0:
            write_atomically(Path(save_dir) / "latest", name.encode())
        comm.barrier()
        return True

    def load_checkpoint(
        self: Any,
        load_dir: Any,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
        *,
        allow_pickle: bool = False,
    ) -> tuple[str | None, Any]:
        """Resumes from a checkpoint of any number of ranks and stage, or from DeepSpeed's, except of pipelines. Collective.

        Returns:
            the folder and ``client_state``; (None, None) if the folder has no file ``latest`` and no tag is given.

        Args:
            load_dir: the folder that was passed to ``save_checkpoint``.
            tag: which one; by default the one that ``latest`` names.
            load_module_strict: False allows params and buffers with different names.
            load_optimizer_states: False reads only params and buffers; True also the param groups' numbers, including rates.
            load_lr_scheduler_states: False leaves the scheduler unchanged.
            load_module_only: True reads only params and buffers, and leaves counts and scheduler unchanged.
            custom_load_fn: unsupported.
            allow_pickle: whether to unpickle objects, which can run any code: those in ``client_state`` or the scheduler's
                state that are not plain values, tensors or arrays.

        Raises:
            NoCheckpointError: there is no such tag.
            StructureError: names or shapes differ.
            CheckpointError: it has pickled objects, and ``allow_pickle`` is False.
            ValueError: the checkpoint has another number of param groups, or no state of the user's scheduler.
        """
        if custom_load_fn is not None:
            raise ValueError("custom_load_fn: checkpoints are read shard by shard, so there is no whole state_dict to give it")
        tag = latest_on_ranks(Path(_folder("load_dir", load_dir))) if tag is None else tag
        if tag is None:
            return None, None
        place, name = _place(load_dir, tag)
        optimizer, scheduler = (asked and not load_module_only for asked in (load_optimizer_states, load_lr_scheduler_states))
        self._discard()
        like, engine_groups = self.state, self._groups()
        options: dict[str, Any] = {} if optimizer else {"only": module_roles(like)}
        if not load_module_strict:
            options |= {"allow_missing": LOOSE, "allow_extra": LOOSE}
        if self._reads_deepspeed and any(place.glob("*model_states.pt")):
            state, numbers, held = self._of_deepspeed(load_dir, name, like, options)
        else:
            from functional_ds.checkpointing.load import load  # may be left out of an installation

            state, extra = load(place, like=like, tag=_STATE, with_extra=True, **options)
            numbers, held = extra["engine"], loaded_values(extra["held"], allow_pickle=allow_pickle)
        groups = held.get("groups") if optimizer else None
        of_config = isinstance(self.lr_scheduler, ConfigScheduler)
        resumed = self.lr_scheduler if scheduler and not of_config else None
        check_resumable(
            place, groups=engine_groups, saved_groups=groups, scheduler=resumed, saved_scheduler=held["lr_scheduler"]
        )
        position = self.lr_scheduler.state_dict() if of_config else None
        self.state = state
        if not load_module_only:
            self._counts.restart(numbers if optimizer else {**numbers, "updates": int(state.step)})
        moved = held["lr_scheduler"] if scheduler else position
        if moved is not None and hasattr(self.lr_scheduler, "load_state_dict"):
            self.lr_scheduler.load_state_dict(moved)
        for group, now in zip(engine_groups, groups or (), strict=False):
            group.update(now)
        return str(place), held["client_state"]

    def _of_deepspeed(
        self: Any, folder: Any, tag: str, like: State, options: dict[str, Any]
    ) -> tuple[State, dict[str, int], dict[str, Any]]:
        """The state of a DeepSpeed checkpoint, its counts, and what ``save_checkpoint`` stores with it. Collective."""
        from functional_ds.interchange.deepspeed import from_deepspeed  # may be left out of an installation
        from functional_ds.interchange.deepspeed_files import ZeroFiles

        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        engine_groups = self._groups()
        order = [[names[id(parameter)] for parameter in group["params"]] for group in engine_groups] or None
        state = from_deepspeed(folder, like=like, tag=tag, order=order, **options)
        files = ZeroFiles.open(Path(folder), tag, order)
        known = {name for group in engine_groups for name in group} | {"initial_lr"}  # theirs have more of their own
        groups = [{name: value for name, value in group.items() if name in known} for group in files.groups] or None
        held = {"client_state": files.client_state(), "lr_scheduler": files.entries.get("lr_scheduler"), "groups": groups}
        return state, {**files.counts, "updates": int(state.step)}, held


def write_weights(weights: Mapping[str, Tensor], path: Path) -> None:
    """Writes a ``state_dict`` by ``torch.save``, or as safetensors if its name ends so. A failed write changes nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        from functional_ds.interchange.export import export  # may be left out of an installation

        export(dict(weights), path, overwrite=True)
    else:
        with written_atomically(path) as file:
            torch.save(weights, file)


def _one_tag(tag: str, mode: str) -> str:
    """Rank 0's tag, for all ranks. Collective.

    Raises:
        UsageError: the ranks' tags differ, and the config requires FAIL.
    """
    tags = comm.all_gather_object(tag)
    if len(set(tags)) > 1 and mode != "IGNORE":
        message = f"save_checkpoint: the ranks' tags differ: {', '.join(tags[:4])}; pass the same on all"
        if mode == "FAIL":
            raise UsageError(message)
        warnings.warn(f"{message}. Rank 0's is taken", stacklevel=3)
    first: str = tags[0]
    return first


def _place(folder: Any, tag: Any) -> tuple[Path, str]:
    name = str(tag)
    parts = PurePath(name).parts
    if not parts or PurePath(name).is_absolute() or ".." in parts or parts[0] == "latest":
        raise ValueError(f"tag={tag!r}: pass the name of a folder in {folder}, other than `latest`, which is a file")
    return Path(_folder("save_dir", folder)) / name, name


def _folder(name: str, folder: Any) -> Any:
    if not folder or not isinstance(folder, str | PathLike):
        raise ValueError(f"{name}={folder!r}: pass a folder")
    return folder
