"""``functional-ds draw``: schedules, memory, traffic and traces, as text or as plots."""

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from functional_ds.base.disk.files import parse_json, read_text
from functional_ds.comm.debug.traffic import draw_traffic, traffic
from functional_ds.comm.record.ledger import Ledger
from functional_ds.memory.formulas import EIGHTEEN, SINGLE, SIXTEEN, Formula, by_stage
from functional_ds.memory.reports import draw_zero, zero_table
from functional_ds.pipelining.planning.costs import Costs
from functional_ds.pipelining.planning.draw import draw as draw_timeline
from functional_ds.pipelining.planning.timeline import timeline
from functional_ds.pipelining.schedules.csv import from_csv
from functional_ds.pipelining.schedules.published import published

from .planning.candidate import candidate, name_of, with_config
from .planning.subject import job_of, planned
from .planning.values_free_step import sent_by_all
from .words.errors_in_one_line import CommandError, refused
from .words.options import existing, mesh_sizes
from .words.pages import OutputTable, emit, seconds_of

_CONVENTIONS = {"16": SIXTEEN, "18": EIGHTEEN, "fp32": SINGLE}
_MOST = 64  # ranks that are simulated for a picture of traffic
_MOST_CELLS = 2**14  # micro-batches of all ranks in a picture of a schedule


def draw(
    what: Annotated[Literal["schedule", "memory", "traffic", "trace"], typer.Argument(help="What is drawn.")],
    of: Annotated[str | None, typer.Argument(metavar="[OF]", help="A schedule or its CSV, a model, a trace.json.")] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of a schedule, or that share memory.")] = 4,
    microbatches: Annotated[int, typer.Option(min=1, help="Micro-batches of a schedule.")] = 8,
    costs: Annotated[str, typer.Option(help="Times of F, I, W of a schedule: 1,1,1.")] = "1,1,1",
    params: Annotated[float, typer.Option(min=1, max=1e18, help="Parameters, for memory.")] = 7.5e9,
    convention: Annotated[Literal["16", "18", "fp32"], typer.Option(help="Bytes of a parameter, for memory.")] = "16",
    config: Annotated[str | None, typer.Option(help="A DeepSpeed config, for traffic.")] = None,
    mesh: Annotated[str, typer.Option(help="The ranks, for traffic: dp=4.")] = "dp=4",
    zero: Annotated[int | None, typer.Option(help="The stage, for traffic.")] = None,
    width: Annotated[int, typer.Option(min=20, help="Columns of a timeline as text.")] = 100,
    out: Annotated[str | None, typer.Option("--out", "-o", help="A picture's file: .svg, .png, .pdf; text without.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Plot a pipeline schedule, the memory of ZeRO's stages, the traffic between ranks, or a trace.

    \b
    Examples:
      functional-ds draw schedule one_f_one_b --ranks 4 --microbatches 8
      functional-ds draw schedule mine.csv -o mine.svg
      functional-ds draw memory --params 7e9 --ranks 64 -o memory.png
      functional-ds draw traffic train.py:model --mesh dp=4 --zero 3 -o traffic.svg
      functional-ds draw trace out/trace.json
    """
    if out is not None and Path(out).suffix not in (".svg", ".png", ".pdf"):
        raise CommandError(f"--out: {out} should end with .svg, .png or .pdf")
    if what == "schedule":
        page, data, figure = _schedule(of or "one_f_one_b", ranks, microbatches, costs, width)
    elif what == "memory":
        page, data, figure = _memory(params, ranks, convention)
    elif what == "traffic":
        page, data, figure = _traffic(of, config, mesh, zero)
    else:
        page, data, figure = _trace(of)
    if out is not None:
        with refused("--out", ImportError, OSError):
            figure().savefig(out)
        page, data = [f"{out} is written"], {**data, "out": out}
    emit(page, data, as_json=as_json)
    return 0


Drawn = tuple[list[OutputTable | str], dict[str, Any], Callable[[], Any]]


def _schedule(name: str, ranks: int, microbatches: int, costs: str, width: int) -> Drawn:
    with refused(f"schedule {name}", ValueError):
        times = [float(cost) for cost in costs.split(",")]
        if len(times) != 3:
            raise ValueError("three numbers")
        if Path(name).suffix == ".csv":
            schedule = from_csv(existing(name, option="OF"))
        elif ranks * microbatches > _MOST_CELLS:
            raise CommandError(f"--ranks {ranks} --microbatches {microbatches}: a picture has room for {_MOST_CELLS:,} of both")
        else:
            schedule = published(name, ranks, microbatches)
        timed = timeline(schedule, Costs(forward=times[0], inputs=times[1], weights=times[2]))
    data = {
        "what": "schedule",
        "name": name,
        "ranks": schedule.ranks,
        "microbatches": schedule.microbatches,
        "makespan": timed.makespan,
        "bubble": timed.bubble,
        "peak": [float(peak) for peak in timed.peak],
        "rows": [[str(action) for action in schedule[rank]] for rank in range(schedule.ranks)],
    }
    return [timed.text(width=width)], data, lambda: draw_timeline(timed, title=name)


def _memory(params: float, ranks: int, convention: str) -> Drawn:
    its = _CONVENTIONS[convention]
    stages = [
        {**{category: formula.bytes(params, ranks) for category, formula in by_stage(stage, its).items()}}
        | {"total": sum(by_stage(stage, its).values(), Formula()).bytes(params, ranks)}
        for stage in range(4)
    ]
    data = {"what": "memory", "params": params, "ranks": ranks, "convention": its.name, "stages": stages}
    return [zero_table(params, ranks, convention=its)], data, lambda: draw_zero(params, ranks, convention=its)


def _traffic(model: str | None, config: str | None, mesh: str, zero: int | None) -> Drawn:
    if model is None:
        raise CommandError("OF: name a model, as for functional-ds plan")
    sizes = mesh_sizes(mesh)
    times = 2 * sizes["pp"] if sizes["pp"] > 1 and not config else None
    job = candidate(with_config(job_of(model), config), sizes, stage=zero, accumulate=times)
    count, name = job.world_size, name_of(job)
    if count > _MOST:
        raise CommandError(f"--mesh: a picture has room for {_MOST} ranks; functional-ds plan takes any number")
    books: list[Ledger] = sent_by_all(planned(job), job)
    by_axis = traffic(books)
    total = {axis: float(sent.sum()) for axis, sent in by_axis.items()}
    data = {
        "what": "traffic",
        "model": model,
        "candidate": name,
        "bytes": {axis: sent.tolist() for axis, sent in by_axis.items()},
    }
    rows = [(axis, f"{int(size / count):,}", f"{int(size):,}") for axis, size in total.items()]
    page: list[OutputTable | str] = [OutputTable(name, ("axis", "bytes a rank", "bytes of all"), rows)]
    return page, data, lambda: draw_traffic(books, title=name)


# -- Chrome traces -----------------------------------------------------------------------------------------------------


_TRACE = 1 << 30  # bytes of a trace


def _trace(name: str | None) -> Drawn:
    if not name:
        raise CommandError("OF: name a trace.json, as a profile writes it")
    try:
        content = parse_json(read_text(existing(name, option="OF"), limit=_TRACE))
        events = content["traceEvents"] if isinstance(content, dict) else content
        slices = [
            (int(event["pid"]), str(event.get("tid", "")), str(event["name"]), float(event["ts"]), float(event["dur"]))
            for event in events
            if event.get("ph") == "X"
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CommandError(f"OF: {name} is not a Chrome trace: {type(error).__name__} {error}") from error
    if not slices:
        raise CommandError(f"OF: {name} has no slices")
    sums: dict[tuple[int, str], list[float]] = defaultdict(list)
    for process, _, label, _, length in slices:
        sums[process, label].append(length / 1e6)
    totals = sorted(sums.items(), key=lambda pair: (pair[0][0], -sum(pair[1])))
    data = {
        "what": "trace",
        "file": name,
        "slices": [{"rank": rank, "name": label, "calls": len(t), "seconds": sum(t)} for (rank, label), t in totals],
    }
    rows = [(str(rank), label, str(len(times)), seconds_of(sum(times))) for (rank, label), times in totals]
    return [OutputTable(name, ("rank", "name", "calls", "time"), rows)], data, lambda: _gantt(slices, name)


def _gantt(slices: list[tuple[int, str, str, float, float]], title: str) -> Any:
    from matplotlib.figure import Figure

    lanes = list(dict.fromkeys((process, thread) for process, thread, *_ in sorted(slices, key=lambda s: s[:2])))
    names = list(dict.fromkeys(label for _, _, label, *_ in slices))
    first = min(start for *_, start, _ in slices)
    figure = Figure(figsize=(12, 1.2 + 0.45 * len(lanes)), layout="constrained")
    axes = figure.subplots()
    for place, lane in enumerate(lanes):
        for number, name in enumerate(names):
            bars = [((s - first) / 1e3, d / 1e3) for p, t, label, s, d in slices if (p, t) == lane and label == name]
            if bars:
                axes.broken_barh(bars, (place - 0.4, 0.8), facecolor=f"C{number % 10}", edgecolor="white", linewidth=0.2)
    axes.set(ylim=(len(lanes) - 0.4, -0.6), xlabel="ms", title=title)
    axes.set_yticks(range(len(lanes)), [f"rank {process}, {thread}" for process, thread in lanes], fontsize=8)
    return figure
