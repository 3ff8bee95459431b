"""``from_deepspeed``: a ZeRO checkpoint of DeepSpeed's as a state of ours."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import torch

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.checkpointing.errors import together
from functional_ds.checkpointing.matching import Choice, Differences, fits
from functional_ds.state_dict.describe import Held, as_before, as_tensors, dense, describe
from functional_ds.step.slots import Role, fields_of_role
from functional_ds.step.state import State

from .deepspeed_files import MASTER, Param, ZeroFiles

__all__ = ["from_deepspeed"]

# Where a state keeps what DeepSpeed has under these names.
_MODEL = ("params", Role.MASTER.value, Role.EXACT.value, Role.AVERAGE.value)
_OPTIMIZER: Mapping[str, str] = MappingProxyType(
    {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum": "momentum_buffer", "sums": "sum"}
)
_COUNTS = "steps"
_OURS = (
    "key*",
    f"{Role.SETTING.value}.*",
    f"{Role.BUFFER.value}.*",
)  # what a state has by itself, or has already if DeepSpeed has none


def from_deepspeed(
    path: str | Path,
    *,
    like: State,
    tag: str | None = None,
    rename: Callable[[str], str] | None = None,
    only: str | Sequence[str] | None = None,
    allow_missing: str | Sequence[str] = (),
    allow_extra: str | Sequence[str] = (),
    donate: bool = False,
    group: comm.Group | None = None,
) -> State:
    """The state in which DeepSpeed's run was saved, as a value of ``like``'s structure; so the training goes on here.

    Reads checkpoints of ZeRO 1, 2 and 3 in fp32, bf16 and fp16, of any number of ranks, into any number of ranks, stage, mesh
    and precision. What is taken over: the fp32 masters; the optimizer's moments (Adam's, LAMB's, Lion's, Adagrad's sums, SGD's
    momentum); its count of updates, and with it schedules; frozen parameters; a dynamic loss scale. What is not: random
    generators, the data's position, learning-rate schedulers and hyperparameters, which are arguments here. A mean of the
    params (``T.ema``) starts at the params. Buffers are no part of a state.

    Law: masters and moments are DeepSpeed's, bit for bit.

    Collective over ``group``. Nothing is sent but names: each rank maps all files, and reads what it stores. Files of torch are
    pickles. They are opened with ``weights_only``, so that none of them can run code; of DeepSpeed's own classes only those
    four pass that its ZeRO files have, and those become plain attributes. DeepSpeed need not be installed. Its checkpoints
    have no checksums: a flipped bit in a tensor is not noticed.

    Args:
        path: the folder that DeepSpeed's ``save_checkpoint`` was given.
        like: a state from ``step.init``; it is not changed.
        tag: which checkpoint; None for the one that the file ``latest`` names.
        rename: from a leaf's path to DeepSpeed's name of it, if they are not the same.
        only: patterns (``fnmatch``'s) of what to read, as in ``load``: ``only="params"`` reads weights alone.
        allow_missing: what ``like`` has may be missing in the checkpoint if it matches; ``like``'s values stay.
        allow_extra: what the checkpoint has may be missing in ``like`` if it matches.
        donate: write into ``like``'s memory and take it, as a step does.
        group: the ranks that ``like`` is spread over; None for the whole world.

    Raises:
        NoCheckpointError: there is no such folder, tag or file.
        DamagedError: a file is damaged, or does not belong to the others.
        StructureError: the checkpoint and ``like`` differ in leaves or shapes; the message lists them.
        CheckpointError: a file holds objects that are not loaded; the model was cut by tensor or pipeline parallelism.
        ValueError: the tag is no plain name; a pattern of ``only`` matches nothing in ``like``.
    """
    if not isinstance(like, State):
        raise TypeError(f"like={type(like).__name__}: from_deepspeed takes a state that a step made, as from step.init(params)")
    ranks = comm.world() if group is None else group
    files = together(ranks, lambda: ZeroFiles.open(Path(path), tag))
    choice = Choice.of(only, allow_missing, allow_extra)
    numbers = as_tensors(like)
    _Reading(files, rename or str, choice).check(describe(numbers), ranks)
    state = dense(numbers if donate else numbers.clone())
    _Reading(files, rename or str, choice).fill(state)
    state = tree.map(as_before, like, state)
    return like.donate(state) if donate else state


@attrs.frozen
class _Want:
    """What fills a stretch of a state: elements of a parameter's values of a kind, or a count of updates."""

    param: Param
    kind: str | None


@attrs.frozen(eq=False)
class _Reading:
    files: ZeroFiles
    rename: Callable[[str], str]
    choice: Choice

    # -- what fits -----------------------------------------------------------------------------------------------------

    def check(self, held: Sequence[Held], ranks: comm.Group) -> None:
        """Refuses what differs, on all ranks alike."""
        found = Differences()
        for each in held:
            self.look(each, found)
        everyone = comm.all_gather_object(({each.name for each in held}, found), ranks)
        known, total = set[str]().union(*(names for names, _ in everyone)), Differences()
        self.choice.check(known)
        for _, theirs in everyone:
            total.add(theirs)
        total.extra |= self.extra(known)
        total.refuse(f"DeepSpeed's checkpoint {self.files.path}")

    def look(self, held: Held, found: Differences) -> None:
        """What is wrong about one stretch."""
        role, slash, _ = held.name.partition("/")
        if not slash or not held.view.numel() or not self.choice.wants(held.name):
            known = role in ("step", "skip") or fits(role, _OURS)
            if not slash and not known and self.choice.wants(role) and not fits(role, self.choice.allow_missing):
                found.missing.add(held.name)
            return
        want = self.want(held)
        if want is None:
            if not fits(held.name, self.choice.allow_missing):
                found.missing.add(held.name)
        elif not held.shared and want.param.shape != held.shape:
            found.other.add(f"{held.name} ({list(want.param.shape)} there, {list(held.shape)} here)")

    def extra(self, known: Collection[str]) -> set[str]:
        """What the checkpoint has and no rank wants."""
        names = {name.partition("/")[2] for name in known if name.startswith("params/")}
        there = {id(param) for leaf in names if (param := self.files.find(self.rename(leaf)))}
        lost = {f"params/{name}" for name, param in self.files.params.items() if id(param) not in there and param.shape != (0,)}
        roles = {role.rpartition(".")[2] for role in (name.partition("/")[0] for name in known) if role.startswith("optimizer")}
        kinds = {_OPTIMIZER.get(role, role) for role in roles}
        lost |= {f"optimizer.{kind}" for kind in self.files.kinds() - kinds - {MASTER}}
        return {name for name in lost if self.choice.wants(name) and not fits(name, self.choice.allow_extra)}

    def want(self, held: Held) -> _Want | None:
        """What is to fill a stretch; None if the checkpoint does not have it."""
        role, _, leaf = held.name.partition("/")
        param = self.files.find(self.rename(leaf))
        if param is None:
            return None
        if role in _MODEL:
            return _Want(param, MASTER)
        last = role.rpartition(".")[2]
        if not role.startswith("optimizer") or param.frozen:
            return None
        if last == _COUNTS:
            return _Want(param, None) if self.files.kinds() > {MASTER} else None
        kind = _OPTIMIZER.get(last)
        return _Want(param, kind) if kind in self.files.kinds() and not held.shared else None

    # -- what is filled ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def fill(self, state: State) -> None:
        """Writes into the state's memory."""
        for held in describe(state):
            if self.choice.wants(held.name):
                self.one(held)
        if self.choice.wants("step"):
            state.step.fill_(self.updates())
        scaler = self.files.scaler
        for scale in fields_of_role(state, Role.SETTING):
            dynamic = all(hasattr(scale, name) for name in ("window", "value", "run", "patience"))
            if dynamic and getattr(scaler, "dynamic", False) and self.choice.wants(Role.SETTING.value):
                _fill_scale(scale, scaler)

    def one(self, held: Held) -> None:
        """One stretch."""
        want = self.want(held) if "/" in held.name and held.view.numel() else None
        if want is None:
            return
        if want.kind is None:
            held.view.fill_(self.files.updates[want.param.group])
            return
        for at, values in self.files.read(want.param, want.kind, held.offset, held.offset + held.view.numel()):
            held.view[at - held.offset : at - held.offset + values.numel()].copy_(values)

    def updates(self) -> int:
        """How many updates were made; steps that overflowed are none."""
        made = max(self.files.updates, default=0)
        return made or self.files.model.get("global_steps", 0) - self.files.model.get("skipped_steps", 0)


def _fill_scale(scale: Any, scaler: Any) -> None:
    """DeepSpeed counts steps since the last overflow, of which the first is none of the window's; ours those since a growth."""
    since = scaler.cur_iter - scaler.last_overflow_iter - 1
    run = since % scale.window - 1
    scale.value.fill_(float(scaler.cur_scale))
    scale.run.fill_(scale.window - 1 if run < 0 < since else run)
    scale.patience.fill_(scaler.cur_hysteresis)
