"""The end of a process: none is aborted, none hangs, what was under way arrives, and a launcher finds the rank to blame.

A few starts here; ``make faults`` makes two hundred.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.ends import starts
from tests.ends.programs import ALONE, ENDS

TOTAL = int(os.environ.get("FUNCTIONAL_DS_ENDS", "0"))
EACH = -(-TOTAL // len(ENDS)) or 1  # starts of a program
FEW = (
    "zero 3, backward of rank 1",
    "a receive, and a raise",
    "received later",
    "torch's destroy, and a receive",
    "a child",
)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@cache
def ended(*names: str) -> list[dict[str, Any]]:
    """How the ranks of each start ended."""
    words = [sys.executable, starts.__file__, str(EACH), *names]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ENDS if TOTAL else FEW)
def test_processes_end(name: str) -> None:
    """Rank by rank: its exit code, and what it says."""
    end = ENDS[name]
    found = [start for start in (ended(name) if TOTAL else ended(*FEW)) if start["name"] == name]
    assert len(found) == EACH
    for start in found:
        assert start["blamed"] == end.blamed, start["said"]
        if end.blamed is None:
            assert start["codes"] == [0, 0], start["said"]
        else:
            said = start["said"][end.blamed]
            assert start["codes"][end.blamed] == end.code, said
            assert [word for word in end.said if word not in said] == []


@pytest.mark.skipif(not TOTAL, reason="a comparison, for make faults")
@pytest.mark.parametrize("name", ALONE)
def test_torch_alone(name: str) -> None:
    """Not ours to mend: its rate of aborts is printed."""
    codes = Counter(code for start in ended(name) for code in start["codes"])
    print(f"torch alone, {name}: exit codes {dict(codes)}")


RAISES = """
import sys
sys.path.insert(0, "ROOT")
from functional_ds import comm
from tests.ends import programs

comm.init_distributed("gloo")
programs.ENDS["zero 2, backward of rank 1"].program()
"""


@pytest.mark.skipif(not TOTAL, reason="starts.py watches ranks as torchrun does; that it does is for make faults")
def test_torchrun_names_the_rank_that_raised(tmp_path: Path) -> None:
    """The first failure that it observes."""
    script = tmp_path / "script.py"
    script.write_text(RAISES.replace("ROOT", str(Path(__file__).absolute().parents[2])))
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    for _ in range(EACH):
        done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 1
        _, cause = done.stderr.split("Root Cause (first observed failure):")
        assert "(local_rank: 1)" in cause
