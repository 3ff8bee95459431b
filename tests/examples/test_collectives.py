"""The tour: wherever the ranks run they find what one device finds, and what goes wrong is said."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from functional_ds import comm, tree

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import collectives

SCRIPT = Path(collectives.__file__)
STOPS = [stop.ranks.__name__ for stop in collectives.TOUR]


@pytest.fixture(autouse=True)
def outside_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


def verdicts(shown: str) -> dict[str, str]:
    """What is said of each stop, which must be said once."""
    lines = [line for line in shown.splitlines() if line.partition(" ")[0] in STOPS]
    assert [line.split()[0] for line in lines] == STOPS
    return {line.split()[0]: line.split()[1] for line in lines}


def assert_good(shown: str, ranks: int) -> None:
    assert shown.startswith(f"{ranks} ranks, each with a tensor of [{4 * ranks}, 6]")
    assert set(verdicts(shown).values()) <= {"equal", "±"}
    assert "deadlock: no rank can proceed" in shown
    assert "rank 1 waits in recv(src=0)" in shown


# -- wherever the ranks run --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4, 7])
@pytest.mark.parametrize("seed", [0, 1])
def test_simulated(ranks: int, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert collectives.main(["--ranks", str(ranks), "--seed", str(seed)]) == 0
    assert_good(capsys.readouterr().out, ranks)


@pytest.mark.usefixtures("new_interpreters")
def test_processes_say_what_simulated_ranks_say(capfd: pytest.CaptureFixture[str]) -> None:
    """Also the bytes; and only rank 0 speaks."""
    assert collectives.main(["--ranks", "2", "--world", "simulate"]) == 0
    simulated = capfd.readouterr().out
    assert collectives.main(["--ranks", "2", "--world", "spawn"]) == 0
    assert capfd.readouterr().out == simulated
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(launch, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == simulated
    assert_good(simulated, 2)


def test_bytes_are_the_volumes(capsys: pytest.CaptureFixture[str]) -> None:
    """Of 4 ranks with 384 bytes each: 2 (n - 1) / n of it for an all_reduce, from each."""
    collectives.main([])
    sent = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.partition(" ")[0] in STOPS}
    assert "2,304" in sent["sums"]
    assert " 24 " in sent["normalise"]
    assert "1,440" in sent["memory"]  # 3/4 of the value scattered, 3 values broadcast


# -- what goes wrong ---------------------------------------------------------------------------------------------------

USED = {
    "all_reduce": {"sums", "groups", "softmax", "normalise", "weigh"},
    "reduce_scatter": {"gathers"},
    "all_gather": {"gathers"},
    "recv": {"pipeline", "overlap"},
    "scatter": {"memory"},
    "broadcast": {"memory"},
    "all_to_all": {"experts"},
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("error", [1.0, float("nan")])
@pytest.mark.parametrize("name", USED)
def test_a_wrong_result_on_one_rank_is_found(
    name: str, error: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By all ranks, at the stops that use the collective, and at no other."""
    right = getattr(comm, name)

    def spoil(x: torch.Tensor) -> torch.Tensor:
        return x + error if x.is_floating_point() and comm.world().rank == 3 else x

    @comm.table.collective
    def wrong(*args: Any, **kwargs: Any) -> Any:
        return comm.table.prepare(right, *args, **kwargs).then(lambda result: tree.map(spoil, result))

    monkeypatch.setattr(comm, name, wrong)
    assert comm.simulate(collectives.tour, 0, world_size=4) == [False] * 4
    assert collectives.main([]) == 1
    shown = capsys.readouterr().out
    found = verdicts(shown[shown.rindex("4 ranks, each") :])
    assert {stop for stop, verdict in found.items() if verdict == "WRONG"} == USED[name]


def test_another_shape_is_wrong() -> None:
    """It would broadcast to a difference of zero."""
    assert collectives.distance(torch.zeros(1), torch.zeros(2)) == float("inf")


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ("--ranks 1", "--ranks 1: it takes two"),
        ("--ranks 0", "--ranks 0"),
        ("--ranks many", "--ranks"),
        ("--world moon", "--world"),
        ("--seed -1", "--seed -1 must be at least 0"),
        (f"--seed {2**63}", "below 2**63"),
        ("--unheard-of", "--unheard-of"),
    ],
)
def test_bad_flags_are_refused(bad: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        collectives.main(bad.split())
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("bad", ["--ranks 2", "--world spawn"])
def test_ranks_are_torchruns_under_torchrun(
    bad: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit, match="2"):
        collectives.main(bad.split())
    assert "torchrun has started the ranks" in capsys.readouterr().err
