"""``tune``: what is enumerated, how it is halved, and that a run that dies is a result."""

import json
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from functional_ds import comm
from functional_ds.cli import tune_command
from functional_ds.cli.planning.candidate import as_dict
from functional_ds.cli.planning.forecast import forecast
from functional_ds.cli.planning.subject import job_of, planned
from functional_ds.cli.tune_command import SearchSpace, candidates_of
from functional_ds.cli.tuning import trial
from functional_ds.cli.tuning.trial import Measurement, halve, measure, run_rank
from functional_ds.jobs.job import Job
from functional_ds.jobs.job_file import load_job
from functional_ds.jobs.strategy import micro_batches, size
from functional_ds.scaling.machine import MACHINES
from tests.cli.candidates import on_mesh
from tests.cli.models_by_name import HERE
from tests.cli.running import answer, refusal, run


def test_the_fastest_wins_and_the_dead_are_last() -> None:
    times = {"a": 5.0, "b": 1.0, "c": None, "d": 3.0, "e": 2.0}
    calls = []

    def measured(name: str, steps: int) -> Measurement:
        calls.append((name, steps))
        return Measurement(times[name], why="" if times[name] else "killed")

    found = halve(list(times), measured, steps=2)
    assert [run.candidate for run in found] == ["b", "e", "d", "a", "c"]
    assert [run.steps for run in found] == [8, 4, 2, 2, 2]
    assert found[-1].measurement.why == "killed"
    assert calls == [*((name, 2) for name in "abcde"), ("b", 4), ("e", 4), ("b", 8)]
    assert halve([], measured) == []
    assert halve(["c"], measured)[0].measurement.seconds is None


def test_every_candidate_trains_on_the_same_rows() -> None:
    found = candidates_of(job_of(f"{HERE}:mlp"), 2, 24, SearchSpace([0, 3], ["fp32"], recompute=(False, True)))
    assert len(found) == 2 * 6 * 2
    assert {each.data.rows for each in found} == {24}
    assert len({json.dumps(as_dict(each)) for each in found}) == len(found)


def test_tensor_parallel_ranks_are_tried_where_the_model_says_its_cuts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every divisor of the ranks; the rows of a step are the same on every mesh."""
    tried = list[tuple[int, int]]()

    def quick(job: Job, *, timeout: float) -> Measurement:
        tried.append((size(job, "dp"), size(job, "tp")))
        assert job.data.rows == 4
        return Measurement(1.0 / size(job, "tp"), 1, 1)

    monkeypatch.setattr(tune_command, "measure", quick)
    words = [
        "--ranks",
        2,
        "--axis",
        "pp=1",
        "--zero",
        "1,2",
        "--micro-batch",
        1,
        "--machine",
        "h100",
        "--best",
        99,
        "--rows",
        4,
    ]
    found = answer(capsys, "tune", f"{HERE}:cut", *words)
    assert set(tried) == {(2, 1), (1, 2)}
    assert found["candidates"] == 2 + 1  # a rank of dp that is alone has no stages
    assert (found["winner"]["tp"], found["winner"]["ranks"]) == (2, 1)
    shown = run(capsys, "tune", f"{HERE}:cut", "--axis", "tp=2", *words)[1]
    assert "mesh = comm.mesh(dp=1, tp=2)" in shown
    assert 'T.tensor_parallel(tp_plan, mesh["tp"])' in shown
    search = SearchSpace([1], ["fp32"], axes={"tp": [1, 2]})
    uneven = candidates_of(job_of(f"{HERE}:cut"), 2, 3, search)  # dp=2 cannot divide 3 rows
    assert {size(each, "tp") for each in uneven} == {2}


def test_a_trial_of_tensor_parallel_ranks_has_the_predicted_state() -> None:
    """Law: predicted bytes of a rank's state = measured ones, on the mesh (1, 2)."""
    job = on_mesh(f"{HERE}:cut", 1, stage=1, micro_batch=2, tp=2).changed({"steps": 1})
    expected = forecast(planned(job), job, machine=MACHINES["h100"], limit=0).shape.memory.state
    assert [state for _, _, state in comm.simulate(run_rank, job, world_size=2)] == [expected] * 2


def test_a_child_that_dies_is_a_result() -> None:
    """One child each: one is killed, one takes too long."""
    job = on_mesh(f"{HERE}:dies", micro_batch=2).changed({"steps": 1})
    assert measure(job, timeout=100).why.startswith("signal SIGKILL")
    assert measure(job, timeout=0.01).why == "it took longer than 0.01 s"


def test_a_trial_ends_with_its_command(tmp_path: Path) -> None:
    """Its parent alone can write into its standard input, so that ends with the parent, however that ends."""
    job = on_mesh(f"{HERE}:mlp", micro_batch=2).changed({"steps": 2**31 - 1})
    (tmp_path / "job.json").write_text(json.dumps([job.to_dict(), job.file, job.allow_import]))
    words = [sys.executable, "-m", trial.__name__, str(tmp_path / "job.json"), str(tmp_path / "out.json")]
    process = subprocess.Popen(words, stdin=subprocess.PIPE)
    try:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(120) == 1
    finally:
        process.kill()


def test_a_trial_measures_what_it_says(tmp_path: Path) -> None:
    job = on_mesh(f"{HERE}:mlp", stage=1, micro_batch=4).changed({"steps": 2})
    seconds, peak, state = run_rank(job)
    assert seconds > 0
    assert peak >= 0
    (tmp_path / "job.json").write_text(json.dumps([job.to_dict(), job.file, job.allow_import]))
    trial.main(str(tmp_path / "job.json"), str(tmp_path / "out.json"))
    assert json.loads((tmp_path / "out.json").read_text())["state"] == state


def test_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def quick(job: Job, *, timeout: float) -> Measurement:
        accumulate = micro_batches(job)
        if accumulate == 1:
            return Measurement(why="exit code 1: RuntimeError: out of memory")
        return Measurement(1.0 / accumulate, 10**6, 10**5)

    monkeypatch.setattr(tune_command, "measure", quick)
    words = ["tune", f"{HERE}:mlp", "--rows", 4, "--zero", "0", "--machine", "h100", "--best", 9, "--out", tmp_path / "ds.json"]
    found = answer(capsys, *words)
    keys = {"model", "ranks", "rows", "machine", "candidates", "do_not_fit", "refused", "fitted", "runs", "winner"}
    assert found.keys() == keys
    assert found["winner"]["accumulate"] == 4
    assert found["winner"]["predicted"].keys() == found["winner"]["measured"].keys() == {"step_seconds", "peak", "state"}
    assert [each["why"] for each in found["runs"]].count("exit code 1: RuntimeError: out of memory") == 1
    config = json.loads((tmp_path / "ds.json").read_text())
    assert config["gradient_accumulation_steps"] == 4
    assert found["winner"]["line"].startswith("fds.compose(T.zero(0), T.accumulate(4)")
    assert found["fitted"] is None
    written = run(capsys, *words[:-1], tmp_path / "job.toml")[1]
    assert f"functional-ds train {tmp_path}/job.toml --allow-import models_by_name runs it" in written
    assert load_job(tmp_path / "job.toml").to_dict() == {**found["winner"]["job"], "folder": str(Path(HERE).parent)}
    shown = run(capsys, *words, "--save-machine", tmp_path / "m.json")[1]
    assert all(word in shown for word in ("winner: zero 0, fp32, 4 x 1 rows", "predicted", "fitted", "measured"))


def test_a_fitted_machine_is_read_by_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs take what a machine with other factors would take: the fit predicts them, and so does ``plan``."""
    sheet = attrs.evolve(MACHINES["h100"], device="cpu")
    real, model = attrs.evolve(sheet, factors={"products": 3.0, "copies": 0.5, "starts": 2.5}), f"{HERE}:mlp"
    subject, times = planned(job_of(model)), dict[str, float | None]()

    def quick(job: Job, *, timeout: float) -> Measurement:
        name = json.dumps(as_dict(job)["name"])
        if name not in times:
            times[name] = forecast(subject, job, machine=real, limit=0).step_seconds
        return Measurement(times[name], 1, 1)

    monkeypatch.setattr(tune_command, "measure", quick)
    (tmp_path / "sheet.json").write_text(json.dumps(attrs.asdict(sheet)))
    words = ["tune", model, "--rows", 8, "--zero", "0", "--machine", tmp_path / "sheet.json", "--best", 9]
    words += ["--precision", "fp32", "--save-machine", tmp_path / "here.json"]
    found = answer(capsys, *words)
    assert found["fitted"] == json.loads((tmp_path / "here.json").read_text())
    for each in found["runs"]:
        assert each["fitted"]["step_seconds"] == pytest.approx(each["measured"]["step_seconds"], rel=0.01)
        assert each["predicted"]["step_seconds"] < each["fitted"]["step_seconds"]
    words = ["plan", model, "--zero", "0", "--precision", "fp32", "--micro-batch", 8, "--machine", tmp_path / "here.json"]
    (one,) = [each for each in found["runs"] if each["micro_batch"] == 8]
    assert answer(capsys, *words)["candidates"][0]["step_seconds"] == pytest.approx(one["fitted"]["step_seconds"])


def test_nothing_ends_well(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_command, "measure", lambda spec, *, timeout: Measurement(why="killed"))
    found = answer(capsys, "tune", f"{HERE}:mlp", "--rows", 1, "--zero", "1", "--machine", "h100", code=1)
    assert found["winner"] is None
    found = answer(capsys, "tune", f"{HERE}:mlp", "--rows", 1, "--zero", "1", "--machine", "h100", "--limit", "1kB", code=1)
    assert len(found["do_not_fit"]) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([f"{HERE}:mlp"], "--rows"),
        ([f"{HERE}:mlp", "--rows", "3", "--ranks", "2", "--axis", "pp=1"], "do not divide among 2 ranks"),
        ([f"{HERE}:mlp", "--rows", "4", "--micro-batch", "3"], "none divides the 4 rows"),
        ([f"{HERE}:mlp", "--rows", "0"], "--rows': Input should be greater than or equal to 1"),
        ([f"{HERE}:mlp", "--rows", "1", "--recompute", "maybe"], "'maybe' is not one of 'no', 'yes', 'both'"),
        ([f"{HERE}:cut", "--rows", "4", "--ranks", "2", "--axis", "tp=3"], "--axis tp=3 does not divide 2 ranks"),
        ([f"{HERE}:mlp", "--rows", "4", "--ranks", "2", "--axis", "tp=1,2"], "the model does not define how layers are sliced"),
        ([f"{HERE}:plain", "--rows", "1", "--machine", "h100"], "no loss and no batch"),
        ([f"{HERE}:mlp", "--rows", "1", "--out", "nowhere/ds.json"], "--out nowhere/ds.json: there is no folder nowhere"),
        ([f"{HERE}:mlp", "--rows", "1", "--out", "job.yaml"], "--out job.yaml should end with .toml, for a job, or with .json"),
        ([f"{HERE}:mlp", "--rows", "1", "--save-machine", "nowhere/m.json"], "there is no folder nowhere"),
    ],
)
def test_input_that_cannot_be_used(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in refusal(capsys, "tune", *words)
