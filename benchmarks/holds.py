"""How long ``fds.testing.holds`` takes for each method that the tests know: all laws, on two cores.

    python benchmarks/holds.py
    python benchmarks/holds.py clip "research diloco"

measures wall and CPU time, those of the started processes included, and writes ``results/holds.json``; methods that are named
replace their figures in it. Imports do not count, and a first table is thrown away. ``python -m tests.testing.table --write``
puts the seconds into docs/gallery.md and docs/laws.md. The goal: at most 30 s of wall time for a method.
"""

import argparse
import datetime
import json
import os
import platform
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from functional_ds import testing
from tests.testing.methods import METHODS

GOAL = 30.0
RESULTS = Path(__file__).parent / "results/holds.json"


def cpu() -> float:
    """Seconds of the processor so far, of this process and those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def measured(name: str) -> dict[str, Any]:
    """Seconds of a method's table, and of its laws; what differs from what the tests expect."""
    tested = METHODS[name]
    begin, used = time.perf_counter(), cpu()
    table = testing.holds(tested.make, **tested.options)
    wall, used = time.perf_counter() - begin, cpu() - used
    laws = {row.law: round(row.seconds, 3) for row in table.rows}
    other = [str(row) for row in table.rows if row.outcome != tested.outcome(row.law)]
    return {"wall": round(wall, 2), "cpu": round(used, 2), "laws": laws, "unexpected": other}


def main() -> int:
    """Prints a line a method, writes the figures; the exit code is 1 if a method takes longer than the goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("methods", nargs="*", help="names as in tests/testing/methods.py; all by default")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if unknown := [name for name in args.methods if name not in METHODS]:
        parser.error(f"there is no method {unknown[0]!r}; the methods are {', '.join(METHODS)}")
    warnings.simplefilter("ignore", UserWarning)  # on orders of composition that are tried
    old = json.loads(args.out.read_text())["methods"] if args.methods and args.out.exists() else {}
    load, rows = os.getloadavg()[0], {}
    testing.holds(METHODS["clip"].make)
    for name in args.methods or METHODS:
        rows[name] = row = measured(name)
        late = "" if row["wall"] <= GOAL else f"  MORE THAN {GOAL:g} s"
        print(f"{name:<24} {row['wall']:6.1f} s, CPU {row['cpu']:6.1f} s{late}", *row["unexpected"], sep="\n    ", flush=True)
    where = {"cores": os.cpu_count(), "torch": torch.__version__, "machine": platform.machine(), "load": load}
    found = {"date": str(datetime.datetime.now(datetime.UTC).date()), "machine": where, "goal": GOAL}
    found["methods"] = {name: row for name, row in {**old, **rows}.items() if name in METHODS}
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    walls = [row["wall"] for row in found["methods"].values()]
    print(f"{len(walls)} methods: {sum(walls):.0f} s, the longest {max(walls):.1f} s; the goal is {GOAL:g} s")
    return int(max(walls) > GOAL)


if __name__ == "__main__":
    sys.exit(main())
