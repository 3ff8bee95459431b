"""The benchmark of collectives runs, compares like with like, and writes what it says."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from matplotlib.image import imread

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PATIENCE = 120  # seconds


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("bench_comm", BENCHMARKS / "comm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_comm", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.sample(0)
def test_quick_run_is_complete(tmp_path: Path, bench: ModuleType) -> None:
    flags = ["--quick", "--sizes", "4", "1kB", "--rounds", "1", "--out", str(tmp_path)]
    command = [sys.executable, str(BENCHMARKS / "comm.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no warnings of torch's old names
    assert sorted(path.name for path in tmp_path.iterdir()) == ["comm-2-ranks.json", "comm-2-ranks.png"]
    assert imread(tmp_path / "comm-2-ranks.png").std() > 0
    found = json.loads((tmp_path / "comm-2-ranks.json").read_text())
    assert {contest["collective"] for contest in found["contests"]} == set(bench.CONTESTS)
    assert all(seconds > 0 for contest in found["contests"] for seconds in contest["ours"]["seconds"])
    assert {"cores", "load"} <= found["machine"].keys()
    assert "ring on shapes" in done.stdout


def test_another_result_is_refused(bench: ModuleType) -> None:
    bench.check("sum", torch.ones(2), torch.ones(2))
    for theirs in (torch.zeros(2), torch.ones(1), None):
        with pytest.raises(ValueError, match="sum: ours gives"):
            bench.check("sum", torch.ones(2), theirs)


def test_bandwidths_are_the_ledgers(bench: ModuleType) -> None:
    """Of 4 ranks: 2 (n - 1) / n for an all_reduce, (n - 1) / n for a gather, two messages there and back."""
    timed = {name: bench.Timed(name, 1000, [2.0], [1.0]) for name in bench.CONTESTS}
    assert bench.bandwidths(timed["all_reduce"], 2.0, 4) == (500.0, 750.0)
    assert bench.bandwidths(timed["all_gather"], 2.0, 4) == (500.0, 375.0)
    assert bench.bandwidths(timed["send_recv"], 2.0, 4) == (1000.0, 1000.0)
    assert bench.bandwidths(timed["barrier"], 2.0, 4) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("bad", "complaint"), [("--ranks 1", "it takes two"), ("--sizes 0MB", "less than a byte"), ("--only x", "x")]
)
def test_bad_flags_are_refused(bench: ModuleType, bad: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.parse(bad.split())
    assert complaint in capsys.readouterr().err
