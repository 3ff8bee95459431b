"""Jobs as they run: plain PyTorch's losses, on any ranks; resumed; with each kind of strategy; and refused by name."""

import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import functional_ds as fds
from functional_ds import comm
from functional_ds.jobs import Job, JobError, JobResult, TokenText
from functional_ds.jobs.job_data import read_files
from functional_ds.jobs.resolve import user_object
from tests.jobs.tiny_models import plain

HERE = Path(__file__).parent
ROUNDING = 1e-5  # of losses about 5
LIMIT = 0.3  # below the norms of gradients


class Set:
    """A flag that is set."""

    def is_set(self) -> bool:
        return True


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} times {i} is {i * i}; " for i in range(300)))
    return path


@pytest.fixture
def job(text: Path) -> Job:
    data = {
        "model": {"tiny_models:plain": {"width": 4}},
        "steps": 4,
        "seed": 3,
        "strategy": [{"clip": LIMIT}],
        "optimizer": {"adamw": {"lr": 0.05, "weight_decay": 0.1}},
        "schedule": {"warmup_cosine": {"steps": 2, "total": 4, "floor": 0.1}},
        "data": {"files": [str(text)], "rows": 4, "context": 8},
        "evaluation": {"every": 2, "batches": 2},
        "logs": {"every": 1},
        "folder": str(HERE),
    }
    return Job(**data)


def torchs(job: Job) -> tuple[list[float], float]:
    """Plain PyTorch's losses of the steps, and the validation loss after them."""
    text = TokenText.cut(
        torch.frombuffer(bytearray(b"".join(read_files(job.data.files))), dtype=torch.uint8), 0.1, source="", context=8
    )
    torch.manual_seed(job.seed)
    model = plain(4)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05, weight_decay=0.1)

    def loss(split: str, index: int) -> torch.Tensor:
        x, y = text.batch(split, index, rows=4, context=8, seed=job.seed)
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    losses = []
    for index in range(job.steps):
        factor = (index + 1) / 2 if index < 2 else 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (index - 2) / 2))
        optimizer.param_groups[0]["lr"] = 0.05 * factor
        optimizer.zero_grad()
        found = loss("train", index)
        found.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
        losses.append(found.item())
    with torch.no_grad():
        return losses, torch.stack([loss("validation", index) for index in range(2)]).mean().item()


# -- the laws ----------------------------------------------------------------------------------------------------------


def test_a_job_has_plain_pytorchs_losses(job: Job) -> None:
    generator = torch.manual_seed(11).get_state()
    found = fds.run_job(job)
    assert bool((torch.get_rng_state() == generator).all())
    losses, validation = torchs(job)
    assert list(found.losses.values()) == pytest.approx(losses, rel=ROUNDING)
    assert found.validation[4] == pytest.approx(validation, rel=ROUNDING)
    assert (found.done, list(found.losses), list(found.validation)) == (4, [1, 2, 3, 4], [0, 2, 4])


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        ([{"zero": 0}, {"clip": LIMIT}], {"ranks": 2}),
        ([{"zero": 3}, {"accumulate": 2}, {"clip": LIMIT}], {"ranks": 2}),
        ([{"zero": {"stage": 2, "unit_of": {"by_bytes": 100}, "group": "dp"}}, {"clip": LIMIT}], {"mesh": {"dp": 2, "tp": 2}}),
        ([{"zero": {"stage": 1, "unit_of": "by_leaf"}}, {"tiny_models:clipped": {"limit": LIMIT}}], {"ranks": 4}),
        ([{"offload": "cpu"}, {"zero": 2}, {"remat": "output"}, {"clip": LIMIT}], {"ranks": 1}),
    ],
)
def test_losses_do_not_depend_on_ranks_or_strategy(job: Job, strategy: list[Any], changes: dict[str, Any]) -> None:
    """Law 19, on jobs."""
    alone = fds.run_job(job)
    found = fds.run_job(job.changed({"strategy": strategy, "simulate": True, **changes}))
    assert list(found.losses.values()) == pytest.approx(list(alone.losses.values()), rel=ROUNDING)
    assert list(found.validation.values()) == pytest.approx(list(alone.validation.values()), rel=ROUNDING)


def test_processes_train_as_simulated_ranks(job: Job) -> None:
    """Law 18, on jobs: bit for bit."""
    job = job.changed({"strategy": [{"zero": 3}, {"clip": LIMIT}], "ranks": 2})
    assert fds.run_job(job) == fds.run_job(job.changed({"simulate": True}))


def test_ranks_that_are_there_already_are_used(job: Job) -> None:
    job = job.changed({"strategy": [{"zero": 1}, {"clip": LIMIT}]})
    started = fds.run_job(job.changed({"ranks": 2, "simulate": True}))
    assert comm.simulate(fds.run_job, job, world_size=2) == [started, JobResult(4, {}, {})]  # rank 0 logs


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_job_is_one_that_ran_through(job: Job, tmp_path: Path, ranks: int) -> None:
    """Law 37, on jobs: bit for bit, wherever it was ended."""
    job = job.changed({"strategy": [{"zero": 2}, {"clip": LIMIT}], "ranks": ranks, "simulate": True, "evaluation": None})
    whole = fds.run_job(job)
    saving = job.changed({"checkpoints": {"folder": tmp_path / "saved"}})
    ended = fds.run_job(saving, stop=Set())
    assert ended.interrupted
    assert ended.done < 4
    resumed = fds.run_job(saving)
    assert {**ended.losses, **resumed.losses} == whole.losses
    assert set(resumed.losses) == set(range(ended.done + 1, 5))
    assert fds.run_job(saving).losses == {}  # all is done
    anew = fds.run_job(saving.changed({"checkpoints.resume": False, "checkpoints.folder": tmp_path / "other"}))
    assert anew.losses == whole.losses


def test_torchruns_number_of_ranks_wins(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here in a world of one; tests/examples/test_train_gpt.py has one of two, which torchrun starts."""
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert fds.run_job(job.changed({"ranks": 2})).losses == pytest.approx(dict(enumerate(torchs(job)[0], 1)), rel=ROUNDING)
    assert not torch.distributed.is_initialized()
    config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    fds.jobs.check_job(job.changed({"ranks": 2, "strategy": None, "deepspeed": {"config": tmp_path / "ds.json"}}), 1)
    with pytest.raises(JobError, match="torchrun has started the ranks; leave simulate out"):
        fds.run_job(job.changed({"simulate": True}))
    with pytest.raises(JobError, match="the mesh has 2 ranks, and there are 1"):
        fds.run_job(job.changed({"mesh": {"dp": 2}, "strategy": None}))


# -- what a job can name -----------------------------------------------------------------------------------------------


def losses_of(job: Job, **changes: Any) -> list[float]:
    return list(fds.run_job(job.changed({"evaluation": None, **changes})).losses.values())


def test_a_deepspeed_config_is_a_strategy(job: Job, tmp_path: Path) -> None:
    config = {
        "train_batch_size": "auto",
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 2},
        "gradient_clipping": LIMIT,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.1}},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    changes = {"optimizer": None, "strategy": None, "ranks": 2, "simulate": True}
    named = job.changed({**changes, "deepspeed": {"config": tmp_path / "ds.json"}})
    assert losses_of(named) == pytest.approx(losses_of(job), rel=ROUNDING)
    with pytest.raises(JobError, match="optimizer: the DeepSpeed config names one, too"):
        fds.run_job(named.changed({"optimizer": {"sgd": 0.1}}))
    with pytest.raises(JobError, match=r"mesh = {'tp': 2}: a DeepSpeed config needs an axis dp"):
        fds.run_job(named.changed({"mesh": {"tp": 2}}))
    (tmp_path / "ds.json").write_text(json.dumps({**config, "train_batch_size": 8}))
    with pytest.raises(JobError, match=r"data\.rows = 4: the DeepSpeed config's batch has 8 rows; make the two equal"):
        fds.run_job(named)
    (tmp_path / "ds.json").write_text(json.dumps({**config, "zero_optimisation": {}}))
    with pytest.raises(JobError, match="the nearest is `zero_optimization"):
        fds.run_job(named)


@pytest.mark.parametrize(
    ("optimizer", "same"),
    [
        ({"muon": {"lr": 0.01, "others": {"adamw": {"lr": 0.05}}}}, lambda: fds.muon(0.01, fds.adamw(0.05))),
        (
            {"param_groups": {"rules": {"bias": {"sgd": 0.1}}, "others": {"adamw": 0.05}}},
            lambda: fds.param_groups({"bias": fds.sgd(0.1)}, fds.adamw(0.05)),
        ),
        (
            {"one_bit_adam": {"lr": 0.05, "warmup": 2, "codec": {"OneBit": {"size": 8}}}},
            lambda: fds.one_bit_adam(0.05, warmup=2, codec=comm.codecs.OneBit(8)),
        ),
    ],
)
def test_optimizers_within_optimizers(job: Job, optimizer: dict[str, Any], same: Any) -> None:
    from functional_ds.jobs.resolve import Surroundings
    from functional_ds.jobs.strategy import strategy_of

    _, found = strategy_of(job.changed({"optimizer": optimizer}), Surroundings())
    assert repr(found) == repr(same())
    if "one_bit_adam" not in optimizer:
        assert len(losses_of(job, optimizer=optimizer)) == 4


LLAMA = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def test_a_config_of_hugging_face_on_a_mesh(job: Job) -> None:
    """Tensor and sequence parallelism by name: the losses of one device."""
    pytest.importorskip("transformers")
    llama = job.changed({"model": {"huggingface": {"config": LLAMA}}, "steps": 2, "simulate": True})
    cut = [
        {"zero": {"stage": 2, "group": "dp,sp"}},
        {"sequence": {"group": "sp", "layout": "zigzag"}},
        {"tensor_parallel": {"plan": "auto", "group": "tp"}},
        {"clip": LIMIT},
    ]
    changes = {"mesh": {"dp": 1, "sp": 2, "tp": 2}, "strategy": cut, "model.huggingface.attention": "fds_ring"}
    assert losses_of(llama, **changes) == pytest.approx(losses_of(llama), rel=ROUNDING)


@pytest.mark.parametrize(
    ("pipeline", "mesh"),
    [
        ({"schedule": "one_f_one_b", "micro_batches": 2}, {"pp": 2}),
        ({"schedule": "zbv", "micro_batches": 2, "by": "parameters"}, {"dp": 2, "pp": 2}),
        ({"schedule": "interleaved_one_f_one_b", "micro_batches": 4, "stages_per_rank": 2}, {"pp": 2}),
    ],
)
def test_a_pipeline_by_its_schedules_name(job: Job, pipeline: dict[str, Any], mesh: dict[str, int]) -> None:
    """Law 36, on jobs."""
    alone = job.changed({"model": {"tiny_models:Deep": {"blocks": 4}}, "steps": 2})
    zero = [{"zero": {"stage": 1, "group": "dp"}}] if "dp" in mesh else []
    strategy = [*zero, {"pipeline": {**pipeline, "group": "pp"}}, {"clip": LIMIT}]
    found = fds.run_job(alone.changed({"strategy": strategy, "mesh": mesh, "simulate": True}))
    expected = fds.run_job(alone)
    assert list(found.losses.values()) == pytest.approx(list(expected.losses.values()), rel=ROUNDING)
    assert list(found.validation.values()) == pytest.approx(list(expected.validation.values()), rel=ROUNDING)


def test_deferred_params_are_those_drawn_at_once(job: Job) -> None:
    """On ranks that never have the whole model; bit for bit."""
    job = job.changed({"strategy": [{"zero": 3}], "ranks": 2, "simulate": True, "model.tiny_models:plain.width": 6})
    assert losses_of(job, deferred=True) == losses_of(job)


def test_weights_of_hugging_face(job: Job, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(**LLAMA)
    whole = transformers.AutoModelForCausalLM.from_config(config)
    whole.save_pretrained(tmp_path / "llama")
    named = job.changed({"model": {"huggingface": {"config": "llama", "weights": True}}, "folder": str(tmp_path)})
    params = fds.jobs.prepare(named).init().params
    assert all(torch.equal(params[name], value) for name, value in whole.named_parameters())
    drawn = fds.jobs.prepare(named.changed({"model.huggingface.weights": None})).init().params
    assert not torch.equal(drawn["lm_head.weight"], whole.lm_head.weight)
    with pytest.raises(JobError, match="deferred = True: weights are loaded at once"):
        fds.jobs.prepare(named.changed({"deferred": True}))


def test_losses_that_are_not_finite_end_a_job(job: Job, tmp_path: Path) -> None:
    wild = job.changed({"optimizer": {"sgd": 1e30}, "strategy": None, "schedule": None, "steps": 20, "evaluation": None})
    with pytest.raises(fds.fitting.NonFiniteLossError):
        fds.run_job(wild)
    assert not math.isfinite(fds.run_job(wild.changed({"on_non_finite": "ignore", "timeout": 0})).losses[20])


def test_logs_and_profiles_are_written(job: Job, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    logs = {"csv": str(tmp_path / "log.csv"), "tensorboard": str(tmp_path / "board"), "every": 2}
    fds.run_job(job.changed({"logs": logs, "profile": {"folder": tmp_path / "profile", "skip": 0, "peak": 1e9}}))
    text = (tmp_path / "log.csv").read_text()
    assert "4,loss,5." in text
    assert "2,validation,5." in text
    assert list((tmp_path / "board").iterdir())
    assert json.loads((tmp_path / "profile/profile.json").read_text())


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"model": {"tiny_models:plain": {"widht": 4}}},
            "plain.widht = 4: there is no such argument; the nearest is 'width'",
        ),
        ({"model": {"tiny_models:plain": {"width": "4"}}}, "model.tiny_models:plain.width = '4': it must be a whole number"),
        ({"model": {"tiny_models:Tiny": {"config": {"width": 3}}}}, "config = {'width': 3}: width 3 is odd"),
        (
            {"model": {"tiny_models:Tiny": {"config": {"with": 3}}}},
            "config.with = 3: there is no such argument; the nearest is",
        ),
        ({"model": "tiny_models:Tiny"}, "missing 1 required positional argument: 'config'"),
        ({"model": "tiny_models:plian"}, "tiny_models has no 'plian'; the nearest is 'plain'"),
        ({"model": "tiny_modles:plain"}, "there is no module 'tiny_modles', neither in"),
        ({"model": ":plain"}, "'' is not a module's name; write module:function"),
        ({"model": ".tiny_models:plain"}, "'.tiny_models' is not a module's name"),
        ({"model": "tiny_models:no_model"}, "it made a str, and must make a torch.nn.Module"),
        ({"model.tiny_models:plain.vocab": 32}, "the tokens go up to 116, and the model's largest embedding has 32 rows"),
        ({"model": "torch.nn:Flatten"}, "next_token takes logits of shape [4, 8, 'vocabulary'], and the model returned [4, 8]"),
        (
            {"schedule": {"warmup_cosine": {"steps": 5, "total": 4}}},
            "{'steps': 5, 'total': 4}: steps=5 must be in 0..total=4",
        ),
        (
            {"strategy": [{"zero": {"stage": 1, "group": "dq"}}], "mesh": {"dp": 2}},
            "zero.group = 'dq': the job's mesh has no axis",
        ),
        (
            {"strategy": [{"mixed_precision": "bf61"}]},
            "strategy.mixed_precision = {'policy': 'bf61'}: policy='bf61'",
        ),
        (
            {"strategy": [{"zero": 1}], "ranks": 3},
            "data.rows = 4: the rows do not divide among 3 ranks x 1 micro-batches",
        ),
        ({"strategy": ["tiny_models:clipped"]}, "strategy.tiny_models:clipped = {}: clipped() missing 1 required"),
        ({"strategy": [{"pipeline": {"schedule": "1f1b", "micro_batches": 2}}]}, "schedule = '1f1b': there is no schedule"),
        ({"strategy": [{"pipeline": {"schedule": "zbv", "micro_batches": 2, "stages_per_rank": 3}}]}, "zbv has 2 a rank"),
        ({"strategy": [{"pipeline": {"schedule": "gpipe", "micro_batches": 2}}], "ranks": 2}, "strategy.pipeline = "),
        ({"data.files": ["nowhere"]}, "data.files.0: "),
        ({"data.context": 10_000}, "fewer than context + 1 = 10001"),
        ({"data": {"text": "tiny_models:no_model"}}, "data.text: it returned no text"),
    ],
)
def test_what_no_rank_could_train_with_is_refused(job: Job, tmp_path: Path, changes: dict[str, Any], complaint: str) -> None:
    file = tmp_path / "job.toml"
    file.write_text(job.to_toml())
    with pytest.raises(JobError) as refused:
        fds.run_job(fds.load_job(file, allow_import=["tiny_models"]).changed({"simulate": True, **changes}))
    assert complaint in str(refused.value)
    assert str(file) in str(refused.value)


def test_errors_come_from_other_processes_as_they_are() -> None:
    for error in (JobError("p"), JobError("p", entry="e", value=3, file="f", line=4), JobError("p", entry="e", value=None)):
        assert repr(pickle.loads(pickle.dumps(error))) == repr(error)
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_module_that_fails_is_run_anew_once_it_is_mended(tmp_path: Path) -> None:
    """Also where another module has its name, as tests' helpers and users' ``train`` do."""
    job = Job(model="a:B", steps=1, optimizer={"sgd": 0.1}, folder=str(tmp_path))
    for name in ("half_module", "json"):
        place = tmp_path / f"{name}.py"
        place.write_text("first = 1\nraise OSError('not there yet')\nsecond = 2")
        with pytest.raises(OSError, match="not there yet"):
            user_object(f"{name}:second", job)
        place.write_text("second = 20 + 0")
        assert user_object(f"{name}:second", job) == 20


def test_errors_within_the_users_module_are_its_own(job: Job, tmp_path: Path) -> None:
    (tmp_path / "broken_model.py").write_text("import no_such_package")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        fds.run_job(job.changed({"model": "broken_model:Model", "folder": str(tmp_path)}))


def test_modules_of_one_name_in_two_folders(job: Job, tmp_path: Path) -> None:
    (tmp_path / "tiny_models.py").write_text("from tests.jobs.tiny_models import plain\ndef narrow(): return plain(2)")
    assert fds.jobs.prepare(job.changed({"model": "tiny_models:narrow", "folder": str(tmp_path)})).apply.module is not None
    assert fds.jobs.prepare(job).apply.module is not None
