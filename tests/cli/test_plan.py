"""``plan`` predicts what a run holds, needs at most, sends and computes."""

import json
import math
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.cli.planning.candidate import candidate, line_of, name_of, with_config
from functional_ds.cli.planning.subject import job_of, planned
from functional_ds.cli.planning.values_free_step import step_shape
from functional_ds.comm.record.ledger import Row
from functional_ds.comm.table.rows import ALL_REDUCE
from functional_ds.dry_run.operations import OperationCounter, SizedOperation
from functional_ds.jobs.job import Job
from functional_ds.jobs.job_subject import subject_of
from functional_ds.jobs.resolve import Surroundings
from functional_ds.jobs.strategy import rows_of_rank, strategy_of
from functional_ds.scaling.machine import FACTORS, MACHINES, Machine
from tests.cli.candidates import on_mesh
from tests.cli.models_by_name import HERE
from tests.cli.running import answer, refusal, run

KEYS = {"name", "ranks", "tp", "sp", "pp", "ep", "schedule", "mesh", "stage", "precision", "micro_batch", "accumulate"}
KEYS |= {"recompute", "memory", "peak_has_activations", "limit", "fits", "why_not", "sent", "flops", "seconds", "line"}
KEYS |= {"bubble_seconds", "step_seconds", "samples_per_second", "stages", "job"}


def llama(folder: Path) -> str:
    """A folder with a small model's config."""
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_key_value_heads": 1, **sizes}))
    return str(folder)


def trained(job: Job) -> tuple[Any, ...]:
    """A state, the batch, and the step, after two steps."""
    torch.manual_seed(0)  # ranks of tp have the same batch
    subject = subject_of(job, device="cpu")
    assert subject.batch is not None
    step, batch = subject.step(job), subject.batch(rows_of_rank(job))
    state = step.init(subject.params)
    del subject
    for _ in range(2):
        state, _ = step(state, batch)
    return step, state, batch


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("stage", "precision", "accumulate", "recompute"),
    [(0, "fp32", 1, False), (1, "bf16", 2, False), (2, "fp32", 2, True), (3, "bf16", 1, False), (3, "fp32", 1, True)],
)
def test_state_bytes_and_operations_are_those_of_a_run(stage: int, precision: str, accumulate: int, recompute: bool) -> None:
    model = f"{HERE}:{'blocks' if recompute else 'mlp'}"
    job = on_mesh(
        model,
        2,
        stage=stage,
        precision=precision,
        micro_batch=3,
        accumulate=accumulate,
        recompute=recompute,
    )
    mine = step_shape(planned(job), job, rank=1)

    def program() -> tuple[int, dict[tuple[str, str], int], int]:
        step, state, batch = trained(job)
        with comm.ledger() as book, OperationCounter() as counter:
            state, _ = step(state, batch)
        rows = {(row.collective, row.group): row.bytes for row in book.rows}
        return fds.memory.measured(state).state, rows, counter.flops

    held, sent, flops = comm.simulate(program, world_size=2)[1]
    assert mine.memory.state == held
    assert {(row.collective, row.group): row.bytes for row in mine.sent} == sent
    assert mine.flops == flops


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("model", "stage", "precision", "accumulate"),
    [("cut", 0, "fp32", 1), ("cut", 2, "bf16", 2), ("cut", 3, "fp32", 1), ("llama", 3, "bf16", 1)],
)
def test_a_mesh_with_tp_is_that_of_a_run(model: str, stage: int, precision: str, accumulate: int, tmp_path: Path) -> None:
    """State, traffic by collective and group, operations: equal."""
    name = llama(tmp_path) if model == "llama" else f"{HERE}:{model}"
    job = on_mesh(
        name,
        2,
        stage=stage,
        precision=precision,
        micro_batch=32,
        accumulate=accumulate,
        tp=2,
    )
    mine = step_shape(planned(job), job, rank=3)

    def program() -> tuple[int, dict[tuple[str, str], int], int]:
        step, state, batch = trained(job)
        with comm.ledger() as book, OperationCounter() as counter:
            state, _ = step(state, batch)
        rows = {(row.collective, row.group): row.bytes for row in book.rows}
        return fds.memory.measured(state).state, rows, counter.flops

    held, sent, flops = comm.simulate(program, world_size=4)[3]
    assert (mine.memory.state, mine.flops) == (held, flops)
    assert {(row.collective, row.group): row.bytes for row in mine.sent} == sent
    assert any(group == "tp" and count for (_, group), count in sent.items())


def _allocated(job: Job) -> int:
    """The peak of torch's allocator in a step, over what is there before it."""
    step, state, batch = trained(job)
    standing = fds.memory.measured(state).state + batch.nbytes
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step(state, batch)
    now = most = 0
    for event in seen.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return standing + most


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("model", "stage", "recompute"),
    [("blocks", 0, False), ("blocks", 3, False), ("blocks", 2, True), ("attention", 1, False), ("attending", 0, True)],
)
def test_the_peak_is_within_ten_percent_of_the_allocators(model: str, stage: int, recompute: bool) -> None:
    job = on_mesh(f"{HERE}:{model}", 1, stage=stage, precision="fp32", micro_batch=64, recompute=recompute)
    assert step_shape(planned(job), job).peak == pytest.approx(_allocated(job), rel=0.1)


def test_activations_are_kept_beside_gathered_units() -> None:
    """Without values all tensors lie at one address; stage 3 must tell activations from params there."""
    candidates = [on_mesh(f"{HERE}:blocks", 2, stage=stage, micro_batch=256) for stage in (2, 3)]
    stage_2, stage_3 = (step_shape(planned(each), each).activations for each in candidates)
    assert stage_3 == pytest.approx(stage_2, rel=0.2)


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", f"{HERE}:mlp", "--mesh", "dp=4", "--zero", "1,3", "--precision", "fp32", "--machine", "h100"]
    found = answer(capsys, *words)
    assert found.keys() == {"model", "ranks", "machine", "candidates", "best", "fits"}
    assert all(each.keys() == KEYS for each in found["candidates"])
    first, second = found["candidates"]
    assert (first["stage"], second["stage"], first["limit"]) == (1, 3, 80 * 10**9)
    assert second["memory"]["state"] <= first["memory"]["state"]
    assert first["seconds"].keys() == set(FACTORS)
    assert first["step_seconds"] == pytest.approx(sum(first["seconds"].values()))
    out = run(capsys, *words)[1]
    assert all(word in out for word in ("memory of a rank", "sent by a rank in a step", "reduce_scatter", "T.zero(1)"))


def test_what_does_not_fit_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "plan", f"{HERE}:mlp", "--limit", "1kB", "--zero", "2", code=1)
    assert found["fits"] == []
    assert "the state alone does" in found["candidates"][0]["why_not"]
    assert "what does not fit" in run(capsys, "plan", f"{HERE}:mlp", "--limit", "1kB", "--zero", "2")[1]


def test_a_config_is_the_strategy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "fp16": {"enabled": True},
        "zero_optimization": {"stage": 1},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    found = answer(capsys, "plan", f"{HERE}:mlp", "--config", tmp_path / "ds.json", "--mesh", "dp=2", "--explain")
    (each,) = found["candidates"]
    assert (each["stage"], each["precision"], each["micro_batch"], each["accumulate"]) == (1, "fp16", 2, 2)
    assert {"key": "zero_optimization.stage", "became": "supported", "reason": "`T.zero(1, world)`."} in found["explain"]


def test_shapes_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "shapes.json").write_text(json.dumps({"w": [64, 32], "b": {"shape": [32], "dtype": "float32"}}))
    found = answer(capsys, "plan", tmp_path / "shapes.json", "--mesh", "dp=2", "--zero", "0", "--precision", "fp32")
    assert found["model"] == {"name": str(tmp_path / "shapes.json"), "parameters": 64 * 32 + 32, "complete": False}
    (each,) = found["candidates"]
    assert each["memory"]["params"] == 4 * (64 * 32 + 32)
    assert each["memory"]["activations"] is None
    assert each["step_seconds"] is None


def test_a_hugging_face_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", llama(tmp_path), "--zero", "2", "--seq", 8, "--precision", "fp32", "--device", "cpu"]
    found = answer(capsys, *words)
    job = on_mesh(str(tmp_path), 1, stage=2, precision="fp32")
    subject = subject_of(job, device="cpu")
    assert subject.batch is not None
    step = subject.step(job)
    state = step.init(subject.params)
    with OperationCounter() as counter:
        state, _ = step(state, subject.batch(1))
    assert found["candidates"][0]["flops"] == counter.flops
    assert found["candidates"][0]["memory"]["state"] == fds.memory.measured(state).state


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nothing"], "neither a file nor 'module:function'"),
        (["none.json"], "there is no file none.json"),
        (["none.py:model"], "there is no file none.py"),
        (["no_such_module:model"], "there is no module 'no_such_module'"),
        ([f"{HERE}:nothing"], "has no 'nothing'"),
        ([f"{HERE}:wrong"], "it made a int"),
        ([f"{HERE}:raises"], "raised ZeroDivisionError: no model today"),
        ([f"{HERE}:reads"], "meta tensors"),
        ([f"{HERE}:mlp", "--zero", "4"], "--zero: 4 should be from 0 to 3"),
        ([f"{HERE}:mlp", "--precision", "fp8"], "'fp8' is not one of fp32, bf16, fp16"),
        ([f"{HERE}:mlp", "--mesh", "dp=x"], "'dp=x' should be an axis and its size"),
        ([f"{HERE}:mlp", "--mesh", "dp=2,tp=2"], "tp=2: the model does not define how layers are sliced"),
        ([f"{HERE}:cut", "--mesh", "tp=3", "--zero", "0"], "does not divide"),
        ([f"{HERE}:cut_wrongly", "--mesh", "tp=2", "--zero", "0"], "'colwize'"),
        ([f"{HERE}:mlp", "--limit", "much"], "not a number of bytes"),
        ([f"{HERE}:mlp", "--machine", "abacus"], "neither a file nor one of a100-40gb"),
        ([f"{HERE}:mlp", "--micro-batch", "0"], "--micro-batch': Input should be greater than or equal to 1"),
        ([f"{HERE}:mlp", "--device", "tpu"], "'tpu' is not one of 'cuda', 'cpu'"),
        ([f"{HERE}:mlp", "--config", "none.json"], "there is no file none.json"),
        ([f"{HERE}:plain", "--recompute", "--zero", "0"], "remat"),
    ],
)
def test_input_that_cannot_be_used(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in refusal(capsys, "plan", *words)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not valid JSON"),
        ('{"train_batch_sise": 8}', "train_batch_size"),
        ('{"train_batch_size": 8, "train_batch_size": 8}', "train_batch_size"),
        ('{"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2}', "9 rows are not"),
    ],
)
def test_a_typo_in_a_config_is_named(tmp_path: Path, text: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ds.json").write_text(text)
    assert says in refusal(capsys, "plan", f"{HERE}:mlp", "--config", tmp_path / "ds.json")


@pytest.mark.parametrize("text", ["[]", "{}", '{"w": 3}', '{"w": [-1]}', '{"w": {"shape": [1], "dtype": "float99"}}', "{"])
def test_wrong_shapes(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "shapes.json").write_text(text)
    assert "shapes.json" in refusal(capsys, "plan", tmp_path / "shapes.json")


# -- lines and machines ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_line_is_the_strategy(stage: int, precision: str) -> None:
    job = on_mesh(f"{HERE}:mlp", 1, stage=stage, precision=precision, micro_batch=2, accumulate=2)
    made = eval(line_of(job), {"fds": fds, "T": T})
    assert repr(made) == repr(strategy_of(job, Surroundings())[0])


def test_a_line_with_tp_is_the_strategy() -> None:
    job = on_mesh(f"{HERE}:cut", 2, stage=3, precision="fp32", micro_batch=1, tp=2)
    assert name_of(job).endswith(", tp 2")
    assert 'T.zero(3, mesh["dp"]), T.clip(1.0), T.tensor_parallel(tp_plan, mesh["tp"]))' in line_of(job)

    def program() -> tuple[str, str]:
        subject = planned(job)
        names = {"fds": fds, "T": T, "mesh": comm.mesh(dp=2, tp=2), "tp_plan": subject.layer_plan()}
        loss = lambda params, x: x.sum()  # noqa: E731
        return str(eval(line_of(job), names)(fds.train_step(loss, fds.adamw(1e-3)))), str(subject.step(job))

    made, ours = (found.partition(" -> ")[2] for found in comm.symmetric(program, world_size=4))
    assert made == ours


def test_traffic_is_drawn_by_axis(capsys: pytest.CaptureFixture[str]) -> None:
    sent = answer(capsys, "draw", "traffic", f"{HERE}:cut", "--mesh", "dp=2,tp=2", "--zero", "0")["bytes"]
    assert [[bool(count) for count in row] for row in sent["tp"]] == [[j == i ^ 1 for j in range(4)] for i in range(4)]
    assert [[bool(count) for count in row] for row in sent["dp"]] == [[j == i ^ 2 for j in range(4)] for i in range(4)]


def test_a_config_is_its_line(tmp_path: Path) -> None:
    config = {"train_batch_size": 2, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    job = candidate(with_config(job_of(f"{HERE}:mlp"), str(tmp_path / "ds.json")), {"dp": 2}, recompute=True)
    assert line_of(job) == "fds.compose(T.remat(), fds.from_ds_config(config, 2).transform)"


def test_a_ring_takes_what_the_model_says() -> None:
    machine = Machine("m", 1e12, 1e12, 1e12, link_bandwidth=1e9, link_latency=1e-6)
    payload, n = 4 * 10**6, 4
    row = Row("all_reduce", "world", n, calls=2, bytes=2 * 2 * (n - 1) * payload // n, traffic=ALL_REDUCE.traffic)
    assert machine.sends(row) == pytest.approx(2 * (2 * (n - 1) * 1e-6 + 2 * (n - 1) / n * payload / 1e9))


def test_a_gpu_computes_beside_its_host() -> None:
    machine = Machine("m", 1e12, 1e12, 1e12, 1e9, operation_latency=1e-3, factors={"products": 2.0, "starts": 3.0})
    work = {SizedOperation("products", half=True, flops=10**12): 1, SizedOperation("copies"): 999}
    perfect = machine.perfect_seconds(work, ())
    assert (perfect["products"], perfect["starts"]) == (1.0, 1.0)
    assert machine.scaled(perfect)["starts"] == pytest.approx(3.0 - 2.0)
    assert sum(attrs.evolve(machine, device="cpu").scaled(perfect).values()) == pytest.approx(3.0 + 2.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            ("factors", each)
            for each in ({"product": 1.0}, {"products": -1.0}, {"products": True}, {"update": math.nan}, [1.0])
        ),
        *[("flops", 0), ("memory_bandwidth", math.inf), ("link_latency", -1.0), ("page_bandwidth", "fast"), ("device", "tpu")],
    ],
)
def test_wrong_machines(field: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.json").write_text(json.dumps({**attrs.asdict(MACHINES["h100"]), field: value}))
    assert f"--machine: {field}" in refusal(capsys, "plan", f"{HERE}:mlp", "--machine", tmp_path / "m.json")


def test_machines_are_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.json").write_text(json.dumps({**attrs.asdict(MACHINES["h100"]), "memory": 10**6}))
    found = answer(capsys, "plan", f"{HERE}:mlp", "--machine", tmp_path / "m.json", "--zero", "0")
    assert found["candidates"][0]["limit"] == 10**6
    (tmp_path / "m.json").write_text(json.dumps({"flops": 0}))
    assert "should be JSON with" in refusal(capsys, "plan", f"{HERE}:mlp", "--machine", tmp_path / "m.json")
