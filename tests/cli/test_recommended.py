"""Law 70: what ``plan`` or ``tune`` recommends is a job; the job's run has the recommended memory."""

import json
from pathlib import Path
from typing import Any

import pytest

import functional_ds as fds
from functional_ds import comm
from functional_ds.cli import tune_command
from functional_ds.cli.planning.candidate import first_ranks
from functional_ds.cli.tuning.trial import Measurement
from functional_ds.dry_run.events import EventRecorder
from functional_ds.jobs.job import Job
from functional_ds.jobs.prepare import prepare
from tests.cli.models_by_name import HERE
from tests.cli.running import answer, refusal, run
from tests.cli.test_axes import causal_model

ALLOW = ["models_by_name"]
CONFIG = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "gradient_accumulation_steps": 2}
PLANS: dict[str, tuple[str, list[object]]] = {
    "one rank": ("blocks", ["--zero", 0, "--micro-batch", 64, "--precision", "fp32"]),
    "data parallel": ("mlp", ["--mesh", "dp=2", "--zero", 3, "--accumulate", 2, "--micro-batch", 3]),
    "a pipeline": ("tokens", ["--mesh", "dp=2,pp=2,tp=2", "--zero", 1, "--schedule", "zb_h1", "--recompute"]),
    "sequences": ("llama", ["--mesh", "sp=2,tp=2", "--zero", 2, "--seq", 8, "--precision", "fp32"]),
    "experts": ("mixtral", ["--mesh", "dp=2,ep=2", "--zero", 1, "--seq", 8, "--micro-batch", 2]),
    "a DeepSpeed config": ("tokens", ["--mesh", "dp=2,pp=2", "--config", "ds.json"]),
}


def measured(job: Job) -> tuple[int, int, float]:
    """On a rank of the job: the bytes of its state, the most bytes of tensors in its third step, the loss."""
    prepared = prepare(job)
    state = prepared.init()
    held, batch = fds.memory.measured(state).state, prepared.batch("train", 0)
    for _ in range(2):
        state, _ = prepared.step(state, batch)
    with EventRecorder() as noted:
        noted.note((state, batch))
        state, metrics = prepared.step(state, batch)
    return held, noted.events.peak(), metrics["loss"].item()


def is_run(file: Path, recommended: Any, capsys: pytest.CaptureFixture[str]) -> list[tuple[int, int, float]]:
    """Each rank has the recommended state; ``train`` runs the file as it is, here on simulated ranks."""
    job = fds.load_job(file, {"simulate": True}, allow_import=ALLOW)
    ranks = comm.simulate(measured, job, world_size=job.world_size)
    stages = recommended["stages"] or [recommended]
    assert [ranks[first][0] for first in first_ranks(job)] == [each["memory"]["state"] for each in stages]
    words = ["--set", "simulate=true", "--set", "steps=1", "--set", "logs.every=1", "--allow-import", *ALLOW]
    assert run(capsys, "train", file, *words)[0] == 0
    return ranks


@pytest.mark.law(70)
@pytest.mark.sample(3)
@pytest.mark.parametrize("case", PLANS)
def test_what_plan_recommends_is_run(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, words = PLANS[case]
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    words = [tmp_path / word if word == "ds.json" else word for word in words]
    name = causal_model(tmp_path, model, vocab_size=256) if model in ("llama", "mixtral") else f"{HERE}:{model}"
    file = tmp_path / "planned.toml"
    found = answer(capsys, "plan", name, "--device", "cpu", *words, "--out", file)
    (best,) = found["candidates"]
    assert fds.load_job(file, allow_import=ALLOW).changed({"folder": best["job"]["folder"]}).to_dict() == best["job"]
    ranks = is_run(file, best, capsys)
    if case == "one rank":
        assert ranks[0][1] == pytest.approx(best["memory"]["peak"], rel=0.02)


@pytest.mark.law(70)
def test_what_tune_recommends_is_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_command, "measure", lambda job, *, timeout: Measurement(1.0 / (1 + ("pp" in job.mesh)), 1, 1))
    file, words = tmp_path / "tuned.toml", ["--rows", 4, "--ranks", 2, "--zero", "1,2", "--micro-batch", 1, "--machine", "h100"]
    winner = answer(capsys, "tune", f"{HERE}:tokens", *words, "--best", 99, "--out", file)["winner"]
    states = [state for state, _, _ in is_run(file, {"stages": None, "memory": {"state": 0}, **_of(file, capsys)}, capsys)]
    assert max(states) == winner["predicted"]["state"]


def _of(file: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """``plan`` of the job's file itself, which is a strategy that it takes as it is."""
    job = fds.load_job(file, allow_import=ALLOW)
    again = file.with_name("again.toml")
    own = Path(HERE).with_name("planned_again.toml")
    try:
        own.write_text(job.to_toml())  # beside its model, so that it may name it
        (found,) = answer(capsys, "plan", own, "--machine", "h100", "--out", again)["candidates"]
    finally:
        own.unlink()
    assert found["job"] == job.to_dict()
    return found


def test_shapes_are_no_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "shapes.json").write_text('{"w": [4, 4]}')
    for model in (tmp_path / "shapes.json", f"{HERE}:plain"):
        assert "a job needs the model, its loss and its batches" in refusal(
            capsys, "plan", model, "--zero", 0, "--out", tmp_path / "job.toml"
        )


def test_a_deepspeed_config_is_written_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its plan is the candidate's: the same stage, precision and micro-batches."""
    words = ["--mesh", "dp=2", "--zero", 2, "--micro-batch", 3, "--accumulate", 2, "--out", tmp_path / "ds.json"]
    (made,) = answer(capsys, "plan", f"{HERE}:mlp", *words)["candidates"]
    (found,) = answer(capsys, "plan", f"{HERE}:mlp", "--mesh", "dp=2", "--config", tmp_path / "ds.json")["candidates"]
    same = ("stage", "precision", "micro_batch", "accumulate", "ranks")
    assert {name: found[name] for name in same} == {name: made[name] for name in same}


def test_a_job_names_only_what_its_reader_allows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where it is planned: nothing outside of its folder is imported."""
    (tmp_path / "job.toml").write_text('steps = 1\nmodel = "nowhere_models:mlp"\noptimizer = {sgd = 0.1}\n')
    for command in ("plan", "tune"):
        assert "there is no module 'nowhere_models'" in refusal(capsys, command, tmp_path / "job.toml")
    (tmp_path / "job.toml").write_text('steps = 1\nmodel = "os:getcwd"\noptimizer = {sgd = 0.1}\n')
    for command in ("plan", "tune"):
        assert "a job may not name 'os:getcwd'" in refusal(capsys, command, tmp_path / "job.toml", "--machine", "h100")
    allowed = ["--allow-import", "os", "--machine", "h100"]
    assert "it made a str, and must make a torch.nn.Module" in refusal(capsys, "plan", tmp_path / "job.toml", *allowed)


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ("mesh = {data = 2}", "mesh.data: the axes that can be planned are dp, pp, sp, tp, ep and edp"),
        ("ranks = 2\nstrategy = [{sequence = {}}]", "strategy.sequence: its 2 ranks have no names; give the job a mesh"),
    ],
)
def test_a_mesh_whose_rows_nobody_knows_is_refused(
    entries: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.toml").write_text(f'steps = 1\nmodel = "torch.nn:Identity"\noptimizer = {{sgd = 0.1}}\n{entries}\n')
    assert says in refusal(capsys, "plan", tmp_path / "job.toml")
