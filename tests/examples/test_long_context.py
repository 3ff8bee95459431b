"""The long-context example: one device's losses in every way, bytes that are the formulas', and pictures."""

import re
import sys
from pathlib import Path

import pytest

from functional_ds import comm

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import long_context


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    data = tmp_path / "text.txt"
    data.write_text("".join(f"{i} times {i} is {i * i}; " for i in range(300)))
    tiny = "--context 32 --batch 1 --steps 2 --tiles 3 --simulate --lengths 32"
    return [*tiny.split(), "--data", str(data), "--out", str(tmp_path)]


def losses(capsys: pytest.CaptureFixture[str], *flags: str) -> list[float]:
    assert long_context.main(flags) == 0
    return [float(found) for found in re.findall(r"loss ([0-9.]+)", capsys.readouterr().out)]


def test_every_way_gives_the_losses_of_one_device(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = losses(capsys, *flags, "--ranks", "1")
    assert len(expected) == 3
    for way in long_context.LAYOUTS:
        assert losses(capsys, *flags, "--ranks", "4", "--way", way) == pytest.approx(expected, abs=2e-4)
    assert {"loss.png", "length.png"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("way", long_context.LAYOUTS)
def test_what_is_sent_is_the_formula(way: str) -> None:
    for found in comm.simulate(long_context.cost, way, 64, 2, world_size=4):
        assert found.sent == long_context.predicted(way, 64, 4)


def test_flags_that_do_not_fit(flags: list[str]) -> None:
    with pytest.raises(SystemExit, match="--ranks has to be a multiple of 2, and --context one of 6"):
        long_context.main([*flags, "--way", "both", "--ranks", "3"])
