"""Short runs of candidates in separate processes, so that a crash is a result; and successive halving."""

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
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import attrs
import torch

from functional_ds import comm
from functional_ds.base.device import repeated, resident_peak_bytes, seconds_of
from functional_ds.cli.words.errors_in_one_line import refused
from functional_ds.jobs.job import Job
from functional_ds.jobs.job_subject import subject_of
from functional_ds.jobs.resolve import Surroundings
from functional_ds.jobs.strategy import rows_of_rank, strategy_of
from functional_ds.memory.account import measured
from functional_ds.step.train_step import train_step
from functional_ds.transforms.zero.zero import zero

C = TypeVar("C")


@attrs.frozen
class Measurement:
    """The result of one short run.

    Attributes:
        seconds: of a step, the median; None if the run failed.
        peak: the largest rank's peak bytes.
        state: bytes of the largest rank's state.
        why: why the run failed; empty if it did not.
    """

    seconds: float | None = None
    peak: int | None = None
    state: int | None = None
    why: str = ""


@attrs.frozen
class TrialRun(Generic[C]):
    """A candidate's last run: its round, number of steps, and result."""

    candidate: C
    round: int
    steps: int
    measurement: Measurement


def halve(candidates: Sequence[C], measure: Callable[[C, int], Measurement], *, steps: int = 4) -> list[TrialRun[C]]:
    """Successive halving: the last run of each candidate, the fastest first, failed ones last. A crash ends only its own run.

    Law: of candidates whose times do not depend on the number of steps, the first is the fastest. n candidates cost n · steps
    in each of about log2 n rounds.

    Args:
        candidates: what to compare.
        measure: runs one for so many steps.
        steps: of the first round; each later round has twice as many.

    >>> times = {"a": 3.0, "b": 1.0, "c": 2.0}
    >>> found = halve(list(times), lambda name, steps: Measurement(times[name]), steps=2)
    >>> [(run.candidate, run.steps) for run in found]
    [('b', 8), ('c', 4), ('a', 2)]
    """
    done: list[TrialRun[C]] = []
    remaining, round_ = list(candidates), 0
    while remaining:
        runs = [TrialRun(candidate, round_, steps << round_, measure(candidate, steps << round_)) for candidate in remaining]
        well = sorted(
            (run for run in runs if run.measurement.seconds is not None), key=lambda run: run.measurement.seconds or 0.0
        )
        kept = (len(well) + 1) // 2 if len(well) > 1 else 0  # a single one has none to be compared with
        done += well[kept:] + [run for run in runs if run.measurement.seconds is None]
        remaining, round_ = [run.candidate for run in well[:kept]], round_ + 1
    return sorted(done, key=lambda run: (run.measurement.seconds is None, -run.round, run.measurement.seconds or 0.0))


_STATUS = Path("/proc/self/status")


def measure(job: Job, *, timeout: float) -> Measurement:
    """Runs a job's steps in a separate process group, which is ended after ``timeout`` seconds.

    Raises:
        CommandError: the job cannot be written.
    """
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder, "job.json"), Path(folder, "out.json")
        with refused("a trial needs a job that can be written", TypeError):
            given.write_text(json.dumps([job.to_dict(), job.file, job.allow_import]), encoding="utf-8")
        words = [sys.executable, "-m", "functional_ds.cli.tuning.trial", str(given), str(out)]
        with Path(folder, "errors").open("w+", encoding="utf-8", errors="replace") as errors:
            process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
            )
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
    if process.stdin is not None:
        process.stdin.close()


def _why(code: int, errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if "Error" in line or "error" in line), lines[-1] if lines else "")
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{how}: {last[:200]}" if last else how


def run_rank(job: Job) -> tuple[float, int, int]:
    """A rank's part: seconds of a step, its peak in bytes, its state's bytes. The rows have arbitrary values."""
    device = torch.device("cuda", comm.get_local_rank()) if job.device == "cuda" else torch.device("cpu")
    if device.type == "cpu":
        _warm_up(job)
    process = ProcessMemory(device)
    before = process.now()
    torch.manual_seed(0)
    subject = subject_of(job, device=str(device))
    make_batch = subject.batch
    if make_batch is None:
        raise ValueError("the model has no loss and no batch, so nothing can be measured")
    subject = subject.piped_for(job)
    step = subject.step(job)
    state = step.init(subject.params)
    batch, held = make_batch(rows_of_rank(job)), measured(state).state
    run = repeated(step, state, batch)
    del subject, make_batch, state
    run()  # kernels are chosen and caches filled
    process.forget_peak()
    seconds = statistics.median(seconds_of(run, [device]) for _ in range(job.steps))
    return seconds, max(0, process.peak() - before), held


def _warm_up(job: Job) -> None:
    """A step of a small product, so that one-time allocations of libraries are not part of the peak."""
    optimizer, side = strategy_of(job, Surroundings(comm.mesh(**job.mesh) if job.mesh else None))[1], 256
    step = zero(1)(train_step(lambda params, x: (x @ params["w"]).square().mean(), optimizer))
    step(step.init({"w": torch.ones(side, side)}), torch.ones(rows_of_rank(job), side))


@attrs.frozen
class ProcessMemory:
    """This process's memory: of a GPU by torch's allocator, of a CPU by the system.

    Attributes:
        device: which memory.
    """

    device: torch.device

    def now(self) -> int:
        """Bytes; on a CPU after its allocator has returned unused memory. On a GPU only the peak matters: 0."""
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
        """Resets the peak, if the system supports it; on a CPU first returns unused memory."""
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
    entries, file, allowed = json.loads(Path(given).read_text(encoding="utf-8"))
    job = Job(**entries, file=file, allow_import=allowed)
    if job.world_size == 1:
        ranks = [run_rank(job)]
    else:
        ranks = comm.spawn(run_rank, job, world_size=job.world_size, backend=None if job.device == "cuda" else "gloo")
    seconds, peaks, states = zip(*ranks, strict=True)
    measurement = Measurement(max(seconds), max(peaks), max(states))
    Path(out).write_text(json.dumps(attrs.asdict(measurement)), encoding="utf-8")


def _end_with_the_parent() -> None:
    """Waits until the command that began this trial has ended; the ranks end with this process."""
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    main(*sys.argv[1:])
