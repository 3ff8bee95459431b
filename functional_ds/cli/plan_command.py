"""``functional-ds plan``: what fits and what it sends, before anything is rented."""

from collections.abc import Sequence
from typing import Annotated

import typer

from functional_ds.memory.account import KINDS
from functional_ds.scaling.machine import FACTORS

from .planning.candidate import PRECISIONS, Candidate, base_config
from .planning.forecast import Forecast, forecast
from .planning.known_machines import machine_of
from .planning.subject import Subject, subject_of
from .words.errors_in_one_line import CommandError
from .words.options import choices, mesh_sizes, numbers, size
from .words.pages import OutputTable, bytes_of, count_of, emit, seconds_of

__all__ = ["plan", "plan_page"]

_SHORT = {"params": "params", "masters": "masters", "optimizer": "optimizer", "gradients": "gradients", "gathered": "gathered"}


def plan(
    model: Annotated[str, typer.Argument(help="file.py:function, module:function, a Hugging Face config.json, or shapes.")],
    config: Annotated[str | None, typer.Option(help="A DeepSpeed config; what is given beside it takes its place.")] = None,
    mesh: Annotated[str, typer.Option(help="The ranks: dp=8, or dp=8,tp=2.")] = "dp=1",
    zero: Annotated[str | None, typer.Option(help="Stages to compare; 0,1,2,3 without a config.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, bf16, fp16, or several of them; bf16 without a config.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Rows of a micro-batch on a rank.")] = None,
    accumulate: Annotated[int | None, typer.Option(help="Micro-batches of a step.")] = None,
    recompute: Annotated[bool, typer.Option("--recompute", help="Recompute the repeated blocks.")] = False,
    seq: Annotated[int, typer.Option(help="Tokens of a row, for a Hugging Face model.")] = 1024,
    limit: Annotated[str | None, typer.Option(help="Memory of a rank: 80GB; the machine's by default.")] = None,
    machine: Annotated[str | None, typer.Option(help="For times: h100, h200, a100-80gb, here, or a JSON file.")] = None,
    device: Annotated[str, typer.Option(help="Whose kernels are meant without a machine: cuda or cpu.")] = "cuda",
    explain: Annotated[bool, typer.Option("--explain", help="Also what became of each key of the config.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Predict memory, traffic and time of a step from shapes alone; exit code 1 where nothing fits.

    \b
    Examples:
      functional-ds plan meta-llama/config.json --mesh dp=64 --machine h100 --seq 4096
      functional-ds plan train.py:model --config ds_config.json --mesh dp=8 --limit 24GB
      functional-ds plan llama/config.json --mesh dp=8,tp=4 --zero 1 --recompute
      functional-ds plan shapes.json --mesh dp=8 --zero 1,3 --json
    """
    base, (ranks, tp) = base_config(config), mesh_sizes(mesh)
    for name, value in (("--micro-batch", micro_batch), ("--accumulate", accumulate), ("--seq", seq)):
        if value is not None and value < 1:
            raise CommandError(f"{name} {value} should be at least 1")
    if device not in ("cpu", "cuda"):
        raise CommandError(f"--device: {device!r} is neither cuda nor cpu")
    stages = [None] if zero is None and config else numbers(zero or "0,1,2,3", option="--zero", low=0, high=3)
    words = [None] if precision is None and config else choices(precision or "bf16", PRECISIONS, option="--precision")
    candidates = [
        Candidate.of(
            base, ranks, stage=s, precision=w, micro_batch=micro_batch, accumulate=accumulate, recompute=recompute, tp=tp
        )
        for w in words
        for s in stages
    ]
    for each in candidates:
        _ = each.plan  # a refused key before anything is computed
    most = size(limit, option="--limit") if limit else 0
    place = machine_of(machine, ranks=ranks * tp) if machine else None
    subject = subject_of(model, seq=seq)
    found = [forecast(subject, each, machine=place, limit=most, device=device) for each in candidates]
    data = {
        "model": {"name": model, "parameters": subject.numel, "complete": subject.loss is not None},
        "ranks": ranks * tp,
        "machine": place.name if place else None,
        "candidates": [each.as_dict() for each in found],
        "fits": [each.candidate.name for each in found if each.fits],
    }
    page = plan_page(subject, found)
    if explain:
        explained = candidates[0].plan.explain()
        rows = [(row.key, row.fate.value, row.reason) for row in explained.rows]
        data["explain"] = [{"key": key, "became": fate, "reason": reason} for key, fate, reason in rows]
        page.append(OutputTable("keys of the config", ("key", "fate", "why"), rows))
    emit(page, data, as_json=as_json)
    return 0 if data["fits"] else 1


def plan_page(subject: Subject, found: Sequence[Forecast]) -> list[OutputTable | str]:
    """The tables of a plan."""
    first = found[0]
    where = f" on {first.machine.name}" if first.machine else ""
    page: list[OutputTable | str] = [
        f"{subject.name}: {count_of(subject.numel)} parameters, {first.candidate.world_size} ranks{where}"
    ]
    kinds = [kind for kind in KINDS if kind in _SHORT and any(getattr(each.shape.memory, kind) for each in found)]
    columns = ("candidate", *kinds, "others", "activations", "peak", "fits")
    rows = []
    for each in found:
        memory = each.shape.memory
        cells = [bytes_of(getattr(memory, kind)) for kind in kinds]
        held = bytes_of(each.shape.activations) if each.shape.complete else "-"
        fits = "-" if not each.limit else "yes" if each.fits else "no"
        rows.append((each.candidate.name, *cells, bytes_of(memory.buffers), held, bytes_of(each.peak), fits))
    limit = f", limit {bytes_of(first.limit)}" if first.limit else ""
    page.append(OutputTable(f"memory of a rank{limit}", columns, rows))
    wide = [each for each in found if each.why_not]
    if wide:
        page.append(OutputTable("what does not fit", ("candidate", "why"), [(e.candidate.name, e.why_not) for e in wide]))
    sent = [
        (each.candidate.name, row.collective, row.group, str(row.size), str(row.calls), f"{row.bytes:,}")
        for each in found
        for row in each.shape.sent
        if row.bytes
    ]
    columns = ("candidate", "collective", "group", "ranks", "calls", "bytes")
    page.append(OutputTable("sent by a rank in a step", columns, sent) if sent else "A rank sends nothing.")
    timed = [(each, each.seconds) for each in found if each.seconds is not None]
    if timed:
        times = [
            (
                each.candidate.name,
                *(seconds_of(time) for time in s.values()),
                seconds_of(each.step_seconds),
                f"{each.samples_per_second or 0:.4g}",
            )
            for each, s in timed
        ]
        columns = ("candidate", *FACTORS, "together", "rows/s")
        page.append(OutputTable("time of a step at the machine's rates, if communication overlaps nothing", columns, times))
    if subject.loss is None:
        page.append("Only shapes are known: activations and times are not predicted. A function or a config has them.")
    page.append("\n".join(f"{each.candidate.name}\n  {each.candidate.line()}" for each in found if each.fits))
    return [part for part in page if part]
