"""Two hosts under torchrun. One is cut off: the other ends with an error that says so, and both go on later. The link between
them is down for seconds, or slow: they go on."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from functional_ds import comm
from functional_ds.testing import assert_same
from tests.fitting import hosts, programs, slow

PATIENCE = 150  # seconds
PORT = "29611"
FAULTS = "FUNCTIONAL_DS_KILLS" in os.environ or os.environ.get("HYPOTHESIS_PROFILE") == "laws"


@contextmanager
def trained(pair: hosts.Hosts, folder: Path, milliseconds: int, seconds: int = 10) -> Iterator[list[subprocess.Popen[str]]]:
    """A run on both hosts; its processes are gone after the block."""
    running: list[subprocess.Popen[str]] = []
    try:
        running += [started(pair, host, folder, milliseconds, seconds) for host in (0, 1)]
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()


def started(pair: hosts.Hosts, host: int, folder: Path, milliseconds: int, seconds: int) -> subprocess.Popen[str]:
    """torchrun on a host, with one rank."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(host), "--nproc-per-node", "1"]
    launch += ["--master-addr", pair.addresses[0], "--master-port", PORT]
    words = pair.command(host, [*launch, slow.__file__, str(folder), str(milliseconds), str(seconds)])
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
        with trained(pair, tmp_path, 50) as running:
            wait_for_checkpoints(tmp_path, running, 2)
            pair.cut()
            told = [process.communicate(timeout=PATIENCE)[1] for process in running]
        assert all(process.returncode not in (0, None) for process in running)
        assert not (tmp_path / "params").exists()
        assert "rank 1 died, is stopped, or cannot be reached" in told[0], told[0]
        assert "rank 0, for" in told[0]
        assert "the store that torchrun holds at 10.77.0.1" in told[1], told[1]
        assert "rank 1, for" in told[1]
        pair.mend()
        with trained(pair, tmp_path, 0) as again:
            said = [process.communicate(timeout=PATIENCE)[1] for process in again]
        assert [process.returncode for process in again] == [0, 0], said
    assert_same(torch.load(tmp_path / "params"), comm.simulate(programs.undisturbed, world_size=2)[0])


def down_for_seconds(pair: hosts.Hosts) -> None:
    pair.cut()
    time.sleep(5)
    pair.mend()


def slow_on_one_side(pair: hosts.Hosts) -> None:
    """A hundredth of what the other side sends at."""
    pair.limit(1, "1mbit")


@pytest.mark.skipif(not FAULTS, reason="half a minute of torchrun: `make faults` and `make laws` run it")
@pytest.mark.law(37)
@pytest.mark.parametrize("fault", [down_for_seconds, slow_on_one_side])
def test_a_link_that_is_worse_for_a_while(tmp_path: Path, fault: Callable[[hosts.Hosts], None]) -> None:
    """Down for five seconds, or a hundred times slower on one side: nobody ends, and the run comes to what it would have."""
    reason = hosts.why_not()
    if reason is not None:
        pytest.skip(reason)
    with hosts.joined() as pair:
        for host in (0, 1):
            pair.limit(host, "100mbit")
        with trained(pair, tmp_path, 50, seconds=60) as running:
            wait_for_checkpoints(tmp_path, running, 2)
            assert not (tmp_path / "params").exists()
            fault(pair)
            said = [process.communicate(timeout=PATIENCE)[1] for process in running]
        assert [process.returncode for process in running] == [0, 0], said
    assert_same(torch.load(tmp_path / "params"), comm.simulate(programs.undisturbed, world_size=2)[0])


def wait_for_checkpoints(folder: Path, running: list[subprocess.Popen[str]], count: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while len([*folder.glob("checkpoints/step-*")]) < count:
        for process in running:
            assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
