"""Contenders that take turns in the processes of one run, and the figures of such a run."""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from functional_ds import comm

Found = Mapping[str, Tensor]
WARM_UP = 2  # turns that do not count


def seconds(passes: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """How long each contender's pass takes in each round, on the slowest rank; a barrier comes before each."""
    times: dict[str, list[float]] = {name: [] for name in passes}
    order = list(passes)
    for turn in range(rounds + WARM_UP):
        for who in order[turn % len(order) :] + order[: turn % len(order)]:
            comm.barrier()
            begin = time.perf_counter()
            passes[who]()
            spent = comm.all_reduce(torch.tensor(time.perf_counter() - begin), op="max").item()
            if turn >= WARM_UP:
                times[who].append(spent)
    return times


def difference(found: Found, expected: Found) -> float:
    """The largest difference of a leaf on any rank, relative to its largest element."""
    if found.keys() != expected.keys():
        raise ValueError(f"{sorted(found)} are not {sorted(expected)}")
    gaps = [float((found[name] - value).abs().max() / value.abs().max().clamp(min=1e-12)) for name, value in expected.items()]
    return comm.all_reduce(torch.tensor(max(gaps)), op="max").item()


def compared(times: Mapping[str, list[float]], other: str) -> dict[str, Any]:
    """The ratio of medians of ours to another, the ratios within rounds, and the seconds."""
    mine, theirs = times["ours"], times[other]
    return {
        "ratio": statistics.median(mine) / statistics.median(theirs),
        "of_rounds": [a / b for a, b in zip(mine, theirs, strict=True)],
        "seconds": {"ours": mine, other: theirs},
    }


def shown(label: str, row: Mapping[str, Any], target: float | None = None) -> str:
    """A row as text."""
    (_, mine), (name, theirs) = ((who, statistics.median(found) * 1e3) for who, found in row["seconds"].items())
    low, high = min(row["of_rounds"]), max(row["of_rounds"])
    wanted = "" if target is None else f"target {target}; "
    return (
        f"{label:<12} ours {mine:8.1f} ms   {name:<12} {theirs:8.1f} ms   ratio {row['ratio']:.3f} "
        f"({wanted}rounds {low:.2f} to {high:.2f})   differ by {row['difference']:.1e}"
    )


def run(measure: Callable[[argparse.Namespace], list[dict[str, Any]]], flags: argparse.Namespace, name: str) -> list[Any]:
    """Runs ``measure`` on ``flags.ranks`` processes and writes the rows of rank 0 to a file in ``flags.out``."""
    load = os.getloadavg()[0]
    rows = comm.spawn(measure, flags, world_size=flags.ranks, backend="gloo")[0]
    machine = {"cores": os.cpu_count(), "torch": torch.__version__, "machine": platform.machine(), "load": load}
    kept = {flag: value for flag, value in vars(flags).items() if flag != "out"}
    flags.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": machine, "flags": kept, "rows": rows}, indent=1)
    (flags.out / f"{name}-{flags.ranks}-ranks.json").write_text(text + "\n")
    return rows


def verdict(wrong: list[str], tolerance: float) -> int:
    """The exit code: 1 where results differ."""
    if wrong:
        print(f"results differ by more than {tolerance}: {', '.join(wrong)}")
    return 1 if wrong else 0
