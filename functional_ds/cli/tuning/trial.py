"""A short run of one candidate, in processes of its own, so that a run that dies is a result."""

import contextlib
import ctypes
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import attrs
import torch

from functional_ds import comm
from functional_ds.base.device import resident_peak_bytes, synchronize
from functional_ds.cli.planning.candidate import Candidate
from functional_ds.cli.planning.subject import subject_of
from functional_ds.memory.account import measured

from .halving import Measurement

__all__ = ["ProcessMemory", "TrialSpec", "measure", "run_rank"]

_STATUS = Path("/proc/self/status")


@attrs.frozen
class TrialSpec:
    """What a trial runs: a model's name, a candidate, and on how many ranks of which device, those of all axes together."""

    model: str
    config: dict[str, Any]
    ranks: int
    recompute: bool = False
    seq: int = 1024
    device: str = "cpu"
    steps: int = 4
    tp: int = 1
    sp: int = 1
    pp: int = 1
    ep: int = 1
    schedule: str = "one_f_one_b"

    @staticmethod
    def of(candidate: Candidate, model: str, *, seq: int, device: str, steps: int) -> "TrialSpec":
        """A trial of a candidate."""
        beside = {name: getattr(candidate, name) for name in ("recompute", "tp", "sp", "pp", "ep", "schedule")}
        return TrialSpec(model, dict(candidate.config), candidate.world_size, seq=seq, device=device, steps=steps, **beside)

    @property
    def candidate(self) -> Candidate:
        """The candidate that is tried."""
        dp = self.ranks // (self.tp * self.sp * self.pp)
        return Candidate(self.config, dp, self.recompute, self.tp, self.sp, self.pp, self.ep, self.schedule)


def measure(spec: TrialSpec, *, timeout: float) -> Measurement:
    """Runs a trial in a process group of its own, which is ended after ``timeout`` seconds."""
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder, "spec.json"), Path(folder, "out.json")
        given.write_text(json.dumps(attrs.asdict(spec)), encoding="utf-8")
        words = [sys.executable, "-m", "functional_ds.cli.tuning.trial", str(given), str(out)]
        with Path(folder, "errors").open("w+", encoding="utf-8", errors="replace") as errors:
            process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True)
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                return Measurement(why=f"it took longer than {timeout:g} s")
            finally:
                _end(process)
            if code == 0 and out.is_file():
                return Measurement(**json.loads(out.read_text(encoding="utf-8")))
            errors.seek(0)
            return Measurement(why=_why(code, errors.read()))


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends what is left of the group, ranks included."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _why(code: int, errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if "Error" in line or "error" in line), lines[-1] if lines else "")
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{how}: {last[:200]}" if last else how


def run_rank(spec: TrialSpec) -> tuple[float, int, int]:
    """A rank's part: seconds of a step, its peak in bytes, its state's bytes."""
    device = torch.device(spec.device, comm.get_local_rank()) if spec.device == "cuda" else torch.device("cpu")
    if device.type == "cpu":
        _warm_up(spec)
    process = ProcessMemory(device)
    before = process.now()
    torch.manual_seed(0)
    candidate = spec.candidate
    subject = subject_of(spec.model, seq=spec.seq, device=str(device), axes=candidate.axes.several)
    make_batch = subject.batch
    if subject.loss is None or make_batch is None:
        raise ValueError("the model has no loss and no batch, so nothing can be measured")
    subject = subject.piped_for(candidate)
    step = subject.step(candidate)
    state = step.init(subject.params)
    batch, held = make_batch(candidate.plan.batch.rows), measured(state).state
    del subject, make_batch
    state, _ = step(state, batch)  # kernels are chosen and caches filled
    process.forget_peak()
    times = []
    for _ in range(spec.steps):
        start = perf_counter()
        state, _ = step(state, batch)
        synchronize([device])
        times.append(perf_counter() - start)
    return statistics.median(times), max(0, process.peak() - before), held


def _warm_up(spec: TrialSpec) -> None:
    """A step of a small product, so that what libraries take once is no part of the peak."""
    candidate, side = Candidate(spec.config, spec.ranks), 256
    step = candidate.step(lambda params, x: (x @ params["w"]).square().mean())
    step(step.init({"w": torch.ones(side, side)}), torch.ones(candidate.plan.batch.rows, side))


@attrs.frozen
class ProcessMemory:
    """What this process has in memory: of a GPU by torch's allocator, of a CPU by the system.

    Attributes:
        device: which memory.
    """

    device: torch.device

    def now(self) -> int:
        """Bytes; on a CPU after what its allocator keeps but does not use was given back. On a GPU only the peak counts: 0."""
        if self.device.type == "cuda":
            return 0
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # a C library without it keeps what it has
            ctypes.CDLL(None).malloc_trim(0)
        return _resident("VmRSS")

    def peak(self) -> int:
        """The most bytes since ``forget_peak``."""
        return int(torch.cuda.max_memory_allocated(self.device)) if self.device.type == "cuda" else _resident("VmHWM")

    def forget_peak(self) -> None:
        """From now on another peak counts, where the system lets it; on a CPU what is kept unused is given back first."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self.now()
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")


def _resident(word: str) -> int:
    """VmRSS is what this process has in memory now, VmHWM the most that it had."""
    lines = _STATUS.read_text().splitlines() if _STATUS.is_file() else []
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(word)), resident_peak_bytes())


def main(given: str, out: str) -> None:
    """Runs a trial and writes what it found."""
    spec = TrialSpec(**json.loads(Path(given).read_text(encoding="utf-8")))
    if spec.ranks == 1:
        ranks = [run_rank(spec)]
    else:
        ranks = comm.spawn(run_rank, spec, world_size=spec.ranks, backend=None if spec.device == "cuda" else "gloo")
    seconds, peaks, states = zip(*ranks, strict=True)
    found = Measurement(max(seconds), max(peaks), max(states))
    Path(out).write_text(json.dumps(attrs.asdict(found)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
