"""Two hosts under torchrun, one of which is cut off: the other ends with an error that says so, and both go on later."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from functional_ds import comm
from functional_ds.testing import assert_same
from tests.fitting import hosts, programs, slow

PATIENCE = 150  # seconds
PORT = "29611"
FAULTS = "FUNCTIONAL_DS_KILLS" in os.environ or os.environ.get("HYPOTHESIS_PROFILE") == "laws"


def started(pair: hosts.Hosts, host: int, folder: Path, milliseconds: int) -> subprocess.Popen[str]:
    """torchrun on a host, with one rank."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(host), "--nproc-per-node", "1"]
    launch += ["--master-addr", pair.addresses[0], "--master-port", PORT]
    words = pair.command(host, [*launch, slow.__file__, str(folder), str(milliseconds)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "cable"}
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.skipif(not FAULTS, reason="half a minute of torchrun: `make faults` and `make laws` run it")
@pytest.mark.law(37)
def test_a_host_that_is_cut_off(tmp_path: Path) -> None:
    """Each side is ended with a report that names the other; started again, both come to what an undisturbed run does."""
    reason = hosts.why_not()
    if reason is not None:
        pytest.skip(reason)
    with hosts.joined() as pair:
        running = [started(pair, host, tmp_path, 50) for host in (0, 1)]
        try:
            wait_for_checkpoints(tmp_path, running, 2)
            pair.cut()
            told = [process.communicate(timeout=PATIENCE)[1] for process in running]
        finally:
            for process in running:
                process.kill()
                process.wait()
        assert all(process.returncode not in (0, None) for process in running)
        assert not (tmp_path / "params").exists()
        assert "rank 1 died, is stopped, or cannot be reached" in told[0], told[0]
        assert "rank 0, for" in told[0]
        assert "the store that torchrun holds at 10.77.0.1" in told[1], told[1]
        assert "rank 1, for" in told[1]
        pair.mend()
        again = [started(pair, host, tmp_path, 0) for host in (0, 1)]
        try:
            said = [process.communicate(timeout=PATIENCE)[1] for process in again]
        finally:
            for process in again:
                process.kill()
                process.wait()
        assert [process.returncode for process in again] == [0, 0], said
    assert_same(torch.load(tmp_path / "params"), comm.simulate(programs.undisturbed, world_size=2)[0])


def wait_for_checkpoints(folder: Path, running: list[subprocess.Popen[str]], count: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while len([*folder.glob("checkpoints/step-*")]) < count:
        for process in running:
            assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
