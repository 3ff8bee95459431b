"""The kill test: a rank is killed at a random moment of training or saving, and the end is that of an undisturbed run.

A few runs here; ``make faults`` makes fifty under torchrun.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from functional_ds import comm
from functional_ds.testing import assert_same
from tests.fitting import killed, programs
from tests.fitting.ranks import Ranks

RUNS = int(os.environ.get("FUNCTIONAL_DS_KILLS", os.environ.get("HYPOTHESIS_PROFILE") == "laws"))  # under torchrun
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = comm.simulate(programs.undisturbed, world_size=2)[0]
    return found


@pytest.mark.law(37)
@pytest.mark.parametrize("seed", range(3))
def test_started_again_after_a_kill(seed: int, tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    """Bitwise; the one that is left ends by itself."""
    drawn = random.Random(seed)
    ranks = Ranks.start(programs.trained, str(tmp_path), 5, world_size=2, folder=tmp_path)
    try:
        if seed:
            ranks.wait_for("checkpoints")
        time.sleep(drawn.uniform(0, 0.8))
        victim = drawn.randrange(2)
        ranks.send(victim, signal.SIGKILL)
        assert ranks.code(victim) == -signal.SIGKILL
        assert ranks.code(1 - victim) not in (0, None)
    finally:
        ranks.end()
    again = Ranks.start(programs.trained, str(tmp_path), world_size=2, folder=tmp_path)
    try:
        assert [again.code(rank) for rank in (0, 1)] == [0, 0], again.said(0) + again.said(1)
    finally:
        again.end()
    assert_same(torch.load(tmp_path / "params"), expected)


@pytest.mark.law(37)
@pytest.mark.parametrize("seed", range(RUNS))
def test_torchrun_starts_again_what_was_killed(seed: int, tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    """Bitwise, and torchrun ends well, with a rank killed in the first attempt, of each fifth run in the second, too."""
    words = [*TORCHRUN, killed.__file__, str(tmp_path), str(seed), "2" if seed % 5 == 0 else "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert_same(torch.load(tmp_path / "params"), expected)
    killings = sorted(path.read_text() for path in tmp_path.glob("killed-*"))
    assert killings
    print(f"seed {seed}: killed {len(killings)} times: {killings}")
