"""The tables of docs/benchmarks.md about two hosts, from the file of ``hosts.py``: ``python benchmarks/hosts_tables.py``."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RATES = ("10gbit", "1gbit", "100mbit")
Cells = dict[str, list[str]]


def rows_of(found: Mapping[str, Any]) -> dict[tuple[str, int, str], dict[str, Any]]:
    """The rows by contender, ranks a host and rate; of several runs that have one, the first run's."""
    runs = reversed([found, *found.get("added", [])])
    return {(row["contender"], row["ranks_per_host"], row["rate"]): row for run in runs for row in run["rows"]}


def rates_of(found: Mapping[str, Any]) -> list[str]:
    """The rates with rows, the fastest first."""
    return [rate for rate in RATES if any(rate == key[-1] for key in rows_of(found))]


def measured(found: Mapping[str, Any]) -> Cells:
    """MB, and milliseconds by rate, for one and two ranks a host."""
    rows, rates, cells = rows_of(found), rates_of(found), Cells()
    for name in _names(found):
        cells[name] = []
        for per_host in (1, 2):
            mine = [rows.get((name, per_host, rate)) for rate in rates]
            of_link = next(filter(None, [rows.get((name, per_host, "1gbit")), *mine]), None)
            megabytes = f"{of_link['sent_mb']:.1f}" if of_link else "-"
            cells[name] += [megabytes, *(f"{row['median_ms']:.0f}" if row else "-" for row in mine)]
    return cells


def ratios(found: Mapping[str, Any], key: str) -> dict[tuple[str, int, str], float]:
    """Predicted over measured time, by ``plan_ms`` or ``graph_ms``."""
    return {place: row[key] / row["median_ms"] for place, row in rows_of(found).items() if key in row}


def predicted(found: Mapping[str, Any]) -> Cells:
    """Predicted over measured time by plan and by graph, by rate, for one and two ranks a host."""
    by_way = [ratios(found, key) for key in ("plan_ms", "graph_ms")]
    names = [name for name in _names(found) if any(name == place[0] for place in by_way[0])]
    rates = [rate for rate in rates_of(found) if any(rate == place[-1] for place in by_way[0])]
    places = {name: [(name, per_host, rate) for per_host in (1, 2) for rate in rates] for name in names}
    return {name: [f"{way[at]:.2f}" if at in way else "-" for at in places[name] for way in by_way] for name in names}


def _names(found: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["contender"] for run in (found, *found.get("added", [])) for row in run["rows"]))


if __name__ == "__main__":
    known = json.loads((Path(__file__).parent / "results/hosts.json").read_text(encoding="utf-8"))
    for table in (measured(known), predicted(known)):
        print("\n".join(f"| {name} | {' | '.join(cells)} |" for name, cells in table.items()), end="\n\n")
    for key in ("plan_ms", "graph_ms"):
        values = ratios(known, key).values()
        print(f"{key}: {sum(abs(x - 1) <= 0.15 for x in values)} of {len(values)} are within 15 %")
