"""``from_deepspeed``: loads a DeepSpeed ZeRO checkpoint into a state."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.disk.files import checked_path
from functional_ds.sharding.leaf_region import grouped
from functional_ds.state_dict.all_or_none import all_or_none
from functional_ds.state_dict.describe import TensorShard, as_before, as_tensors, dense, describe
from functional_ds.state_dict.matching import FORMS, Choice, Differences, fits
from functional_ds.step.state.slots import Role, fields_of_role
from functional_ds.step.state.state import State

from .deepspeed_files import ZeroFiles
from .deepspeed_layout import MASTER, Param

# Roles in a state that get DeepSpeed's master values.
_MODEL = (*FORMS, Role.AVERAGE.value)
_OPTIMIZER: Mapping[str, str] = MappingProxyType(
    {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum": "momentum_buffer", "sums": "sum"}
)
_COUNTS = "steps"
_OURS = ("key*", f"{Role.SETTING.value}.*", f"{Role.BUFFER.value}.*")  # roles that keep like's values if DeepSpeed has none


def from_deepspeed(
    path: str | Path,
    *,
    like: State,
    tag: str | None = None,
    order: Sequence[Sequence[str]] | None = None,
    rename: Callable[[str], str] | None = None,
    only: str | Sequence[str] | None = None,
    allow_missing: str | Sequence[str] = (),
    allow_extra: str | Sequence[str] = (),
    donate: bool = False,
    group: comm.Group | None = None,
) -> State:
    """Loads a DeepSpeed ZeRO checkpoint into a new state with ``like``'s structure, from which training continues.

    Reads checkpoints of stages 0 to 3 in fp32, bf16 and fp16, of any number of ranks, into any number of ranks, stage, mesh and
    precision. It restores the fp32 masters; the optimizer's moments (Adam's, LAMB's, Lion's, Adagrad's sums, SGD's momentum);
    the number of updates, and with it schedules; frozen parameters; module buffers; a dynamic loss scale. It does not restore
    random generators, the data's position, learning-rate schedulers and hyperparameters, which are arguments here. An ``T.ema``
    mean starts at the params; a buffer that was not saved keeps ``like``'s value.

    Law: masters and moments are bitwise DeepSpeed's.

    Collective over ``group``. Ranks send only names: each rank maps all files into memory, and reads what it stores. torch's
    files are pickles, opened with ``weights_only``, so they cannot run code; of DeepSpeed's own classes only the four in its
    ZeRO files are accepted, as plain attributes. DeepSpeed need not be installed. Its checkpoints have no checksums, so a
    flipped bit in a tensor goes unnoticed.

    Args:
        path: the folder that was passed to DeepSpeed's ``save_checkpoint``.
        like: a state from ``step.init``; it is not changed.
        tag: which checkpoint; None for the one that the file ``latest`` names.
        order: for stage 0, whose files lack it: DeepSpeed's names of the parameters in each param group of its optimizer, in
            order; None if one group has all parameters in the module's order.
        rename: from a leaf's path to DeepSpeed's name for it, if they differ.
        only: patterns (``fnmatch``'s) of what to read, as in ``load``: ``only="params"`` reads just the weights.
        allow_missing: patterns of what may be missing in the checkpoint; it keeps ``like``'s values.
        allow_extra: patterns of what the checkpoint may have and ``like`` may lack.
        donate: write into ``like``'s memory and invalidate it, as a step does.
        group: the ranks that ``like`` is spread over; None for the whole world.

    Raises:
        NoCheckpointError: there is no such folder, tag or file.
        DamagedError: a file is damaged, or does not belong to the others.
        StructureError: the checkpoint and ``like`` differ in leaves or shapes, which are listed; ``order`` does not match.
        CheckpointError: a file holds objects of unknown classes; the model was split by tensor or pipeline parallelism.
        ValueError: the tag is not a plain name; a pattern of ``only`` matches nothing in ``like``.
    """
    if not isinstance(like, State):
        raise TypeError(f"like={type(like).__name__}: from_deepspeed takes a state that a step made, as from step.init(params)")
    ranks = comm.world() if group is None else group
    files = all_or_none(ranks, lambda: ZeroFiles.open(checked_path(path), tag, order))
    choice = Choice.of(only, missing=allow_missing, extra=allow_extra)
    numbers = as_tensors(like)
    _Reading(files, rename or str, choice).check(describe(numbers), ranks)
    state = dense(numbers if donate else numbers.clone())
    _Reading(files, rename or str, choice).fill(state)
    state = tree.map(as_before, like, state)
    return like.donate(state) if donate else state


@attrs.frozen(eq=False)
class _Reading:
    files: ZeroFiles
    rename: Callable[[str], str]
    choice: Choice

    # -- checks --------------------------------------------------------------------------------------------------------

    def check(self, shards: Sequence[TensorShard], ranks: comm.Group) -> None:
        """Raises the same StructureError on all ranks if state and checkpoint differ. Collective."""
        differences = Differences()
        for shard in shards:
            self.compare(shard, differences)
        everyone = comm.all_gather_object(({shard.name for shard in shards}, differences), ranks)
        known, total = set[str]().union(*(names for names, _ in everyone)), Differences()
        self.choice.check(known)
        for _, theirs in everyone:
            total.add(theirs)
        total.extra |= self.extra(known)
        total.refuse(f"DeepSpeed's checkpoint {self.files.path}")

    def compare(self, shard: TensorShard, differences: Differences) -> None:
        """Records a shard's mismatches."""
        role, slash, _ = shard.name.partition("/")
        buffer = self.buffer(shard)
        if buffer is not None and self.choice.wants(shard.name) and tuple(buffer.shape) != shard.shape:
            differences.other.add(f"{shard.name} ({list(buffer.shape)} there, {list(shard.shape)} here)")
        if not slash or not shard.view.numel() or not self.choice.wants(shard.name):
            known = role in ("step", "skip") or fits(role, _OURS)
            if not slash and not known and self.choice.wants(role) and not fits(role, self.choice.allow_missing):
                differences.missing.add(shard.name)
            return
        source = self.source(shard)
        if source is None:
            if not fits(shard.name, self.choice.allow_missing):
                differences.missing.add(shard.name)
        elif not shard.shared and source[0].shape != shard.shape:
            differences.other.add(f"{shard.name} ({list(source[0].shape)} there, {list(shard.shape)} here)")

    def extra(self, known: Collection[str]) -> set[str]:
        """What the checkpoint has and no rank needs."""
        names = {name.partition("/")[2] for name in known if name.startswith("params/")}
        there = {id(param) for leaf in names if (param := self.files.find(self.rename(leaf)))}
        lost = {f"params/{name}" for name, param in self.files.params.items() if id(param) not in there and param.shape != (0,)}
        roles = {role.rpartition(".")[2] for role in (name.partition("/")[0] for name in known) if role.startswith("optimizer")}
        kinds = {_OPTIMIZER.get(role, role) for role in roles}
        lost |= {f"optimizer.{state_name}" for state_name in self.files.kinds() - kinds - {MASTER}}
        return {name for name in lost if self.choice.wants(name) and not fits(name, self.choice.allow_extra)}

    def source(self, shard: TensorShard) -> tuple[Param, str | None] | None:
        """The parameter whose values of some kind a shard has, or, without a kind, whose number of updates.

        None if the checkpoint does not have it.
        """
        role, _, leaf = shard.name.partition("/")
        param = self.files.find(self.rename(leaf))
        if param is None:
            return None
        if role in _MODEL:
            return param, MASTER
        last = role.rpartition(".")[2]
        if not role.startswith("optimizer") or param.frozen:
            return None
        if last == _COUNTS:
            return (param, None) if self.files.kinds() > {MASTER} else None
        state_name = _OPTIMIZER.get(last)
        return (param, state_name) if state_name in self.files.kinds() and not shard.shared else None

    def buffer(self, shard: TensorShard) -> Tensor | None:
        """The module buffer for a shard; None if it is not one, or the checkpoint does not have it."""
        prefix, name = f"{Role.BUFFER.value}.", shard.name
        return self.files.buffers.get(self.rename(name.removeprefix(prefix))) if name.startswith(prefix) else None

    # -- reading -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def fill(self, state: State) -> None:
        """Writes into the state's memory."""
        for shard in describe(state):
            if self.choice.wants(shard.name):
                self.fill_shard(shard)
        if self.choice.wants("step"):
            state.step.fill_(self.files.made())
        scaler = self.files.scaler
        for scale in fields_of_role(state, Role.SETTING):
            dynamic = all(hasattr(scale, name) for name in ("window", "value", "run", "patience"))
            if dynamic and getattr(scaler, "dynamic", False) and self.choice.wants(Role.SETTING.value):
                _fill_scale(scale, scaler)

    def fill_shard(self, shard: TensorShard) -> None:
        """Writes into one shard, if the checkpoint has it."""
        buffer = self.buffer(shard)
        if buffer is not None:
            shard.view.copy_(buffer.reshape(-1))
            return
        source = self.source(shard) if "/" in shard.name and shard.view.numel() else None
        if source is None:
            return
        param, state_name = source
        if state_name is None:
            shard.view.fill_(self.files.updates[param.group])
            return
        region, shape = shard.region, grouped(shard.shape, shard.region.dims)
        for box in region.boxes(shard.offset, shard.offset + shard.view.numel(), region.dims):
            there, target = box.in_whole(shape), box.view(shard.view, shard.offset)
            direct = there.dense and target.is_contiguous()
            room = target.view(-1) if direct else torch.empty(there.extent, dtype=target.dtype, device=target.device)
            for at, values in self.files.read(param, state_name, start=there.place, stop=there.place + there.extent):
                room[at - there.place : at - there.place + values.numel()].copy_(values)
            if not direct:
                target.copy_(there.view(room, there.place))


def _fill_scale(scale: Any, scaler: Any) -> None:
    """DeepSpeed counts steps since the last overflow, without the first; this library counts since a growth."""
    since = scaler.cur_iter - scaler.last_overflow_iter - 1
    run = since % scale.window - 1
    scale.value.fill_(float(scaler.cur_scale))
    scale.run.fill_(scale.window - 1 if run < 0 < since else run)
    if hasattr(scaler, "cur_hysteresis"):  # stage 0 has none
        scale.patience.fill_(scaler.cur_hysteresis)
