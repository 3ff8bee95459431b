"""The recipes of docs/fitting.md on real clusters of one machine: a rank is killed, the job is run again and resumes.

Part of ``make faults``; skipped, with the reason, where a cluster's programs are not installed.
"""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from functional_ds import comm
from functional_ds.testing import assert_same
from tests.fitting import programs, resumed, slurm

WAIT = 150  # seconds: a cluster that starts workers on a busy machine
PAGE = Path(__file__).parents[2] / "docs" / "fitting.md"

pytestmark = [
    pytest.mark.skipif("FUNCTIONAL_DS_KILLS" not in os.environ, reason="a part of make faults"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = comm.simulate(programs.undisturbed, world_size=2)[0]
    return found


def recipe(heading: str) -> str:
    """The first block of code below a heading of the page."""
    section = PAGE.read_text().split(f"\n### {heading}\n")[1]
    return re.search(r"```text\n(.*?)```", section, re.DOTALL)[1]  # type: ignore[index]


def kill_a_rank(folder: Path, rank: int) -> None:
    """SIGKILL, once there is a checkpoint."""
    deadline = time.monotonic() + WAIT
    while not any(Path(folder, "checkpoints").glob("step-*")):
        assert time.monotonic() < deadline, f"no checkpoint after {WAIT} s"
        time.sleep(0.02)
    os.kill(int(Path(folder, f"pid-{rank}").read_text()), signal.SIGKILL)


# -- SLURM ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[slurm.Slurm]:
    if (reason := slurm.why_not()) is not None:
        pytest.skip(reason)
    (tmp_path / "slurm").mkdir()
    with slurm.started(tmp_path / "slurm") as found:
        yield found


def script(tmp_path: Path) -> Path:
    """The page's script for two nodes without GPUs and one rank on each."""
    text = recipe("SLURM").replace("--nodes=4", "--nodes=2").replace("--nproc-per-node 8", "--nproc-per-node 1")
    text = re.sub(r"#SBATCH --(gpus-per-node|cpus-per-task).*\n", "", text)
    text = text.replace("srun ", f'export PATH="{Path(sys.executable).parent}:$PATH" GLOO_SOCKET_IFNAME=lo\nsrun ')
    text = text.replace("torchrun ", f"{sys.executable} -m torch.distributed.run ")
    assert text.count("train.py") == 1
    found = tmp_path / "job.sh"
    found.write_text(text.replace("train.py", f"{resumed.__file__} {tmp_path}"))
    return found


def test_slurm(cluster: slurm.Slurm, tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    """A killed rank ends the job on both nodes; the same script, submitted again, resumes, and ends bitwise as undisturbed."""
    job = cluster.submit(script(tmp_path))
    kill_a_rank(tmp_path, 1)
    assert cluster.ended(job, WAIT) == "FAILED"
    assert not (tmp_path / "params").exists()
    again = cluster.submit(script(tmp_path))
    assert cluster.ended(again, WAIT) == "COMPLETED", (tmp_path / "job.out").read_text()
    assert_same(torch.load(tmp_path / "params"), expected)


# -- Ray -----------------------------------------------------------------------------------------------------------------


def test_ray(tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    """Ray Train starts the workers again after one was killed, and they resume."""
    if find_spec("ray") is None:
        pytest.skip("Ray is not installed (the extra clusters)")
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent(f"""
        import ray
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchTrainer

        def loop(config):
            import os, sys
            sys.path.insert(0, {str(Path(__file__).parents[2])!r})
            from pathlib import Path
            from functional_ds import comm
            from tests.fitting import programs

            comm.init_distributed()
            Path(config["folder"], f"pid-{{comm.world().rank}}").write_text(str(os.getpid()))
            programs.trained(config["folder"], milliseconds=50)

        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=True)
        config = RunConfig(storage_path={str(tmp_path / "ray")!r}, failure_config=FailureConfig(max_failures=1))
        scaling = ScalingConfig(num_workers=2)
        TorchTrainer(loop, train_loop_config={{"folder": {str(tmp_path)!r}}}, scaling_config=scaling, run_config=config).fit()
    """)
    )
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen([sys.executable, str(program)], env=environment, stdout=said, stderr=said)
        try:
            kill_a_rank(tmp_path, 1)
            assert process.wait(200) == 0, (tmp_path / "said").read_text()[-4000:]
        finally:
            process.kill()
            process.wait()
    assert_same(torch.load(tmp_path / "params"), expected)
