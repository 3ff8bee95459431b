"""The mixture example: losses and loads do not depend on where the experts lie; balancing evens the load."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import mixture

TINY = "--width 16 --inner 8 --context 16 --batch 8 --layers 1 --experts 4 --every 3 --simulate"


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    data = tmp_path / "text.txt"
    data.write_text("".join(f"{i} times {i} is {i * i}; " for i in range(300)))
    return [*TINY.split(), "--data", str(data), "--out", str(tmp_path)]


def shown(capsys: pytest.CaptureFixture[str], *flags: str) -> list[float]:
    """The losses on held-out text and the loads of the fullest experts."""
    assert mixture.main(flags) == 0
    return [float(x) for pair in re.findall(r"loss ([0-9.]+), fullest expert ([0-9.]+)", capsys.readouterr().out) for x in pair]


def test_wherever_the_experts_lie(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags += ["--steps", "4", "--every", "2", "--balance", "loss", "bias"]
    alone = shown(capsys, *flags, "--ranks", "1")
    assert len(alone) == 2 * 2 * 2  # two ways, twice, a loss and a load
    assert (tmp_path / "mixture.svg").stat().st_size > 0
    for others in (["--ranks", "2"], ["--ranks", "4", "--ep", "2", "--zero", "3"]):
        assert shown(capsys, *flags, *others) == pytest.approx(alone, abs=0.02)


def test_balancing_evens_the_load(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    more: Any = ["--steps", "16", "--every", "16", "--ranks", "1", "--weight", "1", "--rate", "0.05"]
    _, none, _, by_loss, _, by_bias = shown(capsys, *flags, *more)
    assert by_loss < none
    assert by_bias < none


def test_flags_that_do_not_fit(flags: list[str]) -> None:
    with pytest.raises(SystemExit, match="--ranks 3 has to divide by --ep 2"):
        mixture.main([*flags, "--ranks", "3", "--ep", "2"])
