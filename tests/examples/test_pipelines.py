"""The pipeline examples: the losses are those of one device, whatever the schedule, and the picture is there."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from functional_ds import pipelining as pp

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import pipeline_gpt

FOLDER = Path(pipeline_gpt.__file__).parent
TINY = "--layers 4 --width 16 --context 8 --batch 8 --steps 3 --lr 0.01 --simulate"


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    data = tmp_path / "text.txt"
    data.write_text("".join(f"{i} times {i} is {i * i}; " for i in range(300)))
    return [*TINY.split(), "--data", str(data), "--out", str(tmp_path)]


def losses(capsys: pytest.CaptureFixture[str], *flags: str) -> list[float]:
    assert pipeline_gpt.main(flags) == 0
    return [float(found) for found in re.findall(r"loss ([0-9.]+)", capsys.readouterr().out)]


def test_any_schedule_gives_the_same_losses(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = losses(capsys, *flags)
    assert len(expected) == 3
    assert (tmp_path / "pipeline.svg").read_text().count("predicted") >= 1
    assert losses(capsys, *flags, "--stages", "4", "--schedule", "zbv") == pytest.approx(expected, abs=2e-4)
    pp.to_csv(pp.lower(pp.gpipe(2, 2)), tmp_path / "mine.csv")
    mine = ["--dp", "2", "--zero", "3", "--microbatches", "2", "--schedule", str(tmp_path / "mine.csv")]
    assert losses(capsys, *flags, *mine) == pytest.approx(expected, abs=2e-4)


def test_flags_that_do_not_fit(flags: list[str]) -> None:
    with pytest.raises(SystemExit, match="--stages 3: zbv puts 2 on each rank"):
        pipeline_gpt.main([*flags, "--stages", "3", "--schedule", "zbv"])
    with pytest.raises(SystemExit, match="--batch 8 has to divide"):
        pipeline_gpt.main([*flags, "--microbatches", "16"])


def test_a_schedule_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    """Fewer bubbles than 1F1B where messages take time, and the losses of one device."""
    runpy.run_path(str(FOLDER / "new_schedule.py"))
    shown = capsys.readouterr().out
    ours, plain = (float(re.search(rf"^{name}: makespan ([0-9.]+)", shown, re.M)[1]) for name in ("patient 1F1B", "1F1B"))  # type: ignore[index]
    assert ours < plain
    piped, alone = re.findall(r"^losses .*: +(.*)$", shown, re.M)
    assert [float(x) for x in piped.split()] == pytest.approx([float(x) for x in alone.split()], abs=2e-6)
