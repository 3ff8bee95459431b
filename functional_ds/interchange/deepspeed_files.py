"""DeepSpeed's checkpoints as data, and their files opened without running code.

A folder ``<tag>`` has, for every rank, ``*zero_pp_rank_<r>_mp_rank_00_optim_states.pt`` with flat fp32 tensors and the
optimizer's states of them. ``*mp_rank_00_model_states.pt`` has the parameters' names and shapes.

In stage 0 this one file has everything, as the module's and the optimizer's ``state_dict``.
"""

import contextlib
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import EnumType, IntEnum
from math import prod
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from functional_ds.state_dict.errors import CheckpointError, DamagedError, NoCheckpointError
from functional_ds.state_dict.latest_file import latest_tag

from .deepspeed_layout import MASTER, Param, frozen_params, in_groups, in_pieces, numbers_of, whole_params


class PlainAttributes:
    """The attributes of an object of one of DeepSpeed's classes, without its methods."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__.update(kwargs)


def enum_member(kind: Any, name: str) -> Any:
    """A member of an enum: what Python before 3.11.4 pickles as a call of ``getattr``, which could reach anything.

    Raises:
        pickle.UnpicklingError: it is none.
    """
    if not (isinstance(kind, EnumType) and name in kind.__members__):
        raise pickle.UnpicklingError(f"it calls getattr({kind!r}, {name!r}), which could run code")
    return kind[name]


class _ZeroStage(IntEnum):
    """DeepSpeed's stages."""

    disabled, optimizer_states, gradients, weights = range(4)


# DeepSpeed's own classes in its ZeRO checkpoints, and what replaces them: an enum becomes its number.
_KNOWN = (
    (_ZeroStage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (enum_member, "builtins.getattr"),
    (PlainAttributes, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (PlainAttributes, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (PlainAttributes, "deepspeed.utils.tensor_fragment.fragment_address"),
)


def load_pickle(path: Path) -> Any:
    """The file's content, with memory-mapped tensors, of which only the parts that are used are read.

    Torch's ``weights_only`` loader makes tensors and plain containers, and raises an error for any other class.
    DeepSpeed's few classes become ``PlainAttributes``, so DeepSpeed need not be installed. Classes in
    ``torch.serialization.safe_globals`` are accepted as well.

    Raises:
        NoCheckpointError: there is no such file.
        DamagedError: it is damaged, or a file of another kind.
        CheckpointError: it holds an object of an unknown class.
    """
    if not path.is_file():
        raise NoCheckpointError(f"path: there is no file {path}")
    try:
        with torch.serialization.safe_globals(list(_KNOWN)):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        what = ", ".join(_others(path)) or str(error).splitlines()[-1]
        raise CheckpointError(
            f"path: {path} has objects that are not loaded, since unpickling them could run code: {what}; "
            "torch.serialization.safe_globals allows a class that you trust"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, IndexError) as error:
        raise DamagedError(
            f"path: {path} is damaged, or was not written by torch.save: {str(error).splitlines()[0]}"
        ) from error


def _others(path: Path) -> list[str]:
    """The names in a file that are not accepted."""
    try:
        found = set(get_unsafe_globals_in_checkpoint(path))
        return sorted(found - {name for _, name in _KNOWN}) or sorted(found & {"builtins.getattr"})
    except (pickle.UnpicklingError, RuntimeError, ValueError, KeyError):
        return []


_COUNTS = ("global_steps", "global_samples", "skipped_steps")
# What DeepSpeed's engines write in addition to the caller's ``client_state``.
_OWN = {"module", "optimizer", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"}
_OWN |= {*_COUNTS, "lr_scheduler", "data_sampler", "random_ltd", "dp_world_size", "mp_world_size", "ds_config", "ds_version"}
_OWN |= {"checkpoint_parallel_dimensions", "sparse_tensor_module_names", "universal_checkpoint_info"}


@attrs.frozen(eq=False)
class ZeroFiles:
    """An opened checkpoint.

    Attributes:
        path: its folder.
        stage: of ZeRO.
        params: by name.
        aliases: from further names of tied parameters to their names in ``params``.
        flats: for each rank and each flat tensor, its values by kind.
        updates: for each flat tensor, the number of updates.
        groups: each param group's numbers; empty if the checkpoint has none.
        buffers: the module's own, those that are saved, by name.
        counts: the engine's.
        entries: everything in its first file, including the scheduler's state and the caller's ``client_state``.
        scaler: the loss scaler's attributes.
    """

    path: Path
    stage: int
    params: Mapping[str, Param]
    aliases: Mapping[str, str]
    flats: Sequence[Sequence[Mapping[str, Tensor]]]
    updates: Sequence[int]
    groups: Sequence[Mapping[str, Any]]
    buffers: Mapping[str, Tensor]
    counts: Mapping[str, int]
    entries: Mapping[str, Any]
    scaler: Any

    @staticmethod
    def open(path: Path, tag: str | None = None, order: Sequence[Sequence[str]] | None = None) -> "ZeroFiles":
        """Opens the checkpoint of a tag; by default the one that the file ``latest`` names.

        Args:
            path: the folder of the run.
            tag: the name of the checkpoint.
            order: of stage 0, as ``from_deepspeed`` has it.

        Raises:
            NoCheckpointError: there is no such folder or file.
            DamagedError: a file is damaged or of another kind, or a rank's files are missing.
            CheckpointError: the model was also split by tensor or pipeline parallelism.
        """
        folder = _tagged(path, tag)
        if not any(folder.glob("*_optim_states.pt")) and (folder / "mp_rank_00_model_states.pt").is_file():
            (model,) = (load_pickle(file) for file in _model_files(folder, 0))
            with _structured(folder):
                if model["param_shapes"] is None:
                    return ZeroFiles._parse_whole(folder, model, order)
        ranks = _by_rank(folder, "_optim_states.pt")
        optim = [_section(load_pickle(file), file) for file in ranks]
        with _structured(folder):
            stage = int(optim[0].get("zero_stage", 1))
        models = [load_pickle(file) for file in _model_files(folder, stage)]
        with _structured(folder):
            return ZeroFiles._parse(folder, stage, optim, models)

    @staticmethod
    def _parse_whole(folder: Path, model: Mapping[str, Any], order: Sequence[Sequence[str]] | None) -> "ZeroFiles":
        """Parses a checkpoint of stage 0."""
        if not isinstance(model["module"], Mapping):
            raise CheckpointError(f"path: {folder} is of a pipeline parallel model, which is unsupported")
        fields, section = whole_params(model, order, str(folder)), model["optimizer"] or {}
        scaler = None
        if section.get("dynamic_loss_scale"):
            numbers = {"cur_iter": int(section["cur_iter"]), "last_overflow_iter": int(section["last_overflow_iter"])}
            scaler = PlainAttributes(dynamic=True, cur_scale=float(section["cur_scale"]), **numbers)
        return ZeroFiles(folder, 0, *fields, _buffers(model), _counts(model), model, scaler)

    @staticmethod
    def _parse(
        folder: Path, stage: int, optim: Sequence[Mapping[str, Any]], models: Sequence[Mapping[str, Any]]
    ) -> "ZeroFiles":
        count = optim[0].get("partition_count", len(optim))
        expected = max(count) if isinstance(count, list) else count
        if expected != len(optim):
            raise DamagedError(f"path: {folder} was written by {expected} ranks, and has the files of {len(optim)}")
        flats = [_flats(section, stage) for section in optim]
        shapes = [{name: torch.Size(shape) for name, shape in group.items()} for group in models[0]["param_shapes"]]
        if any(side < 0 for group in shapes for shape in group.values() for side in shape):
            raise ValueError("a parameter has a negative size")
        trained = in_pieces(shapes, flats) if stage == 3 else in_groups(shapes, flats, optim[0])
        params = {**trained, **frozen_params(models, trained)}
        aliases = {alias: name for alias, name in models[0].get("shared_params", {}).items() if alias not in params}
        scaler = optim[0].get("loss_scaler")
        if scaler is not None and getattr(scaler, "dynamic", False):
            float(scaler.cur_scale), int(scaler.cur_iter), int(scaler.last_overflow_iter)
        updates, groups, counts = _updates(optim[0], stage), _numbers(optim[0], stage), _counts(models[0])
        return ZeroFiles(folder, stage, params, aliases, flats, updates, groups, _buffers(models[0]), counts, models[0], scaler)

    def made(self) -> int:
        """The number of updates; steps that overflowed do not count."""
        counted = 0 if self.stage == 0 else max(self.updates, default=0)  # stage 0 may begin with an update of zeros
        return counted or self.counts.get("global_steps", 0) - self.counts.get("skipped_steps", 0)

    def client_state(self) -> dict[str, Any]:
        """The ``client_state`` that was passed to ``save_checkpoint``."""
        return {name: value for name, value in self.entries.items() if name not in _OWN}

    def kinds(self) -> set[str]:
        """The kinds of values that every trained parameter has."""
        return set.intersection(*(set(values) for rank in self.flats for values in rank)) if self.flats[0] else {MASTER}

    def find(self, name: str) -> Param | None:
        """A parameter under any of its names."""
        return self.params.get(name) or self.params.get(self.aliases.get(name, ""))

    def read(self, param: Param, state_name: str, *, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Elements of a flattened parameter, in pieces.

        Args:
            param: the parameter.
            state_name: ``MASTER``, or a key of the optimizer's state.
            start: the first element.
            stop: the element after the last.

        Yields:
            The first element's offset in the parameter, and the elements.
        """
        if param.frozen:
            at = 0
            for piece in param.whole:
                low, high = max(start, at), min(stop, at + piece.numel())
                if low < high:
                    yield low, piece.reshape(-1)[low - at : high - at]
                at += piece.numel()
        for flat_range in param.ranges:
            low, high = max(start, flat_range.offset), min(stop, flat_range.offset + flat_range.numel)
            if low < high:
                flat = self.flats[flat_range.rank][flat_range.which][state_name]
                begin = flat_range.start + low - flat_range.offset
                yield low, flat[begin : begin + high - low]

    def whole(self, param: Param, state_name: str) -> Tensor:
        """All values of a kind of a parameter, in fp32."""
        flat = torch.empty(prod(param.shape), dtype=torch.float32)
        for offset, piece in self.read(param, state_name, start=0, stop=flat.numel()):
            flat[offset : offset + piece.numel()] = piece
        return flat.view(param.shape)


@contextlib.contextmanager
def _structured(folder: Path) -> Iterator[None]:
    """A context in which errors are reported as a wrong structure of the files."""
    try:
        yield
    except CheckpointError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        what = f"a key is missing: {error}" if isinstance(error, KeyError) else str(error)
        raise DamagedError(
            f"path: {folder}: its files do not fit each other, or are not as DeepSpeed writes them: {what}"
        ) from error


# -- files ---------------------------------------------------------------------------------------------------------------


def _tagged(path: Path, tag: str | None) -> Path:
    if tag is None:
        tag = latest_tag(path)
        if tag is None:
            raise NoCheckpointError(
                f"path: {path} has no file 'latest'; is it the folder that DeepSpeed saved to? Else pass tag="
            )
    if not isinstance(tag, str):
        raise TypeError(f"tag={tag!r} must be a string; pass tag={str(tag)!r}")
    if not tag or "\0" in tag or Path(tag).name != tag or tag in (".", ".."):
        raise ValueError(f"tag={tag!r} is not a plain name of a folder in {path}")
    if not (path / tag).is_dir():
        raise NoCheckpointError(f"path: {path} has no checkpoint {tag!r}")
    return path / tag


_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)")


def _by_rank(folder: Path, suffix: str) -> list[Path]:
    files: dict[int, Path] = {}
    for file in folder.glob(f"*zero_pp_rank_*{suffix}"):
        place = _RANK.search(file.name)
        if place is None or int(place[2]):
            raise CheckpointError(f"path: {file} belongs to a tensor or pipeline parallel model, which is unsupported")
        files[int(place[1])] = file
    if not files:
        raise NoCheckpointError(f"path: {folder} has no files *zero_pp_rank_*{suffix}: it is not a checkpoint of ZeRO")
    if sorted(files) != list(range(len(files))):
        raise NoCheckpointError(f"path: {folder} lacks the file *{suffix} of rank {min(set(range(len(files))) - set(files))}")
    return [files[rank] for rank in range(len(files))]


def _model_files(folder: Path, stage: int) -> list[Path]:
    if stage == 3:
        return _by_rank(folder, "_model_states.pt")
    if len(list(folder.glob("mp_rank_*_model_states.pt"))) > 1:
        raise CheckpointError(f"path: {folder} is of a tensor or pipeline parallel model, which is unsupported")
    return [folder / "mp_rank_00_model_states.pt"]


def _section(content: Any, file: Path) -> dict[str, Any]:
    section = content.get("optimizer_state_dict") if isinstance(content, dict) else None
    if not isinstance(section, dict) or not {"single_partition_of_fp32_groups", "fp32_flat_groups"} & section.keys():
        raise DamagedError(f"path: {file} holds no states of ZeRO")
    return section


def _flats(section: Mapping[str, Any], stage: int) -> list[dict[str, Tensor]]:
    """A rank's flat tensors, each with the optimizer's states of its length."""
    flats = []
    for master, state in zip(_masters(section, stage), _states(section, stage), strict=True):
        if master.dim() != 1 or not master.is_floating_point():
            raise ValueError(f"a flat tensor is {master.dtype}{list(master.shape)}")
        kinds = {key: value for key, value in state.items() if isinstance(value, Tensor) and value.dim() == 1}
        flats.append({MASTER: master, **{key: value for key, value in kinds.items() if value.numel() >= master.numel()}})
    return flats


def _base(section: Mapping[str, Any], stage: int) -> Any:
    return section["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]


def _masters(section: Mapping[str, Any], stage: int) -> list[Tensor]:
    return section["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"]  # type: ignore[no-any-return]


def _states(section: Mapping[str, Any], stage: int) -> list[dict[str, Any]]:
    """The optimizer's states of a rank's flat tensors, empty before the first update."""
    base, count = _base(section, stage), len(_masters(section, stage))
    states = base if isinstance(base, list) else [base["state"].get(i, {}) for i in range(count)]  # a list: elastic_checkpoint
    if len(states) != count:
        raise ValueError(f"a rank has {count} flat tensors, and states of {len(states)}")
    return states


def _updates(section: Mapping[str, Any], stage: int) -> list[int]:
    """The number of updates of each flat tensor: torch keeps it in the state, DeepSpeed's own optimizers in the group."""
    base, states = _base(section, stage), _states(section, stage)
    groups = [] if isinstance(base, list) else base["param_groups"]
    common = max([section.get("base_optimizer_state_step", 0), *(group.get("step", 0) for group in groups)])
    updates = [int(state.get("step", common)) for state in states]
    if min(updates, default=0) < 0:
        raise ValueError(f"the numbers of updates are {updates}")
    return updates


def _numbers(section: Mapping[str, Any], stage: int) -> list[dict[str, Any]]:
    """The param groups without their params."""
    base = _base(section, stage)
    return numbers_of([] if isinstance(base, list) else base.get("param_groups", []))


def _counts(model: Mapping[str, Any]) -> dict[str, int]:
    return {name: int(model[name]) for name in _COUNTS if name in model}


def _buffers(model: Mapping[str, Any]) -> dict[str, Tensor]:
    module = model.get("module") or {}
    buffers = {name: module[name] for name in model.get("buffer_names") or () if name in module}
    if not all(isinstance(value, Tensor) for value in buffers.values()):
        raise TypeError("a buffer is not a tensor")
    return buffers
