"""Candidates of a strategy: the same job with other axes, stages, precisions and micro-batches; their names and lines."""

import copy
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from functional_ds.cli.words.errors_in_one_line import CommandError, refused
from functional_ds.cli.words.options import existing
from functional_ds.deepspeed.config.config_reader import source
from functional_ds.deepspeed.config.ds_plan import from_ds_config
from functional_ds.jobs.entries.call_entry import KINDS, CallEntry
from functional_ds.jobs.entries.job_errors import JobError
from functional_ds.jobs.entries.job_text import toml
from functional_ds.jobs.job import BESIDE_DEEPSPEED, Job
from functional_ds.jobs.job_subject import Subject
from functional_ds.jobs.strategy import AXES, data_axes, deepspeed_plan, micro_batches, rows_of_rank, size

PRECISIONS = ("fp32", "bf16", "fp16")
_ORDER = ("remat", "offload", "mixed_precision", "zero", "accumulate", "", "pipeline", "sequence", "experts", "tensor_parallel")


def with_config(job: Job, path: str | None) -> Job:
    """The job with a DeepSpeed config instead of its strategy; unchanged for None.

    Raises:
        CommandError: the file is not there, or is not a JSON object, or has an unsupported key.
    """
    if path is None:
        return job
    with refused("CONFIG", OSError, ValueError):
        config = source(existing(path, option="CONFIG"))
    if not {"train_batch_size", "train_micro_batch_size_per_gpu"} & config.keys():
        config = {**config, "train_micro_batch_size_per_gpu": 1}
    changes: dict[str, Any] = {"strategy": None, "deepspeed": {"config": config}}
    if "optimizer" in config:
        changes["optimizer"] = None
    return job.changed(changes)


def candidate(
    job: Job,
    mesh: Mapping[str, int] | None = None,
    *,
    stage: int | None = None,
    precision: str | None = None,
    micro_batch: int | None = None,
    accumulate: int | None = None,
    recompute: bool = False,
    schedule: str = "one_f_one_b",
) -> Job:
    """The job with another strategy; None leaves a part unchanged. Rows follow: those of all micro-batches and ranks of dp.

    Args:
        job: the job.
        mesh: ranks by axis, of ``AXES``; ep is within dp. Neighbouring ranks are those of tp, then sp, then pp, then dp.
        stage: of ZeRO.
        precision: one of ``PRECISIONS``.
        micro_batch: rows of a micro-batch on a rank.
        accumulate: micro-batches.
        recompute: whether blocks are recomputed.
        schedule: of a pipeline that the job does not have yet.

    Raises:
        CommandError: the experts' ranks do not divide those of dp; the job's own axes have other names.
    """
    _check_axes(job)
    sizes = {axis: size(job, axis) for axis in AXES} if mesh is None else {**dict.fromkeys(AXES, 1), **mesh}
    changes: dict[str, Any] = {}
    config = None if job.deepspeed is None else _config(job)
    micro, times = _sizes_of_batch(job, config, sizes["dp"])
    micro, times = micro_batch or micro, accumulate or (times if micro_batch is None else 1)
    calls = list(job.strategy)
    if mesh is not None:
        calls, changes["mesh"] = _on_axes(calls, sizes, schedule, times)
        changes["ranks"] = None if changes["mesh"] else sizes["dp"]
        if job.model.name == "huggingface":
            changes["model.huggingface.attention"] = "fds_ring" if sizes["sp"] > 1 else None
            changes["model.huggingface.experts"] = True if sizes["ep"] > 1 else None
    if recompute:
        calls = _put(calls, "remat", {})
    if config is not None:
        changes["deepspeed.config"] = _changed_config(config, stage, precision, micro, times, sizes)
    else:
        zero = {"stage": 0, **_arguments(calls, "zero")} | ({} if stage is None else {"stage": stage})
        if mesh is not None:
            zero = {name: value for name, value in zero.items() if name != "group"}
            zero |= {"group": ",".join(_data(sizes))} if changes["mesh"] else {}
        if stage is not None or mesh is not None:
            calls = _put(calls, "zero", zero)
        if precision is not None:
            calls = _put(calls, "mixed_precision", None if precision == "fp32" else {"policy": precision})
        calls = _put(calls, "accumulate", {"k": times} if times > 1 and sizes["pp"] == 1 else None)
    if sizes["pp"] > 1:
        calls = _put(calls, "pipeline", {**_arguments(calls, "pipeline"), "micro_batches": times})
    changes |= {"strategy": [call.to_plain() for call in calls], "data.rows": micro * times * sizes["dp"]}
    try:
        return job.changed(changes)
    except JobError as error:
        raise CommandError(str(error)) from error


def _check_axes(job: Job) -> None:
    """Raises an error for a mesh for which it is unknown which ranks have different rows."""
    unknown = next((axis for axis in job.mesh if axis not in (*AXES, "edp")), None)
    if unknown is not None:
        raise CommandError(
            f"mesh.{unknown}: the axes that can be planned are dp, pp, sp, tp, ep and edp; give the job these names"
        )
    call = next((call.name for call in job.strategy if call.name in BESIDE_DEEPSPEED and call.name != "remat"), None)
    if call is not None and not job.mesh and job.world_size > 1:
        raise CommandError(
            f"strategy.{call}: its {job.world_size} ranks have no names; give the job a mesh of dp, pp, sp, tp, ep"
        )


def _config(job: Job) -> dict[str, Any]:
    """The keys of the job's DeepSpeed config."""
    given = {} if job.deepspeed is None else job.deepspeed.config
    return source(str(Path(job.folder, given))) if isinstance(given, str) else copy.deepcopy(given)


def _sizes_of_batch(job: Job, config: dict[str, Any] | None, dp: int) -> tuple[int, int]:
    """Rows of a micro-batch, and micro-batches: a config's on so many ranks of dp."""
    if config is None or job.deepspeed is None:
        times = micro_batches(job)
        return max(1, rows_of_rank(job) // times), times
    with refused("CONFIG", ValueError):
        batch = from_ds_config(config, dp, auto={"train_batch_size": job.data.rows, **job.deepspeed.auto}, lr=1.0).batch
    return batch.train_micro_batch_size_per_gpu, batch.gradient_accumulation_steps


def _data(sizes: Mapping[str, int]) -> list[str]:
    return [*(("edp", "ep") if sizes["ep"] > 1 else ("dp",)), *["sp"] * (sizes["sp"] > 1)]


def _on_axes(
    calls: list[CallEntry], sizes: Mapping[str, int], schedule: str, times: int
) -> tuple[list[CallEntry], dict[str, int] | None]:
    """The transforms of these axes, and the mesh; None if all ranks are of dp."""
    dp, ep = sizes["dp"], sizes["ep"]
    if dp % ep:
        fits = ", ".join(str(count) for count in range(1, dp + 1) if dp % count == 0)
        raise CommandError(f"ep={ep} does not divide the {dp} ranks of dp, over which experts are split; use {fits}")
    sharers = "edp,sp" if sizes["sp"] > 1 else "edp"
    of_axis: dict[str, tuple[str, dict[str, Any]]] = {
        "pp": ("pipeline", {"schedule": schedule, "micro_batches": times, "group": "pp"}),
        "sp": ("sequence", {"group": "sp"}),
        "ep": ("experts", {"pattern": "auto", "ep": "ep", "edp": sharers}),
        "tp": ("tensor_parallel", {"plan": "auto", "group": "tp"}),
    }
    for axis, (name, arguments) in of_axis.items():
        given = {**arguments, **_arguments(calls, name)}
        calls = _put(calls, name, given if sizes[axis] > 1 else None)
    if all(sizes[axis] == 1 for axis in of_axis):
        return calls, None
    mesh = {"edp": dp // ep, "ep": ep} if ep > 1 else {"dp": dp}
    return calls, mesh | {axis: sizes[axis] for axis in ("pp", "sp", "tp") if sizes[axis] > 1}


def _arguments(calls: list[CallEntry], name: str) -> dict[str, Any]:
    return next((call.arguments for call in calls if call.name == name), {})


def _put(calls: list[CallEntry], name: str, arguments: dict[str, Any] | None) -> list[CallEntry]:
    """The calls with this one in its place, before those that come later by ``_ORDER``; without it for None."""
    names = [call.name for call in calls]
    if arguments is None:
        return [call for call in calls if call.name != name]
    if name in names:
        return [CallEntry(name, arguments) if call.name == name else call for call in calls]
    rank = {other: place for place, other in enumerate(_ORDER)}
    place = next((i for i, other in enumerate(names) if rank.get(other, _ORDER.index("")) > rank[name]), len(calls))
    return [*calls[:place], CallEntry(name, arguments), *calls[place:]]


def _changed_config(
    config: dict[str, Any], stage: int | None, precision: str | None, micro: int, times: int, sizes: Mapping[str, int]
) -> dict[str, Any]:
    """A pipeline uses the micro-batches instead of accumulation."""
    if stage is not None:
        config["zero_optimization"] = {**config.get("zero_optimization", {}), "stage": stage}
    if precision is not None:
        for name in ("bf16", "bfloat16", "fp16"):
            config.pop(name, None)
        if precision != "fp32":
            config[precision] = {"enabled": True}
    config.pop("train_batch_size", None)
    steps = 1 if sizes["pp"] > 1 else times
    return config | {"train_micro_batch_size_per_gpu": micro * times // steps, "gradient_accumulation_steps": steps}


# -- what a candidate is -------------------------------------------------------------------------------------------------


def several(job: Job) -> frozenset[str]:
    """The axes other than dp that have several ranks."""
    return frozenset(axis for axis in AXES[1:] if size(job, axis) > 1)


def first_ranks(job: Job) -> tuple[int, ...]:
    """For each place of the pipeline, its first rank along all other axes, whose ranks do the same."""
    stride, ranks = 1, tuple[int, ...]((0,))
    for axis, count in reversed(job.mesh.items()):
        if axis == "pp":
            ranks = tuple(place * stride for place in range(count))
        stride *= count
    return ranks


def stage_of(job: Job) -> int:
    """Of ZeRO."""
    if job.deepspeed is not None:
        return int(deepspeed_plan(job).value("zero_optimization.stage"))
    call = job.transform("zero")
    return 0 if call is None else int(call.arguments["stage"])


def precision_of(job: Job) -> str:
    """One of ``PRECISIONS``, or another policy's words."""
    if job.deepspeed is not None:
        plan = deepspeed_plan(job)
        return "bf16" if plan.value("bf16.enabled") else "fp16" if plan.value("fp16.enabled") else "fp32"
    call = job.transform("mixed_precision")
    return "fp32" if call is None else str(call.arguments.get("policy", "bf16"))


def name_of(job: Job) -> str:
    """A candidate in a few words.

    >>> job = Job(model="a:B", steps=1, optimizer={"adamw": 1e-3})
    >>> name_of(candidate(job, {"dp": 2}, stage=2, precision="bf16", micro_batch=4, accumulate=2))
    'zero 2, bf16, 2 x 4 rows'
    """
    times = micro_batches(job)
    words = [f"zero {stage_of(job)}", precision_of(job), f"{times} x {rows_of_rank(job) // times} rows"]
    words += ["recompute"] * (job.transform("remat") is not None)
    words += [f"{axis} {size(job, axis)}" for axis in ("tp", "sp", "pp", "ep") if size(job, axis) > 1]
    call = job.transform("pipeline")
    return ", ".join(
        words + ([] if call is None or call.arguments["schedule"] == "one_f_one_b" else [call.arguments["schedule"]])
    )


def mesh_line(job: Job) -> str:
    """The mesh as a line of Python; empty where there is none."""
    return "" if not job.mesh else f"mesh = comm.mesh({', '.join(f'{name}={count}' for name, count in job.mesh.items())})"


def line_of(job: Job, subject: Subject | None = None) -> str:
    """The transforms as one line of Python.

    The names that it uses besides ``fds`` and ``T``: ``pp`` (``functional_ds.pipelining``), ``mesh``, ``config``, and of the
    model ``stages`` and ``tp_plan``.

    Args:
        job: the candidate.
        subject: the model, which defines how sequences are split, and which leaves are experts.

    >>> job = Job(model="a:B", steps=1, optimizer={"adamw": 1e-3}, strategy=[{"clip": 1.0}])
    >>> line_of(candidate(job, stage=0, accumulate=2, recompute=True))
    'fds.compose(T.remat(), T.zero(0), T.accumulate(2), T.clip(1.0))'
    """
    words = [_call(job, call, subject) for call in job.strategy]
    if job.deepspeed is not None:
        group = f", group={_group(','.join(data_axes(job)))}" if job.mesh else ""
        ranks = size(job, "dp") * size(job, "sp")
        place = sum(call.name == "remat" for call in job.strategy)
        words.insert(place, f"fds.from_ds_config(config, {ranks}{group}).transform")
    return f"fds.compose({', '.join(words)})"


def _group(axes: str) -> str:
    return "mesh[" + ", ".join(f'"{axis.strip()}"' for axis in axes.split(",")) + "]"


def _call(job: Job, call: CallEntry, subject: Subject | None) -> str:
    arguments = call.arguments
    if call.name == "sequence" and subject is not None:
        arguments = {**(subject.sequence or {}), **arguments}
    if call.name == "experts" and subject is not None:
        arguments = {**arguments, "pattern": subject.experts}
    given = {name: _group(value) if name in ("group", "ep", "edp") else repr(value) for name, value in arguments.items()}
    if call.name == "pipeline":
        schedule = f"pp.{call.arguments['schedule']}({size(job, 'pp')}, {call.arguments['micro_batches']})"
        given = {"schedule": schedule, "stages": "stages", "group": given.get("group", "None")}
        return f"T.pipeline({', '.join(given.values())})"
    if call.name == "tensor_parallel" and call.arguments.get("plan") == "auto":
        given["plan"] = "tp_plan"
    if ":" in call.name:
        return f"{call.name.rpartition(':')[2]}({', '.join(f'{name}={value}' for name, value in given.items())})"
    words = []
    for parameter in inspect.signature(KINDS["transform"].function(call.name)).parameters.values():
        if parameter.name not in given or parameter.kind is parameter.KEYWORD_ONLY:
            break
        words.append(given.pop(parameter.name))
    words += [f"{name}={value}" for name, value in given.items()]
    return f"T.{call.name}({', '.join(words)})"


def ds_config_of(job: Job) -> dict[str, Any]:
    """A DeepSpeed config of the transforms other than the axes; its rows are counted over dp and sp.

    Raises:
        CommandError: one of the transforms has no keys there.
    """
    if job.deepspeed is not None:
        ds_config: dict[str, Any] = deepspeed_plan(job).to_ds_config()
        return ds_config
    times = 1 if job.transform("pipeline") is not None else micro_batches(job)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": rows_of_rank(job) // times,
        "gradient_accumulation_steps": times,
        "zero_optimization": {"stage": stage_of(job)},
        "gradient_clipping": 0.0,
    }
    if job.optimizer is not None and job.optimizer.name == "adamw":
        config["optimizer"] = {"type": "AdamW", "params": job.optimizer.arguments}
    for call in job.strategy:
        if call.name == "clip":
            config["gradient_clipping"] = call.arguments["limit"]
        elif call.name == "mixed_precision" and precision_of(job) in PRECISIONS:
            config[precision_of(job)] = {"enabled": True}
        elif call.name not in ("zero", "accumulate", *BESIDE_DEEPSPEED):
            raise CommandError(f"strategy.{call.name}: a DeepSpeed config has no keys for it; write a job's file instead")
    return config


def write_out(job: Job, out: str | None) -> str:
    """Writes a candidate: a job file if the name ends with .toml, a DeepSpeed config if with .json; returns a line to print.

    Raises:
        CommandError: another name, or what the file cannot express.
    """
    if out is None:
        return ""
    path = Path(out)
    if path.suffix == ".json":
        path.write_text(json.dumps(ds_config_of(job), indent=1) + "\n", encoding="utf-8")
        more = ", ".join(call.name for call in job.strategy if call.name in BESIDE_DEEPSPEED)
        return f"{out} is written, a DeepSpeed config" + (f", which knows none of {more}" if more else "")
    same_folder = Path(job.folder).resolve() == path.parent.resolve()
    data = job.to_dict() | ({} if same_folder else {"folder": str(Path(job.folder).resolve())})
    if same_folder:
        del data["folder"]  # a file's own
    with refused(f"--out {out}", TypeError):
        path.write_text(toml(data), encoding="utf-8")
    module = job.model.name.rpartition(":")[0]
    allowed = f" --allow-import {module}" if module and (job.allow_import or not same_folder) else ""
    return f"{out} is written; functional-ds train {out}{allowed} runs it"


def check_out(out: str | None) -> None:
    """Raises an error for the name of a file that cannot be written, before anything is computed."""
    if out is not None and Path(out).suffix not in (".toml", ".json"):
        raise CommandError(f"--out {out} should end with .toml, for a job, or with .json, for a DeepSpeed config")
    if out is not None and not Path(out).absolute().parent.is_dir():
        raise CommandError(f"--out {out}: there is no folder {Path(out).parent}")


def as_dict(job: Job) -> dict[str, Any]:
    """For JSON, with the line."""
    times, call = micro_batches(job), job.transform("pipeline")
    return {
        "name": name_of(job),
        "ranks": size(job, "dp"),
        **{axis: size(job, axis) for axis in ("tp", "sp", "pp", "ep")},
        "schedule": None if call is None else call.arguments["schedule"],
        "mesh": mesh_line(job) or None,
        "stage": stage_of(job),
        "precision": precision_of(job),
        "micro_batch": rows_of_rank(job) // times,
        "accumulate": times,
        "recompute": job.transform("remat") is not None,
        "job": job.to_dict(),
    }
