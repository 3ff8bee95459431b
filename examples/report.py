"""What a run leaves in its folder: curves, memory against the formula, the ledger, logs, text from the model."""

import csv
import json
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import attrs
import memory
from matplotlib.figure import Figure
from tqdm import tqdm

import functional_ds as fds
from functional_ds import comm

FILES = {
    "loss.png": "training and validation loss over the steps",
    "memory.png": "bytes on each rank against the formula",
    "memory.txt": "the same in numbers, part by part",
    "ledger.txt": "every collective: what was sent in all and in one step, against the formula",
    "ledger.csv": "the same, step by step",
    "log.jsonl": "every step as data, and the validation losses",
    "train.log": "all that was said, and every step",
    "sample.txt": "text from the trained model",
}
PROFILE_FILES = {
    "profile.txt": "where time, operations and bytes went",
    "profile.json": "the same as data",
    "trace.json": "what ran when on each rank, for ui.perfetto.dev",
}
SENT_NOTE = (
    "Found may exceed it by padding and scalars, and in stage 3 stays below it for what is whole at the end of the\n"
    "forward pass: backward needs that first, and does not gather it again."
)


@attrs.frozen
class Moved:
    """One step's numbers."""

    step: int
    loss: float
    grad_norm: float
    rate: float
    seconds: float
    tokens: int  # over all ranks
    book: comm.Ledger

    def __str__(self) -> str:
        return (
            f"step {self.step:>5}   loss {self.loss:.4f}   grad norm {self.grad_norm:.3f}   rate {self.rate:.3f}   "
            f"{self.seconds:.3f} s   {self.tokens / self.seconds:,.0f} tokens/s   {self.book.bytes / 1e6:.3f} MB sent"
        )


@attrs.define(eq=False)
class Measured:
    """A step, with what its last call sent and how long it took; `profiled` is the same step with a profile, if wanted."""

    step: fds.Step
    profiled: fds.profiling.Profiled | None = None
    book: comm.Ledger = attrs.field(factory=comm.Ledger)
    seconds: float = 0.0

    def __call__(self, state: fds.State, batch: Any) -> tuple[fds.State, dict[str, Any]]:
        begin = time.perf_counter()
        with comm.ledger() as self.book:
            state, metrics = (self.profiled or self.step)(state, batch)
            metrics["loss"].item()  # waits for the device
        self.seconds = time.perf_counter() - begin
        return state, metrics


@attrs.define
class Report:
    """What rank 0 saw, in a progress bar and in files as it comes; on other ranks (`leads` false) it keeps silent.

    It is a logger for `fds.fit`. With `resumes` it goes on with what the run before left.
    """

    out: Path
    title: str
    expected: memory.Expected
    steps: int
    tokens: int  # of a step, over all ranks
    measured: Measured
    leads: bool
    resumes: bool = False
    train: list[Moved] = attrs.field(factory=list)
    validation: dict[int, float] = attrs.field(factory=dict)
    _open: ExitStack = attrs.field(factory=ExitStack)
    _text: TextIO = attrs.field(init=False)
    _data: TextIO = attrs.field(init=False)
    _bar: tqdm = attrs.field(init=False)

    def __enter__(self) -> "Report":
        if self.leads:
            pause = 0.1 if sys.stderr.isatty() else 10.0  # seconds; a file needs no animation
            bar = tqdm(total=self.steps, unit="step", dynamic_ncols=True, mininterval=pause)
            self._bar = self._open.enter_context(bar)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open.close()

    def say(self, text: str) -> None:
        """A line for the reader, above the bar and in the log."""
        if self.leads:
            self._bar.write(text)
            self._log(text)

    # -- as a logger ---------------------------------------------------------------------------------------------------

    def begin(self, done: int) -> None:
        """So many steps are made; an earlier run has logged them. Until now the files may be another run's, and stay."""
        log, rows = self.out / "log.jsonl", list[dict[str, float]]()
        if done and log.exists():
            rows = [json.loads(line) for line in log.read_text(encoding="utf-8").split("\n")[:-1]]
        kept = [row for row in rows if row["step"] <= done]
        beside = log.with_suffix(".new")
        beside.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        beside.replace(log)
        for name in FILES | PROFILE_FILES:  # none of another run's may pass for this one's
            if name != log.name and not (self.resumes and name == "train.log"):
                (self.out / name).unlink(missing_ok=True)
        self._text = self._open.enter_context((self.out / "train.log").open("a", encoding="utf-8"))
        self._data = self._open.enter_context(log.open("a", encoding="utf-8"))
        for row in kept:
            if "validation" in row:
                self.validation[int(row["step"])] = row["validation"]
            else:
                numbers = {field.name: row[field.name] for field in attrs.fields(Moved) if field.name != "book"}
                self.train.append(Moved(**numbers, book=comm.Ledger()))
        self.say(self.title)
        if done:
            self.say(f"going on after step {done}")
            self._bar.update(done)

    def log(self, done: int, numbers: Mapping[str, float]) -> None:
        """A step was made, or the validation loss was measured."""
        if "validation" in numbers:
            self.validated(done, numbers["validation"])
        else:
            loss, norm, rate = (numbers[name] for name in ("loss", "grad_norm", "rate"))
            self.moved(Moved(done, loss, norm, rate, self.measured.seconds, self.tokens, self.measured.book))

    def close(self) -> None:
        """Nothing yet: there is more to say."""

    def moved(self, row: Moved) -> None:
        """A step was made."""
        if self.leads:
            self.train.append(row)
            self._log(str(row))
            numbers = attrs.asdict(row, filter=lambda field, value: field.name != "book")
            self._record({**numbers, "bytes": row.book.bytes, "collectives": row.book.calls})
            speed = f"{row.tokens / row.seconds:,.0f} tokens/s, {row.book.bytes / 1e6:.2f} MB/step"
            self._bar.set_postfix_str(f"loss {row.loss:.3f}, {speed}", refresh=False)
            self._bar.update()

    def validated(self, step: int, loss: float) -> None:
        """The validation loss was measured."""
        if self.leads:
            self.validation[step] = loss
            self._record({"step": step, "validation": loss})
            self.say(f"after step {step}: validation loss {loss:.4f} nats per byte")

    def finish(self, whole: comm.Ledger, memories: list[memory.Memory]) -> None:
        """Writes the curves, the memory and the ledger."""
        if self.leads:
            self._bar.close()
            self._draw_losses().savefig(self.out / "loss.png", dpi=120)
            memory.draw(self.title, self.expected, memories).savefig(self.out / "memory.png", dpi=120)
            self._write("memory.txt", memory.table(self.title, self.expected, memories))
            self._write("ledger.txt", self._ledger(whole))
            self._ledger_csv(whole)

    def sampled(self, prompt: bytes, text: bytes) -> None:
        """Writes sampled text behind its prompt."""
        if self.leads:
            shown = [part.decode("utf-8", errors="replace") for part in (prompt, text)]
            self._write("sample.txt", "--- the prompt\n{}\n--- the model\n{}\n".format(*shown))

    def summary(self) -> str:
        """What came of it and where it lies."""
        first, last = next(iter(self.validation.values())), next(reversed(self.validation.values()))
        seconds = sum(row.seconds for row in self.train)
        tokens = sum(row.tokens for row in self.train)
        lines = [
            f"validation loss {first:.3f} -> {last:.3f} nats per byte after {len(self.train)} steps, "
            f"{seconds:.1f} s, {tokens / max(seconds, 1e-9):,.0f} tokens/s",
            f"in {self.out}/:",
        ]
        lines += [f"  {name:<12} {what}" for name, what in (FILES | PROFILE_FILES).items() if (self.out / name).exists()]
        return "\n".join(lines)

    # -- how -----------------------------------------------------------------------------------------------------------

    def _log(self, text: str) -> None:
        now = datetime.now().astimezone().isoformat(timespec="milliseconds")
        self._text.writelines(f"{now}  {line}\n" for line in text.splitlines())
        self._text.flush()

    def _record(self, row: dict[str, float]) -> None:
        self._data.write(json.dumps(row) + "\n")
        self._data.flush()

    def _write(self, name: str, text: str) -> None:
        (self.out / name).write_text(text, encoding="utf-8")

    def _ledger(self, whole: comm.Ledger) -> str:
        parts = [f"{self.title}\nWhat rank 0 sent, as counted by functional_ds.comm.ledger\n"]
        if self.train:
            last, law = self.train[-1], self.expected.elements_sent()
            found = sum(row.elements for row in last.book.rows)
            parts.append(f"the last step, {last.step}:\n{last.book.table()}\n")
            parts.append(f"law 21: {law} elements a step; found {found:,}.\n{SENT_NOTE}\n")
        parts.append(f"the whole run, set-up, validation and the agreement when to stop included:\n{whole.table()}\n")
        return "\n".join(parts)

    def _ledger_csv(self, whole: comm.Ledger) -> None:
        with (self.out / "ledger.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["step", *(field.name for field in attrs.fields(comm.Row))])
            books = [*((row.step, row.book) for row in self.train), ("whole run", whole)]
            writer.writerows([step, *attrs.astuple(row)] for step, book in books for row in book.rows)

    def _draw_losses(self) -> Figure:
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        axes.plot([row.step for row in self.train], [row.loss for row in self.train], color="#8c9bb0", label="training")
        axes.plot(list(self.validation), list(self.validation.values()), "o-", color="#c44e52", label="validation")
        axes.set(title=self.title, xlabel="step", ylabel="nats per byte")
        axes.grid(alpha=0.3)
        axes.legend()
        return figure
