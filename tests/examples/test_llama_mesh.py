"""The Llama example: on two meshes, with a checkpoint in between, it has one device's losses."""

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import llama_mesh

TINY = "--width 16 --context 16 --batch 4 --steps 1 --simulate"


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    data = tmp_path / "text.txt"
    data.write_text("".join(f"{i} times {i} is {i * i}; " for i in range(300)))
    return [*TINY.split(), "--data", str(data)]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("first", "then"),
    [("dp=2,sp=2,tp=2", "pp=2,tp=2"), ("pp=2,tp=2", "dp=4,tp=2"), ("sp=4", ""), ("pp=2,sp=2", "dp=2,sp=2")],
    ids=str,
)
def test_losses_of_one_device(flags: list[str], first: str, then: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert llama_mesh.main([*flags, "--first", first, "--then", then]) == 0
    out = capsys.readouterr().out
    found = [(float(ours), float(alone)) for ours, alone in re.findall(r"loss ([0-9.]+), one device ([0-9.]+)", out)]
    assert len(found) == 2
    assert all(ours == pytest.approx(alone, abs=2e-4) for ours, alone in found)
    assert re.search(r"differ from one device's by [0-9.]+e-0[4-9] at most|by 0.0e\+00 at most", out)


def test_meshes_that_do_not_fit(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="--batch 4 gives no whole rows, or too few micro-batches, on dp=8"):
        llama_mesh.main([*flags, "--first", "dp=8"])
    with pytest.raises(SystemExit):
        llama_mesh.main([*flags, "--first", "ep=2"])
    assert "write dp=2,sp=2,tp=2" in capsys.readouterr().err
