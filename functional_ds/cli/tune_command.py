"""``functional-ds tune``: enumerates strategies, predicts them, measures the best few, prints the fastest."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import attrs
import torch
import typer

from functional_ds.jobs.job import Job
from functional_ds.jobs.job_subject import Subject
from functional_ds.pipelining.schedules.published import PUBLISHED
from functional_ds.scaling.machine import Machine

from .planning.admission import not_admitted
from .planning.candidate import PRECISIONS, as_dict, candidate, check_out, mesh_line, name_of, with_config, write_out
from .planning.forecast import Forecast, forecast
from .planning.known_machines import machine_of
from .planning.subject import job_of, planned
from .tuning.calibration import fitted
from .tuning.trial import Measurement, TrialRun, halve, measure
from .words.errors_in_one_line import CommandError
from .words.options import choices, numbers, size
from .words.pages import OutputTable, bytes_of, emit, seconds_of


def tune(
    model: Annotated[
        str, typer.Argument(help="A job's file, file.py:function, module:function, or a Hugging Face config.json.")
    ],
    rows: Annotated[
        int | None, typer.Option(min=1, max=2**31 - 1, help="Rows of a step, over all ranks; a job says its own.")
    ] = None,
    config: Annotated[str | None, typer.Option(help="A DeepSpeed config, of which these options replace keys.")] = None,
    ranks: Annotated[int, typer.Option(min=0, help="Processes of this machine; one for each GPU by default, else 1.")] = 0,
    zero: Annotated[str, typer.Option(help="Stages.")] = "0,1,2,3",
    precision: Annotated[str | None, typer.Option(help="fp32, bf16, fp16; bf16 on a GPU, fp32 otherwise.")] = None,
    micro_batch: Annotated[str | None, typer.Option(help="Rows of micro-batches; all that divide by default.")] = None,
    recompute: Annotated[Literal["no", "yes", "both"], typer.Option(help="Recompute the repeated blocks.")] = "no",
    axis: Annotated[
        list[str] | None, typer.Option(help="Ranks of tp, sp, pp or ep: tp=1,2; all that divide by default, if the model can.")
    ] = None,
    schedule: Annotated[str, typer.Option(help="Pipeline schedules: gpipe, zb_h1, ...; one or several.")] = "one_f_one_b",
    seq: Annotated[int, typer.Option(min=1, help="Tokens of a row, for a Hugging Face model.")] = 1024,
    limit: Annotated[str | None, typer.Option(help="Memory of a rank: 80GB; the GPU's by default.")] = None,
    machine: Annotated[str, typer.Option(help="For predicted times, as for plan.")] = "here",
    best: Annotated[int, typer.Option(min=1, help="How many to measure.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the first round; later rounds have twice as many.")] = 4,
    timeout: Annotated[float, typer.Option(help="Seconds after which a run is stopped.")] = 300.0,
    out: Annotated[
        str | None, typer.Option(help="Also write the winner: a job, .toml, or its DeepSpeed config, .json.")
    ] = None,
    save_machine: Annotated[
        str | None, typer.Option(help="Also fit the machine to the runs and write it, for --machine.")
    ] = None,
    allow_import: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A module that a job's file may name, as for train.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Find the fastest strategy on this machine; exit code 1 if no run succeeded.

    \b
    Examples:
      functional-ds tune train.py:model --rows 256
      functional-ds tune llama/config.json --rows 32 --seq 2048 --ranks 8 --recompute both --out job.toml
      functional-ds tune train.py:model --rows 64 --zero 1,2 --micro-batch 4,8 --best 8 --json
      functional-ds tune llama/config.json --rows 32 --ranks 8 --axis tp=1,2,4 --axis sp=1 --axis pp=1
      functional-ds tune llama/config.json --rows 32 --ranks 8 --axis pp=2,4 --schedule one_f_one_b,zb_h1
      functional-ds tune train.py:model --rows 64 --best 12 --save-machine here.json
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    count = ranks or max(1, torch.cuda.device_count())
    base = job_of(model, seq=seq, allow_import=allow_import or ())
    if rows is None and base.file is None:
        raise CommandError(f"--rows: pass the number of rows of a step of {model}, over all ranks")
    rows = base.data.rows if rows is None else rows
    if not 0 < timeout < float("inf"):
        raise CommandError(f"--timeout: {timeout} should be a number of seconds above 0")
    check_out(out)
    if save_machine is not None and not Path(save_machine).absolute().parent.is_dir():
        raise CommandError(f"--save-machine {save_machine}: there is no folder {Path(save_machine).parent}")
    words = choices(precision or ("bf16" if device == "cuda" else "fp32"), PRECISIONS, option="--precision")
    stages = numbers(zero, option="--zero", low=0, high=3)
    micro = numbers(micro_batch, option="--micro-batch") if micro_batch else None
    again = {"no": (False,), "yes": (True,), "both": (False, True)}[recompute]
    base = with_config(base, config)
    subject = planned(base)
    if subject.loss is None:
        raise CommandError(f"MODEL: {model} has no loss and no batch, so nothing can be measured")
    schedules = choices(schedule, PUBLISHED, option="--schedule")
    axes, refused = _axes_of(subject, count, axis or [])
    made = candidates_of(base, count, rows, SearchSpace(stages, words, micro, again, schedules, axes))
    most = size(limit, option="--limit") if limit else 0
    place = machine_of(machine, ranks=count)
    forecasts, wrong = _predicted(made, place, most)
    refused += wrong
    chosen = sorted((forecast for forecast in forecasts if forecast.fits), key=lambda forecast: forecast.step_seconds or 0.0)[
        :best
    ]

    def run(forecast: Forecast, count_of_steps: int) -> Measurement:
        sys.stderr.write(f"{name_of(forecast.job)}: {count_of_steps} steps\n")
        return measure(forecast.job.changed({"steps": count_of_steps, "device": device}), timeout=timeout)

    runs = halve(chosen, run, steps=steps)
    winner = next((trial for trial in runs if trial.measurement.seconds is not None), None)
    fit = None if save_machine is None else fitted(place, _timed(runs))
    data = {
        "model": model,
        "ranks": count,
        "rows": rows,
        "machine": attrs.asdict(place),
        "candidates": len(made),
        "do_not_fit": [{"name": name_of(forecast.job), "why": forecast.why_not} for forecast in forecasts if not forecast.fits],
        "refused": refused,
        "fitted": None if fit is None else attrs.asdict(fit),
        "runs": [_as_dict(trial, fit) for trial in runs],
        "winner": None if winner is None else _as_dict(winner, fit),
    }
    if save_machine is not None and winner is not None:
        Path(save_machine).write_text(json.dumps(data["fitted"], indent=1) + "\n", encoding="utf-8")
    written = "" if winner is None else write_out(winner.candidate.job, out)
    emit([*_page(data, runs, winner, fit), *[written] * bool(written)], data, as_json=as_json)
    return 0 if winner is not None else 1


@attrs.frozen
class SearchSpace:
    """The strategies to try.

    Attributes:
        stages: of ZeRO.
        precisions: names in ``PRECISIONS``.
        micro: sizes of micro-batches; None for all divisors of a rank's rows.
        recompute: whether blocks are recomputed.
        schedules: of pipelines, by name.
        axes: numbers of ranks of tp, sp, pp and ep; those that do not divide the ranks, or those of dp, are skipped.
    """

    stages: Sequence[int]
    precisions: Sequence[str]
    micro: Sequence[int] | None = None
    recompute: Sequence[bool] = (False,)
    schedules: Sequence[str] = ("one_f_one_b",)
    axes: Mapping[str, Sequence[int]] = attrs.field(factory=dict)


def candidates_of(job: Job, ranks: int, rows: int, search: SearchSpace) -> list[Job]:
    """Every strategy of a search, on every mesh of the ranks, whose micro-batches make up the rows.

    The rows are divided among the data-parallel ranks, which are those that the other axes leave. If no two ranks sum
    gradients, ZeRO's stages store and send the same, and only the first is tried.

    Args:
        job: what is trained.
        ranks: of all axes together.
        rows: of a step, over all ranks.
        search: the strategies to try.

    Raises:
        CommandError: the rows do not divide on any mesh.
    """
    jobs, wrong = list[Job](), list[CommandError]()
    counts = {axis: tuple(search.axes.get(axis, (1,))) for axis in ("tp", "sp", "pp", "ep")}
    for tp, sp, pp, ep in product(*counts.values()):
        dp = ranks // (tp * sp * pp)
        if dp * tp * sp * pp != ranks or dp % ep:
            continue
        mesh = {"dp": dp, "pp": pp, "sp": sp, "tp": tp, "ep": ep}
        for schedule in search.schedules if pp > 1 else search.schedules[:1]:
            try:
                jobs += _of_mesh(job, mesh, rows, schedule, search)
            except CommandError as error:  # of another mesh they may divide
                wrong.append(error)
    if not jobs:
        words = ", ".join(f"{axis}={list(sizes)}" for axis, sizes in counts.items())
        raise wrong[0] if wrong else CommandError(f"--ranks {ranks}: no mesh of {words} has so many")
    return jobs


def _of_mesh(job: Job, mesh: Mapping[str, int], rows: int, schedule: str, search: SearchSpace) -> list[Job]:
    dp = mesh["dp"]
    if rows % dp:
        raise CommandError(f"--rows {rows} do not divide among {dp} ranks")
    rows_per_rank = rows // dp
    sizes = [micro for micro in (search.micro or range(1, rows_per_rank + 1)) if rows_per_rank % micro == 0]
    if not sizes:
        raise CommandError(f"--micro-batch: none divides the {rows_per_rank} rows of a rank")
    alone = dp * mesh["sp"] == 1 < dp * mesh["sp"] * mesh["pp"] * mesh["tp"]
    return [
        candidate(
            job,
            mesh,
            stage=stage,
            precision=word,
            micro_batch=micro,
            accumulate=rows_per_rank // micro,
            recompute=again,
            schedule=schedule,
        )
        for stage in (search.stages[:1] if alone else search.stages)
        for word in search.precisions
        for micro in sizes
        for again in search.recompute
    ]


def _axes_of(subject: Subject, ranks: int, words: Sequence[str]) -> tuple[dict[str, list[int]], list[dict[str, str]]]:
    """The numbers of ranks to try by axis, and which axes the model does not support, with the reason.

    Raises:
        CommandError: a given number does not divide the ranks, or is for an axis that the model does not support.
    """
    divisors = [divisor for divisor in range(1, ranks + 1) if ranks % divisor == 0]
    texts = dict.fromkeys(("tp", "sp", "pp", "ep"), "")
    for word in words:
        name, _, text = word.partition("=")
        if name not in texts or not text:
            raise CommandError(
                f"--axis: {word!r} should be one of {', '.join(texts)} with its numbers of ranks, such as tp=1,2"
            )
        texts[name] = text
    sizes, refused = dict[str, list[int]](), list[dict[str, str]]()
    for name, text in texts.items():
        given = numbers(text, option=f"--axis {name}", low=1) if text else divisors
        wrong = [count for count in given if count not in divisors]
        if wrong:
            raise CommandError(f"--axis {name}={wrong[0]} does not divide {ranks} ranks; use {', '.join(map(str, divisors))}")
        reason = next((why for count in given if count > 1 and (why := not_admitted(subject, name, count))), None)
        if reason is not None and text:
            raise CommandError(reason)
        if reason is not None:
            refused.append({"name": f"{name} of several ranks", "why": reason})
        sizes[name] = given if reason is None else [1]
    return sizes, refused


def _predicted(made: Sequence[Job], place: Machine, limit: int) -> tuple[list[Forecast], list[dict[str, Any]]]:
    """The forecasts, and the candidates that this model or config does not support."""
    subjects: dict[str, Subject] = {}
    forecasts, refused = list[Forecast](), list[dict[str, Any]]()
    for job in made:
        try:
            key = json.dumps(job.model.to_plain(), default=str)
            if key not in subjects:
                subjects[key] = planned(job)
            forecasts.append(forecast(subjects[key], job, machine=place, limit=limit))
        except CommandError as error:
            refused.append({"name": name_of(job), "job": job.to_dict(), "why": str(error)})
    if not forecasts:
        raise CommandError(refused[0]["why"])
    return forecasts, refused


def _timed(runs: Sequence[TrialRun[Forecast]]) -> list[tuple[Mapping[str, float], float]]:
    """The input of a fit, from the runs that succeeded."""
    pairs = [
        (run.candidate.perfect_seconds, run.measurement.seconds) for run in runs if not run.candidate.stages
    ]  # a bubble is none's
    return [(perfect, seconds) for perfect, seconds in pairs if perfect is not None and seconds is not None]


def _fitted_seconds(run: TrialRun[Forecast], fit: Machine | None) -> float | None:
    return None if fit is None else attrs.evolve(run.candidate, machine=fit).step_seconds


def _as_dict(run: TrialRun[Forecast], fit: Machine | None) -> dict[str, Any]:
    predicted = run.candidate
    return {
        **as_dict(predicted.job),
        "line": predicted.line,
        "round": run.round,
        "steps": run.steps,
        "why": run.measurement.why or None,
        "predicted": {"step_seconds": predicted.step_seconds, "peak": predicted.peak, "state": predicted.shape.memory.state},
        "fitted": {"step_seconds": _fitted_seconds(run, fit)},
        "measured": {"step_seconds": run.measurement.seconds, "peak": run.measurement.peak, "state": run.measurement.state},
    }


def _page(
    data: Mapping[str, Any], runs: Sequence[TrialRun[Forecast]], winner: TrialRun[Forecast] | None, fit: Machine | None
) -> list[OutputTable | str]:
    def cells(run: TrialRun[Forecast]) -> Iterator[str]:
        measurement = run.measurement
        yield name_of(run.candidate.job)
        yield str(run.steps)
        yield seconds_of(run.candidate.step_seconds)
        if fit is not None:
            yield seconds_of(_fitted_seconds(run, fit))
        yield seconds_of(measurement.seconds)
        yield from (bytes_of(run.candidate.peak), bytes_of(measurement.peak) if measurement.peak is not None else "-")
        yield measurement.why

    columns = (
        "candidate",
        "steps",
        "predicted",
        *["fitted"] * (fit is not None),
        "measured",
        "peak predicted",
        "peak measured",
        "",
    )
    page: list[OutputTable | str] = [
        f"{data['candidates']} candidates, {len(data['do_not_fit'])} do not fit, {len(runs)} measured"
    ]
    page.append(OutputTable("time of a step and memory of a rank", columns, [tuple(cells(run)) for run in runs]))
    if winner is None:
        return [*page, "No run ended well."]
    job, line = winner.candidate.job, winner.candidate.line
    return [*page, "\n".join([f"winner: {name_of(job)}", *[mesh_line(job)] * bool(job.mesh), line]), str(job)]
