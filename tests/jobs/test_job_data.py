"""A job's text: bytes of files and folders, tokens of a tokenizer, rows of a data set."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_ds as fds
from functional_ds.jobs import Job, JobError, TokenText
from functional_ds.jobs.job_data import read_files, text_of

HERE = Path(__file__).parent


def job_of(folder: Path, **data: Any) -> Job:
    return Job(model="a:B", steps=1, optimizer={"sgd": 0.1}, folder=str(folder), data={"context": 2, **data})


@given(st.integers(0, 2**40), st.integers(0, 50), st.sampled_from([1, 2, 4]), st.sampled_from(["train", "validation"]))
def test_rows_do_not_depend_on_the_number_of_ranks(seed: int, step: int, ranks: int, split: str) -> None:
    text = TokenText.cut(torch.arange(1000), 0.25, source="numbers", context=8)
    whole, targets = text.batch(split, step, rows=4, context=8, seed=seed)
    rows = 4 // ranks
    parts = [text.batch(split, step, rows=rows, context=8, seed=seed, first_row=rank * rows) for rank in range(ranks)]
    assert torch.equal(torch.cat([x for x, _ in parts]), whole)
    assert torch.equal(whole + 1, targets)
    assert bool((targets < 750).all() if split == "train" else (whole >= 750).all())


def test_rows_depend_on_seed_step_and_split() -> None:
    text = TokenText.cut(torch.arange(100_000), 0.5, source="numbers", context=8)

    def first(split: str = "train", step: int = 0, seed: int = 0) -> int:
        return int(text.batch(split, step, rows=1, context=8, seed=seed)[0][0, 0])

    assert len({first(), first(step=1), first(seed=1), first("validation")}) == 4


def test_folders_are_read_in_order_without_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name, text in {"b/2.txt": "two", "a.txt": "one", "c.md": "three", ".hidden": "no", ".git/x": "no"}.items():
        (tmp_path / name).write_text(text)
    assert list(read_files([tmp_path])) == [b"one", b"two", b"three"]
    assert list(read_files([tmp_path], pattern="*.md")) == [b"three"]
    assert list(read_files(["c.md", "b"], folder=tmp_path)) == [b"three", b"two"]
    found = text_of(job_of(tmp_path, files=["c.md", "b"], validation=0.45, context=2))
    assert bytes(found.train.tolist()) == b"three"
    assert bytes(found.validation.tolist()) == b"two"


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        (["nowhere"], "data.files.0: "),
        (["full.txt", "empty.txt"], "data.files.1: "),
        (["folder"], "has no files that match"),
        (["/dev/zero"], "/dev/zero cannot be read (it is not a file of bytes, but a pipe or a device)"),
        (["pipe"], "pipe cannot be read (it is not a file of bytes, but a pipe or a device)"),
        (["full.txt", "sparse"], "sparse cannot be read (it has 4,398,046,511,104 bytes, and at most"),
        (["full.txt"], "full.txt has 4 tokens, and the shorter of its parts 0, fewer than context + 1 = 3"),
    ],
)
def test_files_that_cannot_be_trained_on(tmp_path: Path, files: list[str], complaint: str) -> None:
    (tmp_path / "full.txt").write_text("text")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 1 << 42)
    with pytest.raises(JobError) as refused:
        text_of(job_of(tmp_path, files=files))
    assert complaint in str(refused.value)


def test_a_text_of_ones_own() -> None:
    found = text_of(job_of(HERE, text={"tiny_models:counting": {"length": 50}}))
    assert (len(found.train), len(found.validation)) == (40, 10)
    with pytest.raises(JobError, match=r"data\.text: it returned no text"):
        text_of(job_of(HERE, text="tiny_models:no_model"))


def test_a_tokenizer_of_hugging_face(tmp_path: Path) -> None:
    """Each file's tokens, then the end of the text."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    words = {"<end>": 0, "a": 1, "b": 2, "c": 3, "?": 4}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>", unk_token="?").save_pretrained(
        tmp_path / "words"
    )
    (tmp_path / "1.txt").write_text("a b a x b a")
    (tmp_path / "2.txt").write_text("c c c c")
    found = text_of(job_of(tmp_path, files=["1.txt", "2.txt"], tokenizer="words", validation=0.4, context=1))
    assert torch.cat([found.train, found.validation]).tolist() == [1, 2, 1, 4, 2, 1, 0, 3, 3, 3, 3, 0]
    assert len(found.validation) == 4
    with pytest.raises(JobError, match=r"data\.tokenizer = '1\.txt': transformers cannot load it"):
        text_of(job_of(tmp_path, files=["1.txt"], tokenizer="1.txt"))


def test_a_data_set_of_hugging_face(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    rows = [json.dumps({"text": text}) + "\n" for text in ("one", "two", "three")]
    (tmp_path / "set/train.jsonl").write_text("".join(rows))
    datasets.disable_progress_bars()
    found = text_of(job_of(tmp_path, dataset="set", validation=0.5))
    assert bytes([*found.train.tolist(), *found.validation.tolist()]) == b"onetwothree"
    with pytest.raises(JobError, match=r"data\.column = 'txt': the data set has the columns text"):
        text_of(job_of(tmp_path, dataset="set", column="txt"))


def test_a_data_set_by_what_is_asked_of_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the package is not installed: what it is asked for, and what is said without it."""
    asked = []

    class Rows(list[Any]):
        column_names = ("body",)

    def load_dataset(*args: Any, **options: Any) -> Rows:
        asked.append((args, options))
        return Rows([{"body": "abcdef"}, {"body": "ghij"}])

    job = job_of(tmp_path, dataset="org/name", dataset_config="small", dataset_split="test", column="body", validation=0.4)
    monkeypatch.setattr("functional_ds.jobs.job_data.find_spec", lambda name: None)
    with pytest.raises(JobError, match=r"data\.dataset = 'org/name': it needs the package datasets"):
        text_of(job)
    monkeypatch.setattr("functional_ds.jobs.job_data.find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))  # type: ignore[arg-type]
    assert bytes(text_of(job).validation.tolist()) == b"ghij"
    assert asked == [(("org/name", "small"), {"split": "test"})]


def test_the_standard_library_is_text_for_everybody() -> None:
    found = text_of(Job(model="a:B", steps=1, optimizer={"sgd": 0.1}))
    assert found.source == "Python's standard library"
    assert b"import" in bytes(found.train[:10_000].tolist())
    assert fds.jobs.job_data.read_standard_library(1000) == fds.jobs.job_data.read_standard_library(2000)[:1000]
