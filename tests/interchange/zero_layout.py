"""Writes folders in the layout of DeepSpeed's ZeRO checkpoints, without DeepSpeed: for tests where it is not installed.

What it writes is modelled on what DeepSpeed 0.19.8 wrote; ``test_deepspeed.py`` says which tests use this and which use
DeepSpeed itself.
"""

import sys
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

KINDS = ("master", "exp_avg", "exp_avg_sq")
Values = Mapping[str, Mapping[str, Tensor]]  # name -> kind -> values


class ZeroStageEnum(IntEnum):
    optimizer_states, gradients, weights = 1, 2, 3


class DynamicLossScaler:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


_CLASSES = {"deepspeed.runtime.zero.config": ZeroStageEnum, "deepspeed.runtime.fp16.loss_scaler": DynamicLossScaler}


@contextmanager
def _named_as_deepspeeds() -> Iterator[None]:
    """For as long as it takes to pickle them, the classes above are found where DeepSpeed has its own."""
    names = {".".join(name.split(".")[: depth + 1]) for name in _CLASSES for depth in range(name.count(".") + 1)}
    before = {name: sys.modules.get(name) for name in names}
    homes = {kind: kind.__module__ for kind in _CLASSES.values()}
    try:
        sys.modules.update({name: types.ModuleType(name) for name in names})
        for name, kind in _CLASSES.items():
            setattr(sys.modules[name], kind.__name__, kind)
            kind.__module__ = name
        yield
    finally:
        for kind, home in homes.items():
            kind.__module__ = home
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


@attrs.frozen
class Layout:
    """A checkpoint to write.

    Attributes:
        groups: the param groups, as names; each has at least one.
        frozen: by name.
        padding: stages 1 and 2 pad each group to a multiple of this times the ranks.
        buffers: the module's, by name.
        numbers: of each param group.
        entries: what the engine and its caller save beside.
        flat: stage 0 keeps one vector for a param group, as DeepSpeed's FusedAdam does in half precision.
    """

    stage: int
    ranks: int
    groups: Sequence[Sequence[str]]
    values: Values
    frozen: Mapping[str, Tensor] = attrs.field(factory=dict)
    shared: Mapping[str, str] = attrs.field(factory=dict)
    dtype: torch.dtype = torch.bfloat16
    updates: int = 3
    padding: int = 2
    scaler: Any = None
    buffers: Mapping[str, Tensor] = attrs.field(factory=dict)
    numbers: Mapping[str, Any] = attrs.field(factory=lambda: {"lr": 0.1})
    entries: Mapping[str, Any] = attrs.field(factory=dict)
    flat: bool = False

    def write(self, path: Path, tag: str = "global_step3") -> Path:
        """The folder, with its ``latest``."""
        folder = path / tag
        folder.mkdir(parents=True)
        (path / "latest").write_text(tag)
        if self.stage == 0:
            torch.save(self._whole(), folder / "mp_rank_00_model_states.pt")
            return path
        prefix = "bf16_" if self.dtype == torch.bfloat16 else ""
        with _named_as_deepspeeds():
            for rank in range(self.ranks):
                states = {"optimizer_state_dict": self._states(rank), "ds_version": "0.19.8", "ds_config": {"a": [1, "b"]}}
                torch.save(states, folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
                if self.stage == 3:
                    torch.save(self._model(rank), folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
            if self.stage < 3:
                torch.save(self._model(None), folder / "mp_rank_00_model_states.pt")
        return path

    def _whole(self) -> dict[str, Any]:
        """Stage 0: the module, and its optimizer's states by number; with ``flat`` one vector for a param group."""
        kept = dict.fromkeys(("param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"))
        module = {**self._model(None)["module"], **{alias: torch.empty(0) for alias in self.shared}}
        module = {name: module[self.shared.get(name, name)] for name in module}
        rows = [[[name] for name in group] for group in self.groups] if not self.flat else [[[*group]] for group in self.groups]
        state, groups, masters = {}, [], []
        for group in rows:
            numbers = [len(state) + place for place in range(len(group))]
            held = [{kind: self._joined(names, kind) for kind in KINDS} for names in group]
            masters.append([each["master"] for each in held])
            counted = {} if self.flat else {"step": torch.tensor(float(self.updates))}  # FusedAdam counts in the group
            state |= {n: {**counted, **{k: each[k] for k in KINDS[1:]}} for n, each in zip(numbers, held, strict=True)}
            groups.append({**self.numbers, **({"step": self.updates} if self.flat else {}), "params": numbers})
        optimizer: dict[str, Any] = {"state": state, "param_groups": groups}
        if self.dtype != torch.float32:
            exact = {"fp32_groups_flat": [each[0] for each in masters]} if self.flat else {"fp32_groups": masters}
            scale = {} if self.scaler is None else {"dynamic_loss_scale": True, **vars(self.scaler)}
            optimizer = {"optimizer_state_dict": optimizer, **exact, **scale}
        return {**self._model(None), **kept, "module": OrderedDict(module), "optimizer": optimizer}

    def _joined(self, names: Sequence[str], kind: str) -> Tensor:
        values = [self.values[name][kind] for name in names]
        return torch.cat([x.reshape(-1) for x in values]) if self.flat else values[0]

    def _states(self, rank: int) -> dict[str, Any]:
        flats = [{kind: self._flat(group, kind, rank) for kind in KINDS} for group in self.groups]
        step = torch.tensor(float(self.updates))
        state = {i: {"step": step, **{kind: flat[kind] for kind in KINDS[1:]}} for i, flat in enumerate(flats)}
        base = {"state": state, "param_groups": [{**self.numbers, "params": [i]} for i in range(len(flats))]}
        common = {"zero_stage": ZeroStageEnum(self.stage), "loss_scaler": self.scaler, "overflow": False}
        if self.stage == 3:
            masters = [flat["master"] for flat in flats]
            return {**common, "partition_count": self.ranks, "optimizer_state_dict": base, "fp32_flat_groups": masters}
        lean = [flat["master"][: self._lean(group, rank)] for flat, group in zip(flats, self.groups, strict=True)]
        count = [self.ranks] * len(flats)
        return {**common, "partition_count": count, "base_optimizer_state": base, "single_partition_of_fp32_groups": lean}

    def _flat(self, group: Sequence[str], kind: str, rank: int) -> Tensor:
        values = [self.values[name][kind].reshape(-1) for name in group]
        if self.stage < 3:
            whole = torch.cat(values)
            size = self._partition(group)
            padded = torch.cat([whole, whole.new_zeros(size * self.ranks - whole.numel())])
            return padded[rank * size : (rank + 1) * size].clone()
        pieces = [-(-x.numel() // self.ranks) for x in values]
        padded_each = [torch.cat([x, x.new_zeros(n * self.ranks - x.numel())]) for x, n in zip(values, pieces, strict=True)]
        return torch.cat([x[rank * n : (rank + 1) * n] for x, n in zip(padded_each, pieces, strict=True)])

    def _partition(self, group: Sequence[str]) -> int:
        total, step = sum(self.values[name]["master"].numel() for name in group), self.padding * self.ranks
        return -(-total // step) * step // self.ranks

    def _lean(self, group: Sequence[str], rank: int) -> int:
        """How much of a rank's partition is no padding."""
        total, size = sum(self.values[name]["master"].numel() for name in group), self._partition(group)
        return max(0, min(size, total - rank * size))

    def _model(self, rank: int | None) -> dict[str, Any]:
        masters = {name: self.values[name]["master"] for group in self.groups for name in group}
        everything = {**masters, **self.frozen}
        module = {name: x.to(self.dtype) if rank is None else x.new_zeros(0) for name, x in everything.items()}
        fragments = {name: x if rank is None else self._fragment(x, rank) for name, x in self.frozen.items()}
        in_stage_1 = self.stage == 1  # DeepSpeed leaves them to the module's dict there
        return {
            "module": OrderedDict({**module, **self.buffers}),
            "buffer_names": [*self.buffers],
            "param_shapes": [OrderedDict((name, masters[name].shape) for name in group) for group in self.groups],
            "frozen_param_shapes": None if in_stage_1 else OrderedDict((name, x.shape) for name, x in self.frozen.items()),
            "frozen_param_fragments": None if in_stage_1 else OrderedDict(fragments),
            "shared_params": dict(self.shared),
            "global_steps": self.updates,
            "skipped_steps": 0,
            "dp_world_size": self.ranks,
            **self.entries,
        }

    def _fragment(self, x: Tensor, rank: int) -> Tensor:
        size = -(-x.numel() // self.ranks)
        padded = torch.cat([x.reshape(-1), x.new_zeros(size * self.ranks - x.numel())])
        return padded[rank * size : (rank + 1) * size].clone()


def values_of(shapes: Mapping[str, Sequence[int]]) -> dict[str, dict[str, Tensor]]:
    """Every element of every kind another number, which no rounding makes equal to another's."""
    sizes = [prod(shape) for shape in shapes.values()]
    starts = accumulate(sizes, initial=0)
    return {
        name: {
            kind: (torch.arange(size, dtype=torch.float32) + start + 1000 * k).reshape(tuple(shape))
            for k, kind in enumerate(KINDS)
        }
        for (name, shape), size, start in zip(shapes.items(), sizes, starts, strict=False)
    }
