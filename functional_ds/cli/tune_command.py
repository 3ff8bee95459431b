"""``functional-ds tune``: enumerate strategies, predict them, measure the best few, print the fastest."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import attrs
import torch
import typer

from functional_ds.scaling.machine import Machine

from .planning.admission import not_admitted
from .planning.candidate import PRECISIONS, Candidate, base_config
from .planning.forecast import Forecast, forecast
from .planning.known_machines import machine_of
from .planning.mesh_axes import MeshAxes
from .planning.subject import Subject, subject_of
from .tuning.calibration import fitted
from .tuning.halving import Measurement, TrialRun, halve
from .tuning.trial import TrialSpec, measure
from .words.errors_in_one_line import CommandError
from .words.options import choices, numbers, size
from .words.pages import OutputTable, bytes_of, emit, seconds_of

__all__ = ["candidates_of", "tune"]


def tune(
    model: Annotated[str, typer.Argument(help="file.py:function, module:function, or a Hugging Face config.json.")],
    rows: Annotated[int, typer.Option(help="Rows of a step, over all ranks.")],
    config: Annotated[str | None, typer.Option(help="A DeepSpeed config, of which these options replace keys.")] = None,
    ranks: Annotated[int, typer.Option(help="Processes of this machine; one for each GPU by default, else 1.")] = 0,
    zero: Annotated[str, typer.Option(help="Stages.")] = "0,1,2,3",
    precision: Annotated[str | None, typer.Option(help="fp32, bf16, fp16; bf16 on a GPU and fp32 else.")] = None,
    micro_batch: Annotated[str | None, typer.Option(help="Rows of micro-batches; all that divide by default.")] = None,
    recompute: Annotated[str, typer.Option(help="no, yes, or both.")] = "no",
    tp: Annotated[
        str | None, typer.Option(help="Tensor-parallel ranks: 1,2; all that divide by default, if the model says its cuts.")
    ] = None,
    sp: Annotated[str | None, typer.Option(help="Ranks that share sequences, likewise.")] = None,
    pp: Annotated[str | None, typer.Option(help="Ranks of a pipeline, likewise.")] = None,
    ep: Annotated[str | None, typer.Option(help="Ranks over which experts lie, among those of dp, likewise.")] = None,
    schedule: Annotated[str, typer.Option(help="Of pipelines: gpipe, zb_h1, ... or several of them.")] = "one_f_one_b",
    seq: Annotated[int, typer.Option(help="Tokens of a row, for a Hugging Face model.")] = 1024,
    limit: Annotated[str | None, typer.Option(help="Memory of a rank: 80GB; the GPU's by default.")] = None,
    machine: Annotated[str, typer.Option(help="For predicted times, as for plan.")] = "here",
    best: Annotated[int, typer.Option(help="How many to measure.")] = 4,
    steps: Annotated[int, typer.Option(help="Steps of the first round; later rounds have twice as many.")] = 4,
    timeout: Annotated[float, typer.Option(help="Seconds, after which a run is given up.")] = 300.0,
    out: Annotated[str | None, typer.Option(help="Also write the winner's DeepSpeed config to this file.")] = None,
    save_machine: Annotated[
        str | None, typer.Option(help="Also fit the machine to the runs and write it, for --machine.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Find the fastest strategy on this machine; exit code 1 where no run ended well.

    \b
    Examples:
      functional-ds tune train.py:model --rows 256
      functional-ds tune llama/config.json --rows 32 --seq 2048 --ranks 8 --recompute both --out ds_config.json
      functional-ds tune train.py:model --rows 64 --zero 1,2 --micro-batch 4,8 --best 8 --json
      functional-ds tune llama/config.json --rows 32 --ranks 8 --tp 1,2,4 --sp 1 --pp 1
      functional-ds tune llama/config.json --rows 32 --ranks 8 --pp 2,4 --schedule one_f_one_b,zb_h1
      functional-ds tune train.py:model --rows 64 --best 12 --save-machine here.json
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    count = ranks or max(1, torch.cuda.device_count())
    for name, value in (("--rows", rows), ("--ranks", count), ("--best", best), ("--steps", steps), ("--seq", seq)):
        if value < 1:
            raise CommandError(f"{name} {value} should be at least 1")
    if recompute not in ("no", "yes", "both"):
        raise CommandError(f"--recompute: {recompute!r} is none of no, yes, both")
    for option, file in (("--out", out), ("--save-machine", save_machine)):
        if file is not None and not Path(file).absolute().parent.is_dir():
            raise CommandError(f"{option} {file}: there is no folder {Path(file).parent}")
    words = choices(precision or ("bf16" if device == "cuda" else "fp32"), PRECISIONS, option="--precision")
    stages = numbers(zero, option="--zero", low=0, high=3)
    micro = numbers(micro_batch, option="--micro-batch") if micro_batch else None
    again = {"no": (False,), "yes": (True,), "both": (False, True)}[recompute]
    subject = subject_of(model, seq=seq)
    if subject.loss is None:
        raise CommandError(f"MODEL: {model} has no loss and no batch, so nothing can be measured")
    schedules = schedule.split(",")
    for name in schedules:
        MeshAxes(schedule=name).pipeline(1)  # its name is known
    several, refused = _axes_of(subject, count, {"tp": tp, "sp": sp, "pp": pp, "ep": ep})
    base = base_config(config)
    made = candidates_of(
        base, count, rows, stages=stages, precisions=words, micro=micro, recompute=again, schedules=schedules, **several
    )
    most = size(limit, option="--limit") if limit else 0
    place = machine_of(machine, ranks=count)
    models = cache(lambda axes: subject_of(model, seq=seq, axes=axes) if axes else subject)
    found, wrong = _predicted(models, made, place, most)
    refused += wrong
    chosen = sorted((each for each in found if each.fits), key=lambda each: each.step_seconds or 0.0)[:best]

    def run(each: Forecast, count_of_steps: int) -> Measurement:
        sys.stderr.write(f"{each.candidate.name}: {count_of_steps} steps\n")
        spec = TrialSpec.of(each.candidate, model, seq=seq, device=device, steps=count_of_steps)
        return measure(spec, timeout=timeout)

    runs = halve(chosen, run, steps=steps)
    winner = next((each for each in runs if each.found.seconds is not None), None)
    fit = None if save_machine is None else fitted(place, _timed(runs))
    data = {
        "model": model,
        "ranks": count,
        "rows": rows,
        "machine": attrs.asdict(place),
        "candidates": len(made),
        "do_not_fit": [{"name": each.candidate.name, "why": each.why_not} for each in found if not each.fits],
        "refused": refused,
        "fitted": None if fit is None else attrs.asdict(fit),
        "runs": [_as_dict(each, fit) for each in runs],
        "winner": None if winner is None else {**_as_dict(winner, fit), "config": _config(winner.candidate.candidate)},
    }
    if winner is not None and out is not None:
        Path(out).write_text(json.dumps(_config(winner.candidate.candidate), indent=1) + "\n", encoding="utf-8")
    if save_machine is not None and winner is not None:
        Path(save_machine).write_text(json.dumps(data["fitted"], indent=1) + "\n", encoding="utf-8")
    emit(_page(data, runs, winner, fit), data, as_json=as_json)
    return 0 if winner is not None else 1


def candidates_of(
    base: Mapping[str, Any],
    ranks: int,
    rows: int,
    *,
    stages: Sequence[int],
    precisions: Sequence[str],
    micro: Sequence[int] | None,
    recompute: Sequence[bool] = (False,),
    tp: Sequence[int] = (1,),
    sp: Sequence[int] = (1,),
    pp: Sequence[int] = (1,),
    ep: Sequence[int] = (1,),
    schedules: Sequence[str] = ("one_f_one_b",),
) -> list[Candidate]:
    """Every strategy of these words, on every mesh of the ranks, whose micro-batches make up the rows.

    The rows are divided among the data-parallel ranks, which are those that the other axes leave. Where no two ranks sum
    gradients, ZeRO's stages differ in nothing that a rank stores or sends, and the first of them stands for all.

    Args:
        base: a config.
        ranks: of all axes together.
        rows: of a step, over all ranks.
        stages: of ZeRO.
        precisions: words of ``PRECISIONS``.
        micro: sizes of micro-batches; None for all divisors of a rank's rows.
        recompute: whether blocks are recomputed.
        tp, sp, pp, ep: numbers of ranks of these axes; what does not divide the ranks, or those of dp, is left out.
        schedules: of pipelines, by name.

    Raises:
        CommandError: the rows do not divide on any mesh.
    """
    found, wrong = list[Candidate](), list[CommandError]()
    for t, s, p, e in product(tp, sp, pp, ep):
        dp = ranks // (t * s * p)
        if dp * t * s * p != ranks or dp % e:
            continue
        for schedule in schedules if p > 1 else schedules[:1]:
            axes = MeshAxes(dp, p, s, t, e, schedule)
            try:
                found += _of_mesh(base, axes, rows, stages, precisions, micro, recompute)
            except CommandError as error:  # of another mesh they may divide
                wrong.append(error)
    if not found:
        raise wrong[0] if wrong else CommandError(f"--ranks {ranks}: no mesh of {tp=}, {sp=}, {pp=}, {ep=} has so many")
    return found


def _of_mesh(
    base: Mapping[str, Any],
    axes: MeshAxes,
    rows: int,
    stages: Sequence[int],
    precisions: Sequence[str],
    micro: Sequence[int] | None,
    recompute: Sequence[bool],
) -> list[Candidate]:
    if rows % axes.dp:
        raise CommandError(f"--rows {rows} do not divide among {axes.dp} ranks")
    own = rows // axes.dp
    sizes = [each for each in range(1, own + 1) if own % each == 0] if micro is None else [m for m in micro if own % m == 0]
    if not sizes:
        raise CommandError(f"--micro-batch: none divides the {own} rows of a rank")
    beside = {name: getattr(axes, name) for name in ("tp", "sp", "pp", "ep", "schedule")}
    return [
        Candidate.of(
            base, axes.dp, stage=stage, precision=word, micro_batch=each, accumulate=own // each, recompute=again, **beside
        )
        for stage in (stages if axes.ranks == 1 or axes.dp * axes.sp > 1 else stages[:1])
        for word in precisions
        for each in sizes
        for again in recompute
    ]


def _axes_of(
    subject: Subject, ranks: int, words: Mapping[str, str | None]
) -> tuple[dict[str, list[int]], list[dict[str, str]]]:
    """The numbers of ranks to try by axis, and which axes the model does not admit, with its reason.

    Raises:
        CommandError: a number was given that does not divide the ranks, or for an axis that the model does not admit.
    """
    divisors = [each for each in range(1, ranks + 1) if ranks % each == 0]
    found, refused = dict[str, list[int]](), list[dict[str, str]]()
    for name, text in words.items():
        given = divisors if text is None else numbers(text, option=f"--{name}", low=1)
        wrong = [each for each in given if each not in divisors]
        if wrong:
            raise CommandError(f"--{name} {wrong[0]} does not divide {ranks} ranks; use {', '.join(map(str, divisors))}")
        reason = next((why for each in given if each > 1 and (why := not_admitted(subject, name, each))), None)
        if reason is not None and text is not None:
            raise CommandError(reason)
        if reason is not None:
            refused.append({"name": f"{name} of several ranks", "why": reason})
        found[name] = given if reason is None else [1]
    return found, refused


def _predicted(
    models: Callable[[frozenset[str]], Subject], made: Sequence[Candidate], place: Machine, limit: int
) -> tuple[list[Forecast], list[dict[str, str]]]:
    """The forecasts, and the candidates that this model or config refuses."""
    found, refused = [], []
    for each in made:
        try:
            subject = models(each.axes.several - {"tp"})
            found.append(forecast(subject, each, machine=place, limit=limit))
        except CommandError as error:
            refused.append({"name": each.name, "config": json.dumps(each.config), "why": str(error)})
    if not found:
        raise CommandError(refused[0]["why"])
    return found, refused


def _config(candidate: Candidate) -> dict[str, Any]:
    """The config of the transforms beside the axes; its rows are counted over dp and sp."""
    return candidate.shared_plan().to_ds_config()


def _timed(runs: Sequence[TrialRun[Forecast]]) -> list[tuple[Mapping[str, float], float]]:
    """What a fit takes, of the runs that ended well."""
    pairs = [
        (run.candidate.perfect_seconds, run.found.seconds) for run in runs if not run.candidate.stages
    ]  # a bubble is none's
    return [(perfect, seconds) for perfect, seconds in pairs if perfect is not None and seconds is not None]


def _fitted_seconds(run: TrialRun[Forecast], fit: Machine | None) -> float | None:
    return None if fit is None else attrs.evolve(run.candidate, machine=fit).step_seconds


def _as_dict(run: TrialRun[Forecast], fit: Machine | None) -> dict[str, Any]:
    predicted = run.candidate
    return {
        **predicted.candidate.as_dict(),
        "line": predicted.line,
        "round": run.round,
        "steps": run.steps,
        "why": run.found.why or None,
        "predicted": {
            "step_seconds": predicted.step_seconds,
            "peak": predicted.peak,
            "state": predicted.shape.memory.state,
        },
        "fitted": {"step_seconds": _fitted_seconds(run, fit)},
        "measured": {"step_seconds": run.found.seconds, "peak": run.found.peak, "state": run.found.state},
    }


def _page(
    data: Mapping[str, Any], runs: Sequence[TrialRun[Forecast]], winner: TrialRun[Forecast] | None, fit: Machine | None
) -> list[OutputTable | str]:
    def cells(run: TrialRun[Forecast]) -> Iterator[str]:
        found = run.found
        yield run.candidate.candidate.name
        yield str(run.steps)
        yield seconds_of(run.candidate.step_seconds)
        if fit is not None:
            yield seconds_of(_fitted_seconds(run, fit))
        yield seconds_of(found.seconds)
        yield from (bytes_of(run.candidate.peak), bytes_of(found.peak) if found.peak is not None else "-")
        yield found.why

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
    its, line = winner.candidate.candidate, winner.candidate.line
    return [*page, "\n".join([f"winner: {its.name}", *_set_up(its), line, json.dumps(_config(its))])]


def _set_up(candidate: Candidate) -> list[str]:
    """Lines before the strategy's, for the axes beside dp."""
    lines, axes = (
        [f"{candidate.axes.mesh_line()}  # the config below knows none of it"] * bool(candidate.axes.mesh_line()),
        candidate.axes,
    )
    if candidate.sp > 1:
        lines.append('# sp: fds.seq.register_attention(), and a Hugging Face model with attn_implementation="fds_ring"')
    if candidate.ep > 1:
        lines.append("# ep: a Hugging Face model after model.set_experts_implementation(fds.moe.register_experts())")
    if candidate.pp > 1:
        count = axes.pipeline(candidate.micro_batches).stages
        lines.append(f"# pp: stages, params = pp.cut(model, {count}, example=batch, ...), for functional_ds.pipelining as pp")
    return lines
