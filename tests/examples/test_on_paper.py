"""The example on paper: what it predicts of a rank is what the rank's step without values has; meshes, pictures, refusals."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import on_paper


def test_what_is_predicted_is_executed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"--layers 2 --ranks 16 --rows 16 --most 16 --shown 3 --out {tmp_path}"
    assert on_paper.main(flags.split()) == 0
    said = capsys.readouterr().out
    rows = re.findall(r"^([\w ]+?) +([\d,]+) +([\d,]+) +[+-][\d.]+%$", said, re.MULTILINE)
    found = {name: [int(each.replace(",", "")) for each in numbers] for name, *numbers in rows}
    assert found.keys() == {"params bytes", "masters bytes", "optimizer bytes", "tp elements sent", "dp elements sent", "FLOPs"}
    for predicted, executed in found.values():
        assert 0 <= executed - predicted < 1000  # step counts; the loss
    assert {path.name for path in tmp_path.iterdir()} == {"meshes.png", "ranks.png", "memory.png"}


def test_seventy_billion_on_a_thousand_ranks() -> None:
    """The model is Llama's, and the fastest mesh of a few fits."""
    model, machine = on_paper.LLAMA_70B, on_paper.MACHINES["h100"]
    assert model.parameters == 68_976_648_192
    best = on_paper.ranked(model, 8192, 1024, machine)
    assert best[0].fits
    assert best[0].step_seconds == min(run.step_seconds for run in best)
    assert all(run.plan.ranks == 8192 and run.plan.rows == 1024 for run in best)


def test_too_few_ranks(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--ranks 2 --rows 1024: no mesh of these fits H100 SXM 80 GB"):
        on_paper.main(["--ranks", "2", "--out", str(tmp_path)])
