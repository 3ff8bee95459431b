"""Meshes of all axes: ``plan`` says what a run on simulated ranks holds and sends, ``tune`` finds a strategy that is built."""

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

import functional_ds as fds
from functional_ds import comm, pipelining
from functional_ds import transforms as T
from functional_ds.cli import tune_command
from functional_ds.cli.planning.candidate import as_dict, first_ranks, mesh_line, several
from functional_ds.cli.planning.forecast import Forecast, bubble_seconds, forecast
from functional_ds.cli.planning.subject import job_of, planned
from functional_ds.cli.tune_command import SearchSpace, candidates_of
from functional_ds.cli.tuning.trial import Measurement, run_rank
from functional_ds.cli.words.errors_in_one_line import CommandError
from functional_ds.jobs.job import Job
from functional_ds.jobs.job_subject import subject_of
from functional_ds.jobs.strategy import rows_of_rank, size
from functional_ds.scaling.machine import MACHINES
from tests.cli.candidates import on_mesh
from tests.cli.models_by_name import HERE
from tests.cli.running import answer, refusal, run


def causal_model(folder: Path, kind: str = "llama", **more: Any) -> str:
    """A folder with a small model's config."""
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 32}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 32} | ({"num_local_experts": 4} if kind == "mixtral" else {})
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **sizes, **more}))
    return str(folder)


def predicted(job: Job) -> Forecast:
    return forecast(planned(job), job, machine=MACHINES["h100"], limit=0)


def held_and_sent(job: Job) -> tuple[int, dict[tuple[str, str], tuple[int, int]]]:
    """A rank's bytes of state, and calls and bytes by collective and group in a step after the first two."""
    subject = subject_of(job, device="cpu")
    make, subject = subject.batch, subject.piped_for(job)
    assert make is not None
    step, batch = subject.step(job), make(rows_of_rank(job))
    batch = comm.broadcast_object(batch) if comm.world().size > 1 else batch
    state = step.init(subject.params)
    for _ in range(2):
        state, _ = step(state, batch)
    with comm.ledger() as book:
        state, _ = step(state, batch)
    return fds.memory.measured(state).state, by_kind(book.rows)


def by_kind(rows: Any) -> dict[tuple[str, str], tuple[int, int]]:
    return {(row.collective, row.group): (row.calls, row.bytes) for row in rows if row.size > 1}


def mesh(kind: str, dp: int, stage: int, **axes: Any) -> tuple[str, int, dict[str, Any]]:
    """A model, and what ``on_mesh`` takes: two micro-batches of two rows."""
    return kind, dp, {"stage": stage, "precision": "fp32", "micro_batch": 2, "accumulate": 2, **axes}


MESHES = {
    "sequences": mesh("llama", 1, 3, sp=2),
    "a pipeline of sequences": mesh("llama", 1, 1, pp=2, sp=2),
    "experts in a pipeline": mesh("mixtral", 2, 2, ep=2, pp=2),
    "a pipeline of functions": mesh("tokens", 2, 2, pp=2, tp=2, schedule="zb_h1"),
}


@pytest.mark.sample(2)
@pytest.mark.law(20)
@pytest.mark.law(21)
@pytest.mark.parametrize("case", MESHES)
def test_bytes_by_axis_are_those_of_a_run(case: str, tmp_path: Path) -> None:
    """State to the byte, calls and bytes by collective and group, for each rank of a pipeline. Tokens choose their experts."""
    kind, dp, more = MESHES[case]
    job = on_mesh(f"{HERE}:{kind}" if kind == "tokens" else causal_model(tmp_path, kind), dp, **more)
    mine = predicted(job)
    shapes = mine.stages or (mine.shape,)
    ranks = comm.simulate(held_and_sent, job, world_size=job.world_size)
    for shape, rank in zip(shapes, first_ranks(job), strict=True):
        state, sent = ranks[rank]
        assert shape.memory.state == state
        found = by_kind(shape.sent)
        if size(job, "ep") > 1:
            assert found.keys() == sent.keys()
            found, sent = ({key: value for key, value in each.items() if key[1] != "ep"} for each in (found, sent))
        assert found == sent
    assert any(group in several(job) for _, group in by_kind(mine.shape.sent))


@pytest.mark.parametrize(("ranks", "micro"), [(2, 4), (4, 8)])
def test_a_bubble_of_equal_ranks(ranks: int, micro: int) -> None:
    """Law: (p - 1) / m of what a rank computes. A slow last rank waits for the others' first forwards and last backwards."""
    schedule, link = pipelining.one_f_one_b(ranks, micro), attrs.evolve(MACHINES["h100"], link_latency=0.0)
    assert bubble_seconds(schedule, link, [8.0] * ranks, [1.0] * ranks, []) == pytest.approx(8.0 * (ranks - 1) / micro)
    slow = bubble_seconds(schedule, link, [8.0] * (ranks - 1) + [80.0], [0.0] * ranks, [])
    assert slow == pytest.approx(8.0 * (ranks - 1) / micro)


def test_a_pipelines_time_has_its_bubble() -> None:
    """More micro-batches make it a smaller part of the step; there is none without a pipeline."""
    name = f"{HERE}:blocks"
    few, many = (predicted(on_mesh(name, 1, stage=0, micro_batch=1, accumulate=m, pp=2)) for m in (2, 8))
    assert few.seconds is not None
    assert few.step_seconds == pytest.approx(sum(few.seconds.values()) + few.bubble_seconds)
    part = [each.bubble_seconds / each.step_seconds for each in (few, many) if each.step_seconds]
    assert 0.2 < part[0] < 1 / 3 + 0.05
    assert part[1] < part[0] / 2
    assert predicted(on_mesh(name, 2, stage=0, micro_batch=1)).bubble_seconds == 0


# -- the commands -------------------------------------------------------------------------------------------------------


def test_plan_says_each_rank_of_a_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", f"{HERE}:blocks", "--mesh", "pp=2", "--zero", 1, "--machine", "h100", "--limit", "60kB"]
    (each,) = answer(capsys, *words, code=1)["candidates"]
    assert (each["pp"], each["accumulate"], each["schedule"], each["mesh"]) == (
        2,
        4,
        "one_f_one_b",
        "mesh = comm.mesh(dp=1, pp=2)",
    )
    peaks = [stage["memory"]["peak"] for stage in each["stages"]]
    assert each["memory"]["peak"] == max(peaks)
    assert each["bubble_seconds"] > 0
    out = run(capsys, *words)[1]
    assert all(word in out for word in ("rank 0 of pp", "rank 1 of pp", "bubble", "send", "what does not fit"))


@pytest.mark.parametrize(
    ("kind", "words", "says"),
    [
        ("llama", ["--mesh", "tp=3"], "tp=3: the model has 4 attention heads, which do not divide by 3; use 1, 2, 4"),
        ("llama", ["--mesh", "sp=3"], "sp=3: 8 tokens of a row do not divide by 3; use 1, 2, 4, 8, or another --seq"),
        ("llama", ["--mesh", "pp=3"], "pp=3: one_f_one_b has 3 stages, and the model 2 layers"),
        ("llama", ["--mesh", "dp=2,ep=2"], "ep=2: the model has no experts"),
        ("mixtral", ["--mesh", "dp=8,ep=8"], "has 4 experts, which do not divide by 8; use 1, 2, 4"),
        ("mixtral", ["--mesh", "ep=2"], "ep=2 does not divide the 1 ranks of dp, over which experts are split; use 1"),
        ("llama", ["--mesh", "pp=2", "--schedule", "zb_h9"], "--schedule: 'zb_h9' is not one of gpipe, one_f_one_b"),
        ("llama", ["--mesh", "dp=2,dp=2"], "--mesh: the axis 'dp' has two sizes"),
        ("llama", ["--mesh", "cp=2"], "--mesh: the axis 'cp' is not one of dp, pp, sp, tp, ep"),
        ("llama", ["--mesh", "sp=0"], "--mesh: 'sp=0' should be an axis and its size"),
        (f"{HERE}:mlp", ["--mesh", "sp=2"], "sp=2: the model does not define how sequences are split: give sequence"),
        (f"{HERE}:mlp", ["--mesh", "dp=2,ep=2"], "ep=2: the model has no experts"),
        (f"{HERE}:mlp", ["--mesh", "pp=8"], "pp=8: "),
        ("shapes", ["--mesh", "pp=2"], "pp=2: only shapes are known"),
    ],
)
def test_meshes_that_cannot_be(
    kind: str, words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = kind if ":" in kind else causal_model(tmp_path, kind) if kind != "shapes" else str(tmp_path / "shapes.json")
    (tmp_path / "shapes.json").write_text('{"w": [4, 4]}')
    assert says in refusal(capsys, "plan", name, "--seq", 8, "--zero", 1, *words)


def test_every_mesh_is_enumerated() -> None:
    """Law: each candidate has all ranks and trains on all rows; no two are the same."""
    job, sizes = job_of(f"{HERE}:mlp"), {"tp": [1, 2], "sp": [1, 2], "pp": [1, 2], "ep": [1, 2]}
    found = candidates_of(job, 4, 8, SearchSpace([0, 1], ["fp32"], [1], schedules=["gpipe", "zb_h1"], axes=sizes))
    assert {each.world_size for each in found} == {4}
    assert {each.data.rows for each in found} == {8}
    assert len({json.dumps(as_dict(each)) for each in found}) == len(found)
    meshes = {tuple(size(each, axis) for axis in ("dp", "tp", "sp", "pp", "ep")) for each in found}
    assert len(meshes) == 2 + 3 * 2 + 3  # dp = 4, 2 and 1; with ep = 2, too, where that divides dp
    assert {each["schedule"] for each in map(as_dict, found) if each["pp"] > 1} == {"gpipe", "zb_h1"}
    with pytest.raises(CommandError, match="no mesh"):
        candidates_of(job, 3, 3, SearchSpace([0], ["fp32"], axes={"tp": [2]}))


def test_tune_tries_all_axes_and_its_lines_are_built(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every line that was measured makes a step with the predicted bytes; what a model does not admit has its reason."""
    monkeypatch.setattr(tune_command, "measure", lambda job, *, timeout: Measurement(0.5 if size(job, "pp") > 1 else 1.0, 1, 1))
    name = f"{HERE}:tokens"
    words = [
        "--rows",
        2,
        "--ranks",
        2,
        "--zero",
        1,
        "--micro-batch",
        1,
        "--best",
        9,
        "--machine",
        "h100",
        "--precision",
        "fp32",
    ]
    found = answer(capsys, "tune", name, *words)
    assert "no experts" in next(row["why"] for row in found["refused"] if row["name"].startswith("ep"))
    assert (found["winner"]["pp"], found["winner"]["accumulate"]) == (2, 2)
    assert {axis for each in found["runs"] for axis in ("pp", "sp", "tp") if each[axis] == 2} == {"pp", "sp", "tp"}
    for each in found["runs"]:
        states = comm.simulate(built_from, name, each, world_size=2)
        assert max(states) == each["predicted"]["state"]
    shown = run(capsys, "tune", name, *words)[1]
    assert "mesh = comm.mesh(dp=1, pp=2)" in shown
    assert 'pipeline = {schedule = "one_f_one_b", micro_batches = 2, group = "pp"}' in shown


def built_from(name: str, row: dict[str, Any]) -> int:
    """The bytes of state of the step that a row's lines make."""
    job = job_of(name).changed({"strategy": row["job"]["strategy"], "mesh": row["job"].get("mesh")})
    subject = subject_of(job, device="cpu").piped_for(job)
    names: dict[str, Any] = {"fds": fds, "comm": comm, "T": T, "pp": pipelining, "tp_plan": subject.tp_plan}
    exec(row["mesh"] or "", names)
    names["stages"] = subject.stages
    assert subject.loss is not None
    step = eval(row["line"], names)(fds.train_step(subject.loss, fds.adam(1e-3)))
    assert subject.batch is not None
    state, metrics = step(step.init(subject.params), subject.batch(row["accumulate"]))
    assert metrics["loss"].isfinite()
    return fds.memory.measured(state).state


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--axis", "pp=3"], "--axis pp=3 does not divide 2 ranks; use 1, 2"),
        (["--axis", "sp=1,2"], "sp=2: the model does not define how sequences are split"),
        (["--axis", "dp=2"], "--axis: 'dp=2' should be one of tp, sp, pp, ep with its numbers of ranks"),
        (["--schedule", "none"], "--schedule: 'none' is not one of gpipe"),
        (["--axis", "ep=2"], "ep=2: the model has no experts"),
    ],
)
def test_tune_refuses(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in refusal(capsys, "tune", f"{HERE}:mlp", "--rows", 2, "--ranks", 2, "--machine", "h100", *words)


# -- processes ----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(0)
def test_tune_on_tensor_parallel_processes(capsys: pytest.CaptureFixture[str]) -> None:
    """The whole command, with a child and two ranks over Gloo."""
    words = ["--rows", 1, "--ranks", 2, "--axis", "tp=2", "--steps", 1, "--precision", "fp32", "--machine", "h100"]
    winner = answer(capsys, "tune", f"{HERE}:cut", *words)["winner"]
    assert (winner["tp"], winner["why"]) == (2, None)
    assert winner["measured"]["state"] == winner["predicted"]["state"]
    assert winner["measured"]["step_seconds"] > 0


def test_trials_of_two_processes() -> None:
    """A pipeline and a cut sequence over Gloo: their states are those that are predicted for each rank."""
    jobs = [on_mesh(f"{HERE}:tokens", micro_batch=1, accumulate=2, **{axis: 2}) for axis in ("pp", "sp")]
    ranks = comm.spawn(trials, [job.changed({"steps": 1}) for job in jobs], world_size=2, backend="gloo")
    for place, job in enumerate(jobs):
        mine = predicted(job)
        shapes = mine.stages or (mine.shape, mine.shape)
        assert [rank[place] for rank in ranks] == [shape.memory.state for shape in shapes]


def trials(jobs: list[Job]) -> list[int]:
    """The bytes of state in each."""
    return [run_rank(job)[2] for job in jobs]


def test_a_mesh_is_a_line() -> None:
    job = on_mesh(f"{HERE}:tokens", 4, pp=2, sp=2, ep=2)
    assert mesh_line(job) == "mesh = comm.mesh(edp=2, ep=2, pp=2, sp=2)"
    assert first_ranks(job) == (0, 2)
    assert mesh_line(on_mesh(f"{HERE}:tokens", 2)) == ""
