"""SLURM on this machine for a test: a controller and two daemons, each as if it were a node. Debian's slurm-wlm is needed."""

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs

__all__ = ["Slurm", "started", "why_not"]

_NODES = "127.0.0.1", "127.0.0.2"  # names that need no entry anywhere: the whole net is the loopback device's
_CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
NodeName={nodes[0]} NodeHostname={host} NodeAddr={nodes[0]} Port={ports[1]} CPUs={cpus}
NodeName={nodes[1]} NodeHostname={host} NodeAddr={nodes[1]} Port={ports[2]} CPUs={cpus}
PartitionName=all Nodes={nodes[0]},{nodes[1]} Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Why there can be no SLURM here; None where there can."""
    missing = [name for name in ("slurmctld", "slurmd", "sbatch", "munged") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian's slurm-wlm)"
    if os.getuid() != 0:
        return "SLURM's daemons want root's rights"
    return None


@attrs.frozen
class Slurm:
    """A running cluster of two nodes.

    Attributes:
        folder: where its files are.
    """

    folder: Path

    def run(self, *words: str) -> str:
        """One of SLURM's commands; what it prints."""
        environment = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
        return subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout.strip()

    def submit(self, script: Path, *words: str) -> str:
        """A job of this script; its number."""
        output = script.with_suffix(".out")
        return self.run("sbatch", "--parsable", f"--output={output}", "--open-mode=append", str(script), *words)

    def state(self, job: str) -> str:
        """What the controller says of a job: RUNNING, FAILED, COMPLETED and the like."""
        shown = self.run("scontrol", "show", "job", job)
        return next(word for word in shown.split() if word.startswith("JobState=")).removeprefix("JobState=")

    def ended(self, job: str, seconds: float) -> str:
        """The state in which a job has ended.

        Raises:
            TimeoutError: it has not.
        """
        deadline = time.monotonic() + seconds
        while (state := self.state(job)) in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {job} is {state} after {seconds} s")
            time.sleep(0.2)
        return state


@contextmanager
def started(folder: Path) -> Iterator[Slurm]:
    """The daemons run inside the block, in this folder; jobs that are left are cancelled."""
    (folder / "munge").mkdir(mode=0o700)
    (folder / "state").mkdir()
    (folder / "munge" / "key").write_bytes(secrets.token_bytes(1024))
    (folder / "munge" / "key").chmod(0o400)
    facts = {"host": socket.gethostname(), "user": "root", "nodes": _NODES, "cpus": os.cpu_count(), "ports": _free_ports(3)}
    (folder / "slurm.conf").write_text(_CONFIG.format(folder=folder, **facts))
    munge = ["munged", "--force", "--foreground"]
    munge += [f"--{name}-file={folder}/munge/{name}" for name in ("key", "pid", "log", "seed")]
    daemons = [[*munge, f"--socket={folder}/munge/socket"], ["slurmctld", "-D"], *(["slurmd", "-D", "-N", n] for n in _NODES)]
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    running: list[subprocess.Popen[bytes]] = []
    try:
        with Path(folder, "daemons").open("wb") as output:
            for words in daemons:
                running.append(subprocess.Popen(words, env=environment, stdout=output, stderr=output))
                time.sleep(0.5)
        cluster = Slurm(folder)
        deadline = time.monotonic() + 30
        while cluster.run("sinfo", "--noheader", "--format=%T") != "idle":
            if time.monotonic() > deadline:
                raise TimeoutError((folder / "slurmctld.log").read_text()[-2000:])
            time.sleep(0.2)
        yield cluster
        cluster.run("scancel", "--partition=all")
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            process.wait(30)


def _free_ports(count: int) -> list[int]:
    """Ports that nothing listens on."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports
