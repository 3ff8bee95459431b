"""What stays in a folder, and what is newest."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_ds as fds
from functional_ds import checkpointing
from functional_ds.checkpointing import directory

STEP = fds.train_step(lambda p, x: (p["w"] * x).sum(), fds.sgd(0.1))


def at(step: int) -> fds.State:
    return fds.tree.replace(STEP.init({"w": torch.ones(1)}), step=torch.tensor(step))


def test_retention(tmp_path: Path) -> None:
    """The newest n stay, and each whose count of updates k divides, and what was saved without asking for retention."""
    fds.save(at(3), tmp_path, tag="mine")
    for step in range(5, 60, 5):
        fds.save(at(step), tmp_path, keep_last=2, keep_every=20)
    assert checkpointing.tags(tmp_path) == ["mine", "20", "40", "50", "55"]
    fds.save(at(60), tmp_path, tag="best")
    fds.save(at(65), tmp_path, keep_last=1)
    assert checkpointing.tags(tmp_path) == ["mine", "best", "65"]
    assert checkpointing.latest(tmp_path) == "65"


def test_what_latest_names_is_never_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        fds.save(at(step), tmp_path, keep_last=5)
    pointer = directory.pointer
    monkeypatch.setattr(directory, "pointer", lambda tag: pointer("1" if tag == "3" else tag))  # somebody went back by hand
    fds.save(at(3), tmp_path, keep_last=1)
    assert checkpointing.tags(tmp_path) == ["1", "3"]


def test_a_tag_that_is_saved_again_is_replaced(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        fds.save(at(step), tmp_path, tag="best" if step != 2 else "other")
    assert checkpointing.tags(tmp_path) == ["other", "best"]
    assert int(fds.load(tmp_path, like=at(0), tag="best").step) == 3


def test_leftovers_are_cleared_by_the_next_save(tmp_path: Path) -> None:
    fds.save(at(1), tmp_path)
    for name in (".saving-dead", ".deleting-dead", ".replaced-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "00000.bin").write_bytes(b"x")
    (tmp_path / "1").rename(tmp_path / "kept")
    (tmp_path / ".replaced-1" / "00000.bin").unlink()
    (tmp_path / ".replaced-1").rmdir()
    (tmp_path / "kept").rename(tmp_path / ".replaced-1")  # a save died between its two renames
    assert checkpointing.tags(tmp_path) == ["1"]
    assert int(fds.load(tmp_path, like=at(0)).step) == 1
    fds.save(at(2), tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".lock", "1", "2", "latest"]
    checkpointing.verify(tmp_path)


@given(st.text(min_size=1, max_size=12))
def test_a_tag_is_one_plain_folder_or_refused(tag: str) -> None:
    try:
        directory.check_tag(tag)
    except ValueError:
        return
    place = Path("/run/folder") / tag
    assert place.parent == Path("/run/folder")
    assert place.name == tag
    assert tag not in (".", "..", "latest")
