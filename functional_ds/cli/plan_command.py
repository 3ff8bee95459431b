"""``functional-ds plan``: predicts what fits and what it sends, before any hardware is rented."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import attrs
import typer

from functional_ds.jobs.job_subject import Subject
from functional_ds.jobs.strategy import deepspeed_plan, schedule_of
from functional_ds.memory.account import KINDS
from functional_ds.pipelining.schedules.published import PUBLISHED
from functional_ds.scaling.machine import FACTORS

from .planning.candidate import PRECISIONS, candidate, check_out, name_of, with_config, write_out
from .planning.forecast import Forecast, forecast
from .planning.known_machines import machine_of
from .planning.subject import job_of, planned
from .planning.values_free_step import StepShape
from .words.errors_in_one_line import CommandError
from .words.options import choices, mesh_sizes, numbers, size
from .words.pages import OutputTable, bytes_of, count_of, emit, seconds_of

_SHOWN = ("params", "masters", "optimizer", "gradients", "gathered")


def plan(
    model: Annotated[
        str, typer.Argument(help="A job's file, file.py:function, module:function, a Hugging Face config.json, or shapes.")
    ],
    config: Annotated[str | None, typer.Option(help="A DeepSpeed config; other options override it.")] = None,
    mesh: Annotated[
        str | None, typer.Option(help="The ranks by axis: dp=8, or dp=8,tp=2; dp, pp, sp, tp, and ep within dp.")
    ] = None,
    schedule: Annotated[
        str, typer.Option(help="The pipeline's: gpipe, zb_h1, zbv, interleaved_one_f_one_b, ...")
    ] = "one_f_one_b",
    zero: Annotated[str | None, typer.Option(help="Stages to compare; 0,1,2,3 for a model.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, bf16, fp16, or several of them; bf16 for a model.")] = None,
    micro_batch: Annotated[int | None, typer.Option(min=1, help="Rows of a micro-batch on a rank.")] = None,
    accumulate: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Micro-batches of a step; 2 for each rank of a pipeline.")
    ] = None,
    recompute: Annotated[bool, typer.Option("--recompute", help="Recompute the repeated blocks.")] = False,
    seq: Annotated[int, typer.Option(min=1, help="Tokens of a row, for a Hugging Face model.")] = 1024,
    limit: Annotated[str | None, typer.Option(help="Memory of a rank: 80GB; the machine's by default.")] = None,
    machine: Annotated[str | None, typer.Option(help="For times: h100, h200, a100-80gb, here, or a JSON file.")] = None,
    device: Annotated[Literal["cuda", "cpu"], typer.Option(help="Device type without --machine.")] = "cuda",
    out: Annotated[
        str | None, typer.Option(help="Also write the fastest that fits: a job, .toml, or its DeepSpeed config, .json.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Also what became of each key of the config.")] = False,
    allow_import: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A module that a job's file may name, as for train.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Predict memory, traffic and time of a step from shapes; exit code 1 if nothing fits.

    \b
    Examples:
      functional-ds plan meta-llama/config.json --mesh dp=64 --machine h100 --seq 4096
      functional-ds plan train.py:model --config ds_config.json --mesh dp=8 --limit 24GB
      functional-ds plan llama/config.json --mesh dp=8,tp=4 --zero 1 --recompute
      functional-ds plan llama/config.json --mesh dp=8,pp=4 --accumulate 16 --schedule zb_h1 --machine h100
      functional-ds plan mixtral/config.json --mesh dp=8,ep=4,sp=2 --seq 32768
      functional-ds plan shapes.json --mesh dp=8 --zero 1,3 --json
      functional-ds plan job.toml --mesh dp=8 --zero 1,2,3 --machine h100 --out planned.toml
    """
    base = job_of(model, seq=seq, allow_import=allow_import or ())
    known = base.file is not None or config is not None  # other options are as in the job
    base, sizes = with_config(base, config), None if mesh is None and base.file is not None else mesh_sizes(mesh or "dp=1")
    choices(schedule, PUBLISHED, option="--schedule")
    if sizes is not None and sizes["pp"] > 1 and accumulate is None and not known:
        accumulate = 2 * sizes["pp"]
    check_out(out)
    stages = [None] if zero is None and known else numbers(zero or "0,1,2,3", option="--zero", low=0, high=3)
    words = [None] if precision is None and known else choices(precision or "bf16", PRECISIONS, option="--precision")
    changes: dict[str, Any] = {"micro_batch": micro_batch, "accumulate": accumulate, "recompute": recompute}
    candidates = [candidate(base, sizes, stage=s, precision=w, schedule=schedule, **changes) for w in words for s in stages]
    for job in candidates:
        if job.deepspeed is not None:
            deepspeed_plan(job)  # an unsupported key raises an error before anything is computed
        schedule_of(job)
    most = size(limit, option="--limit") if limit else 0
    place = machine_of(machine, ranks=candidates[0].world_size) if machine else None
    subject = attrs.evolve(planned(candidates[0]), name=model)
    forecasts = [forecast(subject, job, machine=place, limit=most, device=device) for job in candidates]
    best = min(
        (predicted for predicted in forecasts if predicted.fits),
        key=lambda predicted: predicted.step_seconds or 0.0,
        default=None,
    )
    if best is not None and out is not None and subject.loss is None:
        raise CommandError(
            f"--out {out}: only shapes of {model} are known, and a job needs the model, its loss and its batches"
        )
    data = {
        "model": {"name": model, "parameters": subject.numel, "complete": subject.loss is not None},
        "ranks": candidates[0].world_size,
        "machine": place.name if place else None,
        "candidates": [predicted.as_dict() for predicted in forecasts],
        "best": None if best is None else best.job.to_dict(),
        "fits": [name_of(predicted.job) for predicted in forecasts if predicted.fits],
    }
    page = plan_page(subject, forecasts)
    if explain:
        keys = () if candidates[0].deepspeed is None else deepspeed_plan(candidates[0]).explain().rows
        rows = [(row.key, row.fate.value, row.reason) for row in keys]
        data["explain"] = [{"key": key, "became": fate, "reason": reason} for key, fate, reason in rows]
        page.append(OutputTable("keys of the config", ("key", "fate", "why"), rows))
    if best is not None and out is not None:
        page.append(write_out(best.job, out))
    emit(page, data, as_json=as_json)
    return 0 if data["fits"] else 1


def plan_page(subject: Subject, forecasts: Sequence[Forecast]) -> list[OutputTable | str]:
    """The tables of a plan."""
    first = forecasts[0]
    where = f" on {first.machine.name}" if first.machine else ""
    page: list[OutputTable | str] = [
        f"{subject.name}: {count_of(subject.numel)} parameters, {first.job.world_size} ranks{where}"
    ]
    kinds = [
        category
        for category in KINDS
        if category in _SHOWN and any(getattr(predicted.shape.memory, category) for predicted in forecasts)
    ]
    columns = ("candidate", *kinds, "others", "activations", "peak", "fits")
    rows = []
    for predicted, name, shape in _ranks_of(forecasts):
        memory = shape.memory
        cells = [bytes_of(getattr(memory, category)) for category in kinds]
        held = bytes_of(shape.activations) if shape.complete else "-"
        fits = "-" if not predicted.limit else "yes" if shape.peak <= predicted.limit else "no"
        rows.append((name, *cells, bytes_of(memory.buffers), held, bytes_of(shape.peak), fits))
    limit = f", limit {bytes_of(first.limit)}" if first.limit else ""
    page.append(OutputTable(f"memory of a rank{limit}", columns, rows))
    wide = [predicted for predicted in forecasts if predicted.why_not]
    if wide:
        page.append(OutputTable("what does not fit", ("candidate", "why"), [(name_of(e.job), e.why_not) for e in wide]))
    sent = [
        (name, row.collective, row.group, str(row.size), str(row.calls), f"{row.bytes:,}")
        for _, name, shape in _ranks_of(forecasts)
        for row in shape.sent
        if row.bytes
    ]
    columns = ("candidate", "collective", "group", "ranks", "calls", "bytes")
    page.append(OutputTable("sent by a rank in a step", columns, sent) if sent else "A rank sends nothing.")
    timed = [(predicted, predicted.seconds) for predicted in forecasts if predicted.seconds is not None]
    if timed:
        bubble = any(predicted.stages for predicted in forecasts)
        times = [
            (
                name_of(predicted.job),
                *(seconds_of(time) for time in s.values()),
                *([seconds_of(predicted.bubble_seconds)] if bubble else []),
                seconds_of(predicted.step_seconds),
                f"{predicted.samples_per_second or 0:.4g}",
            )
            for predicted, s in timed
        ]
        columns = ("candidate", *FACTORS, *["bubble"] * bubble, "together", "rows/s")
        page.append(OutputTable("time of a step at the machine's rates, with overlap between nodes only", columns, times))
    if subject.loss is None:
        page.append("Only shapes are known: activations and times are not predicted. A function or a config has them.")
    page.append("\n".join(f"{name_of(predicted.job)}\n  {predicted.line}" for predicted in forecasts if predicted.fits))
    return [part for part in page if part]


def _ranks_of(forecasts: Sequence[Forecast]) -> Iterator[tuple[Forecast, str, StepShape]]:
    """Each candidate with its name and its step; a pipeline's once for each of its ranks."""
    for predicted in forecasts:
        if not predicted.stages:
            yield predicted, name_of(predicted.job), predicted.shape
        for place, shape in enumerate(predicted.stages):
            yield predicted, f"{name_of(predicted.job)}: rank {place} of pp", shape
