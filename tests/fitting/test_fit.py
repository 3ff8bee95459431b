"""The loop: wherever a run is ended, what comes out when it is run again is what an undisturbed run gives."""

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import functional_ds as fds
from functional_ds import checkpointing, comm, pipelining
from functional_ds.checkpointing import storage
from functional_ds.checkpointing.writer import data_name
from functional_ds.fitting import CsvLog, Interrupted, NonFiniteLossError, RollBack, Stop, watchdog
from functional_ds.testing import assert_same
from tests.fitting import models

EACH = fds.Logging(every=1)
FEW = settings(max_examples=max(4, settings().max_examples // 6))  # each draws whole runs


class PulledError(Exception):
    """The plug was pulled."""


class Asked:
    """A flag that is set from a step on."""

    def __init__(self, after: int) -> None:
        self.after, self.asked = after, 0

    def is_set(self) -> bool:
        self.asked += 1
        return self.asked >= self.after


POLICY = ("every", "minutes", "keep_last", "keep_every", "resume")  # of checkpoints


def run(path: Path | None, *, stage: int = 3, steps: int | None = 8, pulled: int | None = None, **more: Any) -> Any:
    """The params after a run, which loses its data when the plug is pulled."""

    def batch(index: int) -> Tensor:
        if index == pulled:
            raise PulledError
        return models.batch(index)

    step, state = models.build(stage)
    options = {name: more.pop(name) for name in POLICY if name in more}
    checkpoints = None if path is None else fds.Checkpoints(path, **options)
    state = fds.fit(step, state, more.pop("batches", batch), steps=steps, checkpoints=checkpoints, **more)
    return step.params(state), fds.transforms.averaged(step, state), state.step, state.key


# -- law 37 ------------------------------------------------------------------------------------------------------------


@pytest.mark.law(37)
@FEW
@given(
    stage=st.integers(0, 3),
    n=st.sampled_from((1, 2, 3)),
    every=st.integers(1, 5),
    ends=st.lists(st.integers(0, 7), max_size=3),
    seed=st.integers(0, 9),
)
def test_a_run_that_was_ended_anywhere_goes_on(
    tmp_path_factory: pytest.TempPathFactory, stage: int, n: int, every: int, ends: list[int], seed: int
) -> None:
    """run(k + j) = run(j) ∘ resume ∘ run(k), bitwise: params, means, random draws, data; however often it is ended."""
    path = tmp_path_factory.mktemp("run")
    for pulled in ends:
        with suppress(PulledError):  # the run before may have gone past it
            comm.simulate(lambda p=pulled: run(path, stage=stage, every=every, pulled=p), world_size=n, seed=seed)
    for found, expected in zip(
        comm.simulate(lambda: run(path, stage=stage, every=every), world_size=n, seed=seed),
        comm.simulate(lambda: run(None, stage=stage), world_size=n),
        strict=True,
    ):
        assert_same(found, expected)


@pytest.mark.law(37)
@FEW
@given(n=st.sampled_from((1, 2)), after=st.integers(1, 8))
def test_a_run_that_was_asked_to_end_has_saved(tmp_path_factory: pytest.TempPathFactory, n: int, after: int) -> None:
    """A flag on one rank ends all after one step, with a checkpoint of it, and nothing is made again."""
    path = tmp_path_factory.mktemp("run")

    def asked() -> tuple[int, Any]:
        stop = Asked(after if comm.world().rank == n - 1 else 1000)
        with pytest.raises(Interrupted) as end:
            run(path, stop=stop, steps=20)
        assert end.value.code == 128 + signal.SIGINT
        return end.value.done, end.value.state.step

    assert comm.simulate(asked, world_size=n) == [(after, torch.tensor(after))] * n
    drawn: list[int] = []

    def noted(index: int) -> Tensor:
        drawn.append(index)
        return models.batch(index)

    found = comm.simulate(lambda: run(path, batches=noted, steps=9), world_size=n)
    assert sorted(set(drawn)) == [*range(after, 9)]
    assert_same(found, comm.simulate(lambda: run(None, steps=9), world_size=n))


def test_more_steps_go_on_and_finished_runs_do_nothing(tmp_path: Path) -> None:
    assert_same(run(tmp_path, steps=3), run(None, steps=3))
    assert_same(run(tmp_path, steps=5), run(None, steps=5))
    assert_same(run(tmp_path, steps=5, pulled=5), run(None, steps=5))
    assert_same(run(tmp_path, steps=2, resume=False), run(None, steps=2))
    assert_same(run(tmp_path, steps=4), run(None, steps=4))  # from where the last run ended


class Loader:
    """A stateful loader of this rank's own order."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.place < 12:
            self.place += 1
            yield models.batch(self.place + 20 * comm.world().rank)

    def state_dict(self) -> dict[str, Any]:
        return {"place": torch.tensor(self.place), "rank": comm.world().rank}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert state["rank"] == comm.world().rank
        self.place = int(state["place"])


def test_stateful_loaders_and_iterators_go_on(tmp_path: Path) -> None:
    for kind, make in {"loader": Loader, "iterator": lambda: iter(map(models.batch, range(12)))}.items():

        def both(steps: int, path: Path | None, make: Any = make) -> Any:
            return comm.simulate(lambda: run(path, batches=make(), steps=steps), world_size=2)

        both(5, tmp_path / kind)
        assert_same(both(9, tmp_path / kind), both(9, None))


def test_the_end_of_the_data_is_agreed_on() -> None:
    """With steps=None all ranks end when the first has no batch left."""

    def program() -> int:
        mine = [models.batch(i) for i in range(3 + 2 * comm.world().rank)]
        return int(run(None, batches=mine, steps=None)[2])

    assert comm.simulate(program, world_size=3) == [3, 3, 3]
    with pytest.raises(ValueError, match="rank 0 has none for step 3 of steps=9"):
        run(None, batches=[models.batch(0)] * 2, steps=9)


# -- what is saved and said --------------------------------------------------------------------------------------------


def test_checkpoints_come_by_steps_and_by_minutes(tmp_path: Path) -> None:
    run(tmp_path / "steps", every=3, keep_last=None)
    assert checkpointing.tags(tmp_path / "steps") == ["step-00000003", "step-00000006", "step-00000008"]
    run(tmp_path / "minutes", minutes=1e-9, keep_last=2)
    assert checkpointing.tags(tmp_path / "minutes") == ["step-00000007", "step-00000008"]
    run(tmp_path / "never", minutes=1e9)
    assert checkpointing.tags(tmp_path / "never") == ["step-00000008"]


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    _, state = models.build()
    checkpointing.save(state, tmp_path, tag="mine")
    with pytest.raises(ValueError, match="its newest checkpoint was not made by fit"):
        run(tmp_path)


def test_logs_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    def logged(name: str, **more: Any) -> list[tuple[str, ...]]:
        step = models.build()[0]
        log = CsvLog(tmp_path / f"{name}.csv")
        more["evaluation"] = fds.Evaluation(lambda state: {"validation": step.evaluate(state, models.batch(99))}, every=3)
        more["logging"] = fds.Logging([log], every=2)
        for pulled in more.pop("ends", ()):
            with pytest.raises(PulledError):
                run(tmp_path / name, every=2, pulled=pulled, **more)
        run(tmp_path / name, every=2, **more)
        rows = [tuple(line.split(",")) for line in log.path.read_text().splitlines()]
        return [row for row in rows if row[1] != "seconds_per_step"]

    whole = logged("whole")
    assert logged("ended", ends=[5, 6]) == whole
    assert [step for step, name, _ in whole if name == "loss"] == ["2", "4", "6", "8"]
    assert [step for step, name, _ in whole if name == "validation"] == ["0", "3", "6", "8"]


class Counting:
    """A step whose metrics say when they are read."""

    def __init__(self, step: fds.Step) -> None:
        self.inner, self.read = step, 0
        self.finite = step.finite

    def __call__(self, state: fds.State, batch: Tensor) -> tuple[fds.State, dict[str, Any]]:
        state, metrics = self.inner(state, batch)

        class Watched(Tensor):
            def __float__(watched) -> float:
                self.read += 1
                return super().__float__()

        return state, {**metrics, "watched": metrics["loss"].as_subclass(Watched)}


def test_nothing_is_read_between_logged_steps(tmp_path: Path) -> None:
    step, state = models.build()
    counting = Counting(step)
    fds.fit(counting, state, models.batch, steps=20, logging=fds.Logging([CsvLog(tmp_path / "log.csv")], every=7))
    assert counting.read == 3  # 7, 14 and the last


def test_progress_is_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run(tmp_path, steps=3)
    comm.simulate(lambda: run(tmp_path, steps=8, logging=fds.Logging(progress=True), resume=False), world_size=2)
    shown = capsys.readouterr().err
    assert "8/8" in shown
    assert "loss" in shown


# -- losses that are not finite ----------------------------------------------------------------------------------------


def poisoned(*bad: int) -> Any:
    def batch(index: int) -> Tensor:
        found = models.batch(index)
        return found * float("nan") if index in bad and comm.world().rank == 0 else found

    return batch


def test_it_stops(tmp_path: Path) -> None:
    """The checkpoint before stays the newest; a stop says where."""

    def program() -> None:
        with pytest.raises(NonFiniteLossError, match=r"by step 6 the loss was not finite 3 times in a row.*that of step 3"):
            run(tmp_path, every=1, logging=EACH, batches=poisoned(3, 4, 5), on_non_finite=Stop(3))

    comm.simulate(program, world_size=2)
    assert checkpointing.latest(tmp_path) == "step-00000003"
    run(tmp_path / "bears", every=1, batches=poisoned(7), on_non_finite=None)
    assert checkpointing.latest(tmp_path / "bears") == "step-00000008"


@pytest.mark.law(37)
def test_it_rolls_back_and_skips(tmp_path: Path) -> None:
    """What comes out is a run over the data without what lies between the checkpoint and the roll-back; ended or not."""

    def rolling(path: Path, **more: Any) -> Any:
        rule = RollBack(after=2, times=1)
        return run(path, every=4, logging=fds.Logging(every=2), batches=poisoned(5, 6, 7), on_non_finite=rule, **more)

    def skipping() -> Any:
        return run(None, batches=lambda index: models.batch(index if index < 4 else index + 4))

    expected = comm.simulate(skipping, world_size=2)
    assert_same(comm.simulate(lambda: rolling(tmp_path / "a"), world_size=2), expected)

    def interrupted() -> None:
        with pytest.raises(Interrupted):
            rolling(tmp_path / "b", stop=Asked(9))  # after the roll-back: eight steps and one

    comm.simulate(interrupted, world_size=2)
    assert_same(comm.simulate(lambda: rolling(tmp_path / "b"), world_size=2), expected)


def test_it_does_not_roll_back_for_ever(tmp_path: Path) -> None:
    rule = RollBack(after=1, times=2)
    with pytest.raises(NonFiniteLossError, match="after 2 roll-backs"):
        run(tmp_path, logging=EACH, every=1, batches=poisoned(*range(2, 100)), on_non_finite=rule)
    assert checkpointing.latest(tmp_path) == "step-00000002"


def test_a_log_to_go_on_with_is_read_up_to_a_bound(tmp_path: Path) -> None:
    """Lines of a kind that no log has are left out; a sparse file or a pipe is an error, and not a wait."""
    log = CsvLog(tmp_path / "log.csv")
    odd = ["\u00b2,loss,1", "9" * 5000 + ",loss,1", "1,loss," + "9" * 200_000, "1,loss", '1,"loss,3', ""]
    for lines in (odd[:4], odd[4:]):
        log.path.write_text("step,name,value\n1,loss,0.5\n" + "\n".join(lines), encoding="utf-8")
        log.begin(1)
        log.close()
        assert log.path.read_text().split() == ["step,name,value", "1,loss,0.5"]
    os.truncate(log.path, 2**31)
    with pytest.raises(OSError, match=r"at most 1,073,741,824 are read"):
        log.begin(1)
    log.path.unlink()
    os.mkfifo(log.path)
    with pytest.raises(OSError, match=r"a pipe or a device"):
        log.begin(1)


def test_a_roll_back_to_the_beginning_evaluates_again(tmp_path: Path) -> None:
    """The log begins anew there, and has what comes before the first step, as an undisturbed run's has."""
    log = CsvLog(tmp_path / "log.csv")
    evaluation, logging = fds.Evaluation(lambda state: {"at": int(state.step)}), fds.Logging([log], every=1)
    run(tmp_path / "run", steps=2, batches=poisoned(0), on_non_finite=RollBack(after=1), evaluation=evaluation, logging=logging)
    assert [line for line in log.path.read_text().splitlines() if ",at," in line] == ["0,at,0.0", "2,at,2.0"]


def test_spoiled_params_are_not_saved(tmp_path: Path) -> None:
    """The first loss is finite, its gradient is not (a square root's at zero): no checkpoint is made of what follows."""
    step = fds.train_step(lambda params, x: (params["w"] - x).abs().sqrt().sum(), fds.sgd(0.1))
    checkpoints = fds.Checkpoints(tmp_path, every=1)
    with pytest.raises(NonFiniteLossError, match="no checkpoint was made"):
        fds.fit(step, step.init({"w": torch.ones(2)}), [torch.ones(2)] * 9, checkpoints=checkpoints, logging=EACH)
    assert checkpointing.latest(tmp_path) is None


# -- processes ---------------------------------------------------------------------------------------------------------


def terminated(path: str) -> Any:
    """A rank that gets SIGTERM in its fifth step."""

    def batch(index: int) -> Tensor:
        if index == 4 and comm.world().rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return models.batch(index)

    with pytest.raises(Interrupted) as caught:
        run(Path(path), batches=batch)
    assert (caught.value.done, caught.value.code) == (5, 128 + signal.SIGTERM)
    return run(Path(path))


# -- a disk that is full for one rank ---------------------------------------------------------------------------------


def saved_once(path: Path, written: Callable[[], None]) -> tuple[str, str]:
    """A run that saves after its fourth step and goes on until ``written`` returns, which the next batch waits for."""

    def batch(index: int) -> Tensor:
        if index == 12:
            written()
        return models.batch(index)

    step, state = models.build()
    try:
        fds.fit(
            step,
            state,
            batch,
            steps=15,
            checkpoints=fds.Checkpoints(path, every=4),
            timeout=timedelta(seconds=60),
            stop=Event(),
        )
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("victim", [0, 1])
def test_a_disk_that_is_full_for_one_rank_ends_all(victim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same error, whichever rank's writer fails, between two saves, too."""
    real, failed = storage.write, Event()

    def full(path: Path, *args: Any) -> Any:
        if path.name == data_name(victim):
            failed.set()
            raise OSError(28, "No space left on device", str(path))
        return real(path, *args)

    monkeypatch.setattr(storage, "write", full)
    found = comm.simulate(lambda: saved_once(tmp_path, lambda: (failed.wait(60), time.sleep(0.1))), world_size=2)
    assert [kind for kind, _ in found] == ["CheckpointError"] * 2, found
    assert all("No space left on device" in message and f"{victim:05d}.bin" in message for _, message in found)
    assert not [*tmp_path.glob("step-*")]


def full_for_one(path: str, victim: int) -> tuple[str, str]:
    """The system refuses that one rank makes a file larger than 16 bytes."""
    if comm.world().rank == victim:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, resource.RLIM_INFINITY))
    return saved_once(Path(path), lambda: time.sleep(1.0))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_may_not_write_ends_all(victim: int, tmp_path: Path) -> None:
    found = comm.spawn(full_for_one, str(tmp_path), victim, world_size=2)
    assert [kind for kind, _ in found] == ["CheckpointError"] * 2, found
    assert all("File too large" in message for _, message in found)


def test_processes_save_on_sigterm_and_go_on(tmp_path: Path) -> None:
    """And come to the bits of simulated ranks."""
    found = comm.spawn(terminated, str(tmp_path), world_size=2)
    assert_same(found, comm.simulate(lambda: run(None), world_size=2))


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ({"steps": -1}, "steps=-1"),
        ({"every": 0, "path": "x"}, "every=0"),
        ({"minutes": 0.0, "path": "x"}, "minutes=0.0"),
        ({"on_non_finite": RollBack()}, r"goes back to a checkpoint; pass checkpoints=fds.Checkpoints\(path\)"),
    ],
)
def test_bad_input_is_refused(bad: dict[str, Any], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=complaint):
        run(bad.pop("path", None), **bad)
    assert not [*tmp_path.iterdir()]


def test_params_that_lie_elsewhere_are_looked_at(tmp_path: Path) -> None:
    """A checkpoint is made of finite params only, also where these are on a disk."""

    def program(steps: int) -> Tensor:
        step = fds.compose(fds.transforms.offload("disk", "disk", path=tmp_path), fds.transforms.zero(3))(
            fds.train_step(lambda params, x: (params["w"] * x).square().mean(), fds.adamw(0.1))
        )
        state = fds.fit(
            step,
            step.init({"w": torch.ones(5)}),
            lambda index: torch.ones(5),
            checkpoints=fds.Checkpoints(tmp_path / "run"),
            steps=steps,
        )
        found: Tensor = step.params(state)["w"]
        return found

    comm.simulate(program, 2, world_size=2)
    found = comm.simulate(program, 3, world_size=2)
    assert checkpointing.tags(tmp_path / "run") == ["step-00000002", "step-00000003"]
    assert_same(found[0], found[1])


def test_stages_with_other_numbers_of_params_on_a_disk(tmp_path: Path) -> None:
    """Ranks look at their params together, however many tensors each has."""
    params = [{"w": torch.eye(4)}, {"a": torch.eye(4), "c": torch.ones(4, dtype=torch.float64)}]
    stages = pipelining.stages(
        [lambda p, x: x @ p["w"], lambda p, x: x @ p["a"] + p["c"].float()], params, loss=lambda y, b: y.square().mean()
    )

    def program() -> int:
        mesh = comm.mesh(dp=1, pp=2)
        step = fds.compose(
            fds.transforms.offload("disk", "disk", path=tmp_path),
            fds.transforms.zero(3, mesh["dp"]),
            fds.transforms.pipeline(pipelining.gpipe(2, 2), stages, mesh["pp"]),
        )(fds.train_step(stages, fds.sgd(0.1)))
        checkpoints = fds.Checkpoints(tmp_path / "run", every=1)
        state = fds.fit(step, step.init(params), lambda index: (torch.ones(4, 4),), steps=2, checkpoints=checkpoints)
        return int(state.step)

    assert comm.simulate(program, world_size=2) == [2, 2]


def test_what_is_no_state() -> None:
    step, state = models.build()
    with pytest.raises(TypeError, match="state=dict: fit takes a state"):
        fds.fit(step, {"w": torch.ones(1)}, models.batch, steps=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"timeout=60: pass timedelta\(seconds=...\)"):
        fds.fit(step, state, models.batch, steps=1, timeout=60)  # type: ignore[arg-type]


def test_a_step_without_the_metric_loss_is_not_watched() -> None:
    def unnamed(inner: Any, step: Any, state: Any, batch: Any, carry: Any, last: bool) -> Any:
        state, grads, metrics = inner(step, state, batch, carry, last)
        return state, grads, {"error": metrics["loss"]}

    step, state = models.build()
    step = fds.wrap("unnamed", gradients=unnamed)(step)
    with pytest.raises(ValueError, match=r"on_non_finite=Stop.* the step has \['error'.*\]; pass on_non_finite=None"):
        fds.fit(step, state, models.batch, steps=1)
    _, state = models.build()
    assert fds.fit(step, state, models.batch, steps=1, on_non_finite=None).step == 1


def test_what_is_no_data_and_no_path_is_refused() -> None:
    step, state = models.build()
    for program, complaint in (
        (lambda: fds.fit(step, state, {"x": torch.ones(1)}, steps=1), "batches=.*: pass a function from an index"),
        (
            lambda: fds.fit(step, state, models.batch, steps=1, on_non_finite="stop"),  # type: ignore[arg-type]
            r"on_non_finite='stop': pass fitting\.Stop\(\)",
        ),
        (lambda: watchdog(60).__enter__(), r"timeout=60: pass timedelta\(seconds=...\)"),  # type: ignore[arg-type]
        (lambda: fds.Checkpoints(None), "path=None: pass the path of a file or folder"),  # type: ignore[arg-type]
        (lambda: fds.save(state, None), "path=None: pass the path of a file or folder"),  # type: ignore[arg-type]
        (lambda: fds.load(None, like=state), "path=None: pass the path of a file or folder"),  # type: ignore[arg-type]
        (lambda: fds.export(None, "x"), "params=None: export takes a state"),
    ):
        with pytest.raises(TypeError, match=complaint):
            program()


def test_records_refuse_bad_numbers() -> None:
    for make, complaint in (
        (lambda: fds.Logging(every=0), "every=0: a number of steps"),
        (lambda: fds.Logging(every=None), "every=None: a number of steps"),  # type: ignore[arg-type]
        (lambda: fds.Evaluation(dict, every=0), "every=0: a number of steps"),
        (lambda: fds.Checkpoints("x", every=1.5), r"every=1\.5: a number of steps"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=complaint):
            make()


def test_what_is_no_record_is_refused() -> None:
    step, state = models.build()
    with pytest.raises(TypeError, match=r"checkpoints='run': pass fds.Checkpoints\(path\)"):
        fds.fit(step, state, models.batch, steps=1, checkpoints="run")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"logging=None: pass fds.Logging\(loggers\)"):
        fds.fit(step, state, models.batch, steps=1, logging=None)  # type: ignore[arg-type]
