"""A strategy as data: DeepSpeed's config, and recomputation, which it has no key for; as a step, as text, as JSON."""

import copy
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs

from functional_ds import comm
from functional_ds.cli.words.errors_in_one_line import CommandError
from functional_ds.deepspeed.config.config_reader import source
from functional_ds.deepspeed.config.ds_plan import ConfigPlan, from_ds_config
from functional_ds.step.compose import compose
from functional_ds.step.step import Step, Transform
from functional_ds.step.train_step import train_step
from functional_ds.transforms.parallel.experts import experts
from functional_ds.transforms.parallel.sequence import sequence
from functional_ds.transforms.parallel.tensor_parallel import tensor_parallel
from functional_ds.transforms.pipeline import pipeline
from functional_ds.transforms.remat import remat

from .mesh_axes import MeshAxes

__all__ = ["PRECISIONS", "Candidate", "base_config"]

PRECISIONS = ("fp32", "bf16", "fp16")


@attrs.frozen
class Candidate:
    """One way to train: what it is, and what it makes.

    Attributes:
        config: of DeepSpeed's keys; the sizes of the batch are its micro-batch and its micro-batches, which are a pipeline's
            where there is one.
        ranks: data-parallel.
        recompute: whether the repeated blocks are recomputed.
        tp: tensor-parallel ranks, for each data-parallel one.
        sp, pp: the same of sequences and of pipelines.
        ep: the ranks over which experts lie, within the data-parallel ones.
        schedule: of the pipeline.
    """

    config: Mapping[str, Any]
    ranks: int
    recompute: bool = False
    tp: int = 1
    sp: int = 1
    pp: int = 1
    ep: int = 1
    schedule: str = "one_f_one_b"

    @staticmethod
    def of(
        base: Mapping[str, Any],
        ranks: int,
        *,
        stage: int | None = None,
        precision: str | None = None,
        micro_batch: int | None = None,
        accumulate: int | None = None,
        recompute: bool = False,
        tp: int = 1,
        sp: int = 1,
        pp: int = 1,
        ep: int = 1,
        schedule: str = "one_f_one_b",
    ) -> "Candidate":
        """A config with some keys replaced; None leaves a key as it is.

        Args:
            base: the config.
            ranks: data-parallel.
            stage: of ZeRO.
            precision: one of ``PRECISIONS``.
            micro_batch: rows of a micro-batch on a rank.
            accumulate: micro-batches.
            recompute: whether blocks are recomputed.
            tp, sp, pp, ep, schedule: as above.
        """
        config = copy.deepcopy(dict(base))
        if stage is not None:
            config["zero_optimization"] = {**config.get("zero_optimization", {}), "stage": stage}
        if precision is not None:
            for name in ("bf16", "bfloat16", "fp16"):
                config.pop(name, None)
            if precision != "fp32":
                config[precision] = {"enabled": True}
        if micro_batch is not None or accumulate is not None:
            plan = _plan(config, ranks) if _has_batch(config) else None
            micro = micro_batch or (plan.batch.train_micro_batch_size_per_gpu if plan else 1)
            times = accumulate or (plan.batch.gradient_accumulation_steps if plan and micro_batch is None else 1)
            config.pop("train_batch_size", None)
            config |= {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": times}
        return Candidate(config, ranks, recompute, tp, sp, pp, ep, schedule)

    @property
    def plan(self) -> ConfigPlan:
        """The config, read.

        Raises:
            CommandError: a key of it is refused.
        """
        return _plan(self.config, self.ranks)

    @property
    def axes(self) -> MeshAxes:
        """Of the mesh."""
        return MeshAxes(self.ranks, self.pp, self.sp, self.tp, self.ep, self.schedule)

    @property
    def micro_batches(self) -> int:
        """Of a step on a rank."""
        return self.plan.batch.gradient_accumulation_steps

    def shared_plan(self, group: comm.Group | None = None) -> ConfigPlan:
        """The config as the transforms beside the axes take it: for all ranks that sum gradients.

        A pipeline has the micro-batches in the place of ``T.accumulate``.
        """
        if self.sp == self.pp == 1:
            return _plan(self.config, self.ranks, group=group)
        batch = self.plan.batch
        config = {name: value for name, value in self.config.items() if name != "train_batch_size"}
        config["gradient_accumulation_steps"] = 1 if self.pp > 1 else batch.gradient_accumulation_steps
        config["train_micro_batch_size_per_gpu"] = batch.rows // config["gradient_accumulation_steps"]
        return _plan(config, self.ranks * self.sp, group=group)

    def transform(self, plan: ConfigPlan) -> Transform:
        """All transforms, composed."""
        return compose(remat(), plan.transform) if self.recompute else plan.transform

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.axes.ranks

    def step(
        self,
        loss: Any,
        *,
        tp_plan: Mapping[str, Any] | None = None,
        cut: Mapping[str, Any] | None = None,
        pattern: str | None = None,
    ) -> Step:
        """The step that minimises a loss, on a rank of the mesh.

        Args:
            loss: ``loss(params, batch)``; the stages, where there are several ranks of pp.
            tp_plan: how layers are cut, where there are several ranks of tp.
            cut: arguments of ``T.sequence``, where there are several of sp.
            pattern: the paths of experts, where there are several of ep.
        """
        axes, mesh = self.axes, self.axes.mesh()
        plan = self.plan if mesh is None else self.shared_plan(mesh[axes.data])
        if plan.optimizer is None:
            raise CommandError("CONFIG: optimizer: the config names none; a step needs one")
        found = [self.transform(plan)]
        if mesh is None:
            return found[0](train_step(loss, plan.optimizer))
        if self.pp > 1:
            found.append(pipeline(axes.pipeline(self.micro_batches), loss, mesh["pp"]))
        if self.sp > 1:
            found.append(sequence(mesh["sp"], **(cut or {})))
        if self.ep > 1:
            found.append(experts(pattern or "", mesh["ep"], edp=mesh[axes.sharers]))
        if self.tp > 1:
            found.append(tensor_parallel(tp_plan or {}, mesh["tp"]))
        return compose(*found)(train_step(loss, plan.optimizer))

    @property
    def name(self) -> str:
        """The candidate in a few words.

        >>> Candidate.of({}, 2, stage=2, precision="bf16", micro_batch=4, accumulate=2).name
        'zero 2, bf16, 2 x 4 rows'
        """
        batch = self.plan.batch
        words = [f"zero {self.stage}", self.precision]
        words.append(f"{batch.gradient_accumulation_steps} x {batch.train_micro_batch_size_per_gpu} rows")
        return ", ".join(words + ["recompute"] * self.recompute + self.axes.words())

    @property
    def stage(self) -> int:
        """Of ZeRO."""
        return int(self.plan.value("zero_optimization.stage"))

    @property
    def precision(self) -> str:
        """One of ``PRECISIONS``."""
        plan = self.plan
        return "bf16" if plan.value("bf16.enabled") else "fp16" if plan.value("fp16.enabled") else "fp32"

    def line(self, *, cut: Mapping[str, Any] | None = None, pattern: str | None = None) -> str:
        """The transform as one line of Python, where its parts can be written so; else the config's.

        The names that it uses beside ``fds`` and ``T``: ``pp`` (``functional_ds.pipelining``), ``plan`` of a config with a
        schedule, and of the model ``mesh``, ``stages`` and ``tp_plan``.

        Args:
            cut, pattern: as for ``step``.

        >>> Candidate.of({}, 2, stage=0, accumulate=2, recompute=True).line()
        'fds.compose(T.remat(), T.zero(0), T.accumulate(2), T.clip(1.0))'
        """
        axes = self.axes
        group, last = "" if not axes.mesh_line() else f", mesh[{_listed(axes.data)}]", self._lines_of_axes(cut or {}, pattern)
        words = ["T.remat()"] * self.recompute
        for part in repr(self.shared_plan().transform).split(" -> "):
            name = part.partition("(")[0]
            if name == "schedule":
                words.append("T.schedule(plan.schedule)")
            elif name not in _CHECKS:
                words.append("T." + _SCALE.sub(r"T.\1(", part.replace(", world", group)))
        line = f"fds.compose({', '.join(words + last)})"
        mesh = dict.fromkeys([axes.data if len(axes.data) > 1 else axes.data[0]])
        try:
            alone = f"fds.compose({', '.join(words)})"
            eval(
                alone,
                {
                    "fds": _Names(compose=compose),
                    "T": import_module("functional_ds.transforms"),
                    "plan": self.plan,
                    "mesh": mesh,
                },
            )
        except Exception:
            group = group and f", group={group[2:]}"
            line = f"fds.from_ds_config(config, {self.ranks * self.sp}{group}).transform"
            return f"fds.compose({', '.join([line, *last])})" if last else line
        return line

    def _lines_of_axes(self, cut: Mapping[str, Any], pattern: str | None) -> list[str]:
        """The transforms of the axes beside dp, in their order."""
        axes, found = self.axes, list[str]()
        if self.pp > 1:
            schedule = f"pp.{self.schedule}({self.pp}, {self.micro_batches})"
            found.append(f'T.pipeline({schedule}, stages, mesh["pp"])')
        if self.sp > 1:
            found.append(
                f"T.sequence({', '.join(['mesh[' + _listed(('sp',)) + ']', *(f'{k}={v!r}' for k, v in cut.items())])})"
            )
        if self.ep > 1:
            found.append(f'T.experts({pattern!r}, mesh["ep"], edp=mesh[{_listed(axes.sharers)}])')
        if self.tp > 1:
            found.append('T.tensor_parallel(tp_plan, mesh["tp"])')
        return found

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        batch = self.plan.batch
        return {
            "name": self.name,
            "ranks": self.ranks,
            **{name: getattr(self, name) for name in ("tp", "sp", "pp", "ep")},
            "schedule": self.schedule if self.pp > 1 else None,
            "mesh": self.axes.mesh_line() or None,
            "stage": self.stage,
            "precision": self.precision,
            "micro_batch": batch.train_micro_batch_size_per_gpu,
            "accumulate": batch.gradient_accumulation_steps,
            "recompute": self.recompute,
        }


_CHECKS = ("for_ranks", "stop_at_minimum")  # which plans add, and other strategies do without
_SCALE = re.compile(r"\b(DynamicScale|NoScale|StaticScale)\(")


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(f'"{name}"' for name in names)


class _Names(SimpleNamespace):
    """The names that a line uses."""


def _has_batch(config: Mapping[str, Any]) -> bool:
    return "train_batch_size" in config or "train_micro_batch_size_per_gpu" in config


def _plan(config: Mapping[str, Any], ranks: int, *, group: comm.Group | None = None) -> ConfigPlan:
    whole = {"train_micro_batch_size_per_gpu": 1, **config} if not _has_batch(config) else dict(config)
    whole.setdefault("optimizer", {"type": "Adam", "params": {"lr": 1e-3}})
    try:
        return from_ds_config(whole, ranks, group=group)
    except ValueError as error:
        raise CommandError(f"CONFIG: {error}") from error


def base_config(path: str | None) -> dict[str, Any]:
    """A config's file as a dict; an empty one for None.

    Raises:
        CommandError: it is not there, or no JSON object.
    """
    if path is None:
        return {}
    if not Path(path).is_file():
        raise CommandError(f"CONFIG: there is no file {path}")
    try:
        return source(path)
    except (OSError, ValueError) as error:
        raise CommandError(f"CONFIG: {error}") from error
