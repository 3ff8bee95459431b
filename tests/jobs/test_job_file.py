"""Files of jobs: read, written back, changed by paths, and refused by name."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import functional_ds as fds
from functional_ds.jobs import CallEntry, Job, JobError
from functional_ds.jobs.entries.job_text import json_line_of, line_of, toml

LEAST = 'steps = 3\nmodel = "tiny_models:plain"\noptimizer = {sgd = 0.1}\n'

# -- the laws ----------------------------------------------------------------------------------------------------------

_numbers = st.floats(allow_nan=False) | st.integers(-(2**63), 2**63 - 1)
_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
_values = st.recursive(
    _numbers | st.booleans() | _texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(_texts, _values, max_size=4))
def test_what_is_written_as_toml_is_read_again(data: dict[str, Any]) -> None:
    assert tomllib.loads(toml(data)) == data


_TRANSFORMS = st.sampled_from(
    [
        {"zero": 3},
        {"zero": {"stage": 2, "group": "dp", "prefetch": 2}},
        {"clip": 1.0},
        {"clip": float("inf")},
        {"mixed_precision": "bf16"},
        {"accumulate": {"k": 2}},
        {"remat": {"blocks": "layers[.][0-9]+"}},
        {"pkg.mod:make": {"a": [1, {"b": "x"}]}},
        "tiny_models:clipped",
    ]
)
_JOBS = st.fixed_dictionaries(
    {
        "model": st.sampled_from(
            ["a:B", {"a.b:C.d": {"config": {"width": 4}}}, {"huggingface": {"config": {"model_type": "x"}}}]
        ),
        "steps": st.integers(0, 100),
        "optimizer": st.sampled_from(
            [{"adamw": 1e-3}, {"adamw": {"lr": 1, "betas": [0.9, 0.95]}}, {"muon": {"lr": 0.1, "others": "x"}}]
        ),
    },
    optional={
        "seed": st.integers(0, 2**63 - 1),
        "ranks": st.integers(1, 8),
        "strategy": st.lists(_TRANSFORMS, max_size=3),
        "schedule": st.just({"warmup_cosine": {"steps": 2, "total": 9}}),
        "data": st.fixed_dictionaries({}, optional={"rows": st.integers(1, 9), "files": st.lists(_texts), "tokenizer": _texts}),
        "evaluation": st.sampled_from([{}, {"every": 3}]),
        "checkpoints": st.sampled_from([{"folder": "a b", "minutes": 3}, {"folder": "c", "keep_last": 0}]),
        "logs": st.sampled_from([{"csv": "x.csv"}, {"every": 3, "progress": True}]),
        "profile": st.sampled_from([{"folder": "p", "peak": "measured"}, {"folder": "p", "peak": 1e12}]),
        "folder": _texts,
    },
)


@given(_JOBS, st.booleans())
def test_a_job_that_is_written_and_read_is_the_job(
    tmp_path_factory: pytest.TempPathFactory, data: dict[str, Any], all_: bool
) -> None:
    job = Job(**data)
    for name, text in {"job.toml": job.to_toml(defaults=all_), "job.json": json.dumps(job.to_dict(defaults=all_))}.items():
        file = tmp_path_factory.getbasetemp() / name
        file.write_text(text, encoding="utf-8")
        assert fds.load_job(file) == job


def test_other_jobs_are_not_equal() -> None:
    """So the law above can fail."""
    job = Job(model="a:B", steps=1, optimizer={"sgd": 0.1})
    for changes in ({"steps": 2}, {"optimizer.sgd.lr": 0.2}, {"data.rows": 1}, {"folder": "x"}, {"evaluation": {}}):
        assert job.changed(changes) != job


def test_a_python_file_has_a_job_or_a_table(tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    table = {"model": "a:B", "steps": 4, "optimizer": {"sgd": 0.1}, "folder": "."}
    file.write_text(f"job = {table}")
    found = fds.load_job(file)
    file.write_text("import functional_ds as fds\njob = fds.Job(model='a:B', steps=4, optimizer={'sgd': 0.1})")
    assert fds.load_job(file) == found == Job(model="a:B", steps=4, optimizer={"sgd": 0.1})


def test_the_folder_is_the_files_unless_it_says_another(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(LEAST)
    assert fds.load_job(file).folder == str(tmp_path)
    file.write_text(LEAST + 'folder = "x"')
    assert fds.load_job(file).folder == "x"


# -- changes -----------------------------------------------------------------------------------------------------------


def test_changes_go_by_paths(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(LEAST + 'strategy = [{mixed_precision = "bf16"}, {zero = 3}]\n[evaluation]\nevery = 2\n')
    changes = {
        "strategy.zero.stage": 1,
        "strategy.mixed_precision": None,
        "data.files": [Path("a"), "b"],
        "model.tiny_models:plain.width": 4,
        "evaluation": None,
        "checkpoints": {"folder": Path("c")},
        "optimizer": {"adamw": 1e-3},
    }
    job = fds.load_job(file, changes)
    assert job == fds.load_job(file).changed(changes)
    assert job.strategy == (CallEntry("zero", {"stage": 1}),)
    assert job.data.files == ("a", "b")
    assert job.model == CallEntry("tiny_models:plain", {"width": 4})
    assert job.evaluation is None
    assert job.checkpoints is not None
    assert job.checkpoints.folder == "c"
    assert job.optimizer == CallEntry("adamw", {"lr": 1e-3})


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        ("data.contxt", 3, "data.contxt = 3: there is no such entry; the nearest is 'context'"),
        ("strategy.zerro.stage", 3, "strategy.zerro: the job has none of this name to change; the nearest is 'zero'"),
        ("steps.more", 3, "steps = 3: it is not a table"),
        ("steps", "3", "steps = '3': it must be a whole number"),
    ],
)
def test_changes_are_refused_by_name(tmp_path: Path, path: str, value: Any, complaint: str) -> None:
    file = tmp_path / "job.toml"
    file.write_text(LEAST + "strategy = [{zero = 3}]\n")
    with pytest.raises(JobError) as refused:
        fds.load_job(file, {path: value})
    assert complaint in str(refused.value)


# -- what is refused ---------------------------------------------------------------------------------------------------

REFUSED = [
    ("stesp = 3", 4, "stesp = 3: there is no such entry; the nearest is 'steps', of model, steps, seed,"),
    ("[data]\nrows = 2\ncontxt = 4", 6, "data.contxt = 4: there is no such entry; the nearest is 'context'"),
    ("[data]\nrows = 0", 5, "data.rows = 0: it must be at least 1"),
    ("[data]\nrows = 2.0", 5, "data.rows = 2.0: it must be a whole number"),
    ("[data]\nrows = true", 5, "data.rows = True: it must be a whole number"),
    ("[data]\nfiles = 'a'", 5, "data.files = 'a': it must be a list, each a string"),
    ("[data]\nfiles = ['a', 1]", 5, "data.files.1 = 1: it must be a string"),
    ("[data]\nfiles = ['a']\ndataset = 'b'", 6, "the text comes from files and from dataset; keep one of them"),
    ("[data]\nvalidation = 1", 5, "data.validation = 1.0: it must be between 0 and 1"),
    ("data = 3", 4, "data = 3: it must be a table of entries"),
    ("seed = -1", 4, "seed = -1: it must be at least 0 and below 2**63"),
    ("device = 'gpu'", 4, "device = 'gpu': it must be one of 'auto', 'cpu', 'cuda'"),
    ("mesh = {dp = 2}\nranks = 3", 5, "ranks = 3: the mesh has 2 ranks; leave ranks out"),
    ("mesh = {dp = 0}", 4, "mesh.dp = 0: it must be at least 1"),
    ("mesh = {dp = 1048576, tp = 2}", 4, "mesh = {'dp': 1048576, 'tp': 2}: the mesh has more than 1048576 ranks"),
    ("ranks = 1048577", 4, "ranks = 1048577: it must be at most 1048576"),
    ("[data]\nrows = 2147483648", 5, "data.rows = 2147483648: it must be at most 2147483647"),
    ("strategy = [{zerro = 3}]", 4, "there is no transform 'zerro'; the nearest is 'zero'"),
    ("strategy = [{zero = {stagee = 3}}]", 4, "strategy.zero.stagee = 3: there is no such argument; the nearest is 'stage'"),
    ("strategy = [{zero = {}}]", 4, "strategy.zero: it needs stage"),
    ("strategy = [{zero = 7}]", 4, "strategy.zero.stage = 7: it must be one of 0, 1, 2, 3"),
    ("strategy = [{clip = 'x'}]", 4, "strategy.clip.limit = 'x': it must be a number"),
    ("strategy = [{zero = 1, clip = 1.0}]", 4, "it must name one transform with its arguments"),
    ("strategy = [{pipeline = {}}]", 4, "strategy.pipeline: it needs schedule, micro_batches"),
    ("strategy = [{replicated = {}}]", 4, "it takes a function; name a transform of your own as module:function"),
    ("strategy = [{'a:b' = 3}]", 4, "strategy.a:b = 3: give its arguments by name"),
    ("schedule = {warmup_cosin = {}}", 4, "schedule: there is no schedule 'warmup_cosin'; the nearest is 'warmup_cosine'"),
    ("[schedule.warmup_cosine]\nwarmup = 3", 5, "there is no such argument; the names are steps, total, floor, shape"),
    ("loss = 'cross'", 4, "loss: there is no loss 'cross'; the names are next_token, vocab_parallel"),
    ("[deepspeed]\nconfig = 'a'\n[[strategy]]\nzero = 1", 6, "strategy: a DeepSpeed config is a strategy; keep one of the two"),
    ("on_non_finite = 'roll_back'", 4, "on_non_finite = 'roll_back': it goes back to a checkpoint; name their folder"),
    ("[checkpoints]\nevery = 1", 4, "checkpoints: it needs folder: their folder"),
    ("[profile]\nfolder = 'p'\npeak = 'mesured'", 6, "profile.peak = 'mesured': it must be a number or one of 'measured'"),
    ("optimizer.adamw = 1", None, "it is not TOML"),
    ("steps = 4", None, "it is not TOML: Cannot overwrite a value"),
]


@pytest.mark.parametrize(("more", "line", "complaint"), REFUSED, ids=[more.replace("\n", " ") for more, _, _ in REFUSED])
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, more: str, line: int | None, complaint: str) -> None:
    file = tmp_path / "job.toml"
    file.write_text(LEAST + more)
    with pytest.raises(JobError) as refused:
        fds.load_job(file)
    assert complaint in str(refused.value)
    assert (refused.value.file, refused.value.line) == (str(file), line)


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("job.toml", "steps = 3\nmodel = 'a:b'", "it needs optimizer: an optimizer, such as optimizer = {adamw"),
        ("job.toml", "steps = 3", "it needs model"),
        ("job.json", "[1]", "it must be a table of entries"),
        ("job.json", '{"steps": 3,\n "steps": 4}', "steps: it occurs twice in one table; keep one"),
        ("job.json", '{"steps": 3,\n"seed" 4}', "line 2: it is not JSON: Expecting ':' delimiter"),
        (
            "job.json",
            '{"steps": 3,\n"model": "a:b",\n"optimizer": "sgd",\n"sed": 4}',
            "line 4: sed = 4: there is no such",
        ),
        (
            "job.py",
            "import functional_ds as fds\njob = fds.Job(model='a:B', steps='3')",
            "steps = '3': it must be a whole number",
        ),
        ("job.py", "jobs = 3", "it must set `job` to a Job, or to a table of entries"),
        ("job.toml", f"a = {'[' * 100_000}", "its tables are nested too deeply"),
        ("job.toml", f"a{'.a' * 20_000} = 1", "nested deeper than 64"),
        ("job.toml", f"a = {'9' * 5000}", "4300 digits"),
        ("job.json", "[" * 100_000, "nested deeper than 64"),
        ("job.json", '{"model": ' + "[" * 900 + "]" * 900 + "}", "nested deeper than 64"),
        ("job.json", "9" * 5000, "4300 digits"),
        ("job.json", r'{"steps": 1, "model": "a:\ud800"}', r"the string 'a:\ud800' has half of a surrogate pair"),
        ("job.yaml", "", "a job's file ends in .toml, .json, .py"),
    ],
)
def test_files_are_refused(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(JobError) as refused:
        fds.load_job(file)
    assert complaint in str(refused.value)
    assert str(file) in str(refused.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="there is no such file"):
        fds.load_job(tmp_path / "job.toml")
    with pytest.raises(JobError, match="it is not a file"):
        fds.load_job(tmp_path)


def test_a_file_larger_than_any_job(tmp_path: Path) -> None:
    (tmp_path / "job.toml").touch()
    os.truncate(tmp_path / "job.toml", 1 << 42)
    with pytest.raises(JobError, match=r"job\.toml: it cannot be read: .* at most 67,108,864 are read"):
        fds.load_job(tmp_path / "job.toml")


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(JobError, match=r"job\.toml: it cannot be read"):
        fds.load_job(tmp_path / "job.toml")


def test_entries_that_are_left_out_have_no_line() -> None:
    assert line_of(LEAST, "data.rows") is None
    assert line_of("[logs]\nrows = 1\n[data]\nrows = 2", "data.rows") == 4
    assert line_of('[model."a.b:C".config]\nwidth = 2', "model.a.b:C.config.width") == 2
    assert line_of("# rows = 3\ndata = {rows = 2}", "data.rows") == 2
    apart = "[data]\nrows = 1\n[logs]\nevery = 2\n[data.x]\na = 1\n[[strategy]]\nzero = 2\n[[strategy]]\nclip = 1\n"
    found = [line_of(apart, entry) for entry in ("data", "data.rows", "data.x.a", "logs", "strategy", "strategy.clip")]
    assert found == [1, 2, 6, 3, 7, 10]
    assert json_line_of('{"data": {"rows": 1},\n "logs": {\n"rows": 2}}', "logs.rows") == 3


@pytest.mark.parametrize("missing", ["tomlkit", "pydantic"])
@pytest.mark.parametrize("name", ["Job", "load_job", "run_job"])
def test_without_the_extra(missing: str, name: str) -> None:
    """The library alone names what jobs need."""
    program = f"import sys; sys.modules[{missing!r}] = None; import functional_ds as fds; fds.{name}"
    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert "ImportError: jobs need pydantic and tomlkit: pip install 'functional-ds[jobs]'" in ended.stderr
