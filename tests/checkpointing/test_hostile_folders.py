"""Folders that somebody else filled: links, pipes, manifests that lie; folders that vanish; programs that end during a save."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import attrs
import pytest
import torch

import functional_ds as fds
from functional_ds.checkpointing import Saver, latest, tags, verify
from functional_ds.checkpointing.directory import MANIFEST, open_manifest
from functional_ds.checkpointing.manifest import Chunk, Manifest

STEP = fds.train_step(lambda p, x: (p["w"] * x).sum(), fds.adamw(0.1))


def state(updates: int = 1) -> fds.State:
    found = STEP.init({"w": torch.arange(6.0), "b": torch.arange(4.0)})
    for _ in range(updates):
        found, _ = STEP(found, torch.ones(6))
    return found


# -- the end of a program ----------------------------------------------------------------------------------------------

PROGRAM = """
    import sys, torch
    import functional_ds as fds
    from functional_ds import comm
    from functional_ds.checkpointing import Saver

    def main():
        step = fds.train_step(lambda p, x: (p["w"] * x).sum(), fds.adamw(0.1))
        state = step.init({"w": torch.zeros(5_000_000)})
        saver = Saver(sys.argv[1])
        saver.save(state, tag="last")
        globals()["kept"] = saver
        if sys.argv[2] == "raise":
            raise ValueError("the user's own")

    if __name__ == "__main__":
        comm.spawn(main, world_size=2) if sys.argv[2] == "spawn" else main()
"""


def ended(tmp_path: Path, how: str, first: str = "") -> "subprocess.CompletedProcess[str]":
    (tmp_path / "program.py").write_text(first + textwrap.dedent(PROGRAM))
    command = [sys.executable, "program.py", str(tmp_path / "run"), how]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["return", "raise", "spawn"])
def test_a_program_that_ends_during_a_background_save_finishes_it(tmp_path: Path, how: str) -> None:
    found = ended(tmp_path, how)
    assert found.returncode == (1 if how == "raise" else 0), found.stderr
    assert tags(tmp_path / "run") == ["last"], found.stderr
    verify(tmp_path / "run")


def test_a_background_save_that_fails_as_the_program_ends_says_so(tmp_path: Path) -> None:
    full = """
        import threading
        from functional_ds.checkpointing import writer

        def late(*args, **kwargs):
            threading.main_thread().join()
            raise OSError(28, "No space left on device")

        writer.publish = late
    """
    found = ended(tmp_path, "return", textwrap.dedent(full))
    assert tags(tmp_path / "run") == []
    assert "checkpoint last" in found.stderr
    assert "No space left on device" in found.stderr


# -- links and pipes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", [os.symlink, os.link], ids=["symlink", "hard link"])
@pytest.mark.parametrize("name", [".lock", ".latest.new", "latest"])
def test_a_planted_link_does_not_get_a_file_elsewhere_overwritten(tmp_path: Path, name: str, link: object) -> None:
    precious, folder = tmp_path / "precious", tmp_path / "run"
    precious.write_text("mine")
    folder.mkdir()
    link(precious, folder / name)  # type: ignore[operator]
    with contextlib.suppress(fds.checkpointing.CheckpointError):
        fds.save(state(), folder)
        assert name == ".latest.new"
    assert precious.read_text() == "mine"
    if name == ".lock":
        with pytest.raises(fds.checkpointing.CheckpointError, match=r"\.lock"):
            fds.save(state(), folder)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as found:
        here = Path.cwd()
        os.chdir(path.parent)  # the name of a socket has at most 108 bytes
        try:
            found.bind(path.name)
        finally:
            os.chdir(here)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("plant", [pipe, unix_socket, endless])
@pytest.mark.parametrize("name", ["latest", f"1/{MANIFEST}", "1/00000.bin", ".lock"])
def test_a_pipe_or_a_device_in_the_place_of_a_file_is_named(tmp_path: Path, name: str, plant: object) -> None:
    fds.save(state(1), tmp_path)
    (tmp_path / name).unlink()
    plant(tmp_path / name)  # type: ignore[operator]
    if name == ".lock":
        with pytest.raises(fds.checkpointing.CheckpointError, match="lock"):
            fds.save(state(2), tmp_path)
        return
    with pytest.raises(fds.checkpointing.DamagedError, match="cannot be read"):
        verify(tmp_path)
    if name == "latest":
        with pytest.warns(UserWarning, match="latest cannot be read"):
            fds.load(tmp_path, like=state())
    else:
        with pytest.raises(fds.checkpointing.DamagedError):
            fds.load(tmp_path, like=state(), tag="1")


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 42)


@pytest.mark.parametrize("name", ["latest", f"2/{MANIFEST}", "2/00000.bin"])
def test_a_file_larger_than_memory_is_damage_and_the_checkpoint_before_is_loaded(tmp_path: Path, name: str) -> None:
    for updates in (1, 2):
        fds.save(state(updates), tmp_path)
    sparse(tmp_path / name)
    with pytest.raises(fds.checkpointing.DamagedError, match=r"4,?398,?046,?511,?104 bytes"):
        verify(tmp_path)
    with pytest.warns(UserWarning, match="at most 4,096 are read" if name == "latest" else "'2' is passed over"):
        found = fds.load(tmp_path, like=state())
    assert found.step == (2 if name == "latest" else 1)
    fds.save(state(3), tmp_path)
    assert fds.load(tmp_path, like=state()).step == 3


def test_a_manifest_that_no_load_would_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fds.save(state(1), tmp_path)
    monkeypatch.setattr("functional_ds.checkpointing.writer.LONGEST", 1000)
    with pytest.raises(fds.checkpointing.CheckpointError, match="may have 1,000; make extra= smaller"):
        fds.save(state(2), tmp_path, extra={"text": "x" * 1000})
    assert tags(tmp_path) == ["1"]


# -- manifests that lie ------------------------------------------------------------------------------------------------


def forged(folder: Path, chunks: tuple[Chunk, ...]) -> None:
    """The manifest says, with a good checksum, that ``params/w`` lies in these chunks."""
    place, found = open_manifest(folder, "1")
    tensors = {**found.tensors, "params/w": attrs.evolve(found.tensors["params/w"], chunks=chunks)}
    (place / MANIFEST).write_bytes(attrs.evolve(found, tensors=tensors).encode())


@pytest.mark.parametrize(
    ("cuts", "said"),
    [
        ([(0, 4), (2, 2)], "two chunks for its elements 2 to 4"),
        ([(0, 3), (4, 2)], "no chunk for its elements 3 to 4"),
        ([(0, 5)], "no chunk for its elements 5 to 6"),
        ([(1, 5)], "no chunk for its elements 0 to 1"),
        ([], "no chunk for its elements 0 to 6"),
        ([(0, 6), (0, 6)], "two chunks"),
    ],
)
def test_chunks_that_overlap_or_leave_a_gap_are_damage(tmp_path: Path, cuts: list[tuple[int, int]], said: str) -> None:
    fds.save(state(), tmp_path)
    (chunk,) = open_manifest(tmp_path, "1")[1].tensors["params/w"].chunks
    forged(tmp_path, tuple(Chunk(low, n, chunk.file, chunk.position + 4 * low) for low, n in cuts))
    for use in (lambda: verify(tmp_path), lambda: fds.load(tmp_path, like=state(), tag="1")):
        with pytest.raises(fds.checkpointing.DamagedError, match=said):
            use()


def test_chunks_that_share_bytes_of_a_file_are_damage(tmp_path: Path) -> None:
    fds.save(state(), tmp_path)
    found = open_manifest(tmp_path, "1")[1].tensors
    (chunk,) = found["optimizer.exp_avg/w"].chunks
    forged(tmp_path, (chunk,))
    with pytest.raises(fds.checkpointing.DamagedError, match="two chunks share the bytes"):
        verify(tmp_path)


def test_a_manifest_survives_its_own_encoding(tmp_path: Path) -> None:
    fds.save(state(), tmp_path)
    found = open_manifest(tmp_path, "1")[1]
    assert Manifest.decode(found.encode(), "here") == found


# -- folders that vanish -----------------------------------------------------------------------------------------------


def removed(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    folder.rmdir()


def test_a_saver_whose_folder_was_removed_makes_it_anew(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with Saver(folder) as saver:
        saver.save(state(1))
        saver.wait()
        removed(folder)
        with pytest.warns(UserWarning, match="was removed or replaced"):
            saver.save(state(2))
        saver.wait()
    assert tags(folder) == [latest(folder)] == ["2"]


def test_two_savers_of_one_folder_that_was_removed_between_them_are_not_both_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("functional_ds.checkpointing.directory._PATIENCE", 0.1)
    folder = tmp_path / "run"
    with Saver(folder) as first:
        removed(folder)
        with Saver(folder) as second:
            with pytest.raises(fds.checkpointing.BusyError), pytest.warns(UserWarning, match="was removed"):
                first.save(state(1))
            second.save(state(2))
    assert tags(folder) == ["2"]


def test_a_folder_removed_during_a_save_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    saver = Saver(folder)
    saver.save(state(1))
    saver._writer.join_write()  # type: ignore[union-attr]
    with contextlib.suppress(OSError):
        removed(folder)
    with contextlib.suppress(fds.checkpointing.CheckpointError):  # published before it was removed
        saver.wait()
    with contextlib.suppress(fds.checkpointing.CheckpointError):
        saver.close()


@pytest.mark.parametrize(
    "use", [tags, latest, verify, Saver, lambda path: fds.load(path, like=state()), lambda path: fds.save(state(), path)]
)
def test_a_path_with_a_nul_is_named(use: object) -> None:
    with pytest.raises(ValueError, match=r"path='a\\x00b' has a NUL"):
        use("a\0b")  # type: ignore[operator]


@pytest.mark.parametrize(
    "use", [tags, latest, verify, Saver, lambda path: fds.load(path, like=state()), lambda path: fds.save(state(), path)]
)
def test_a_path_that_cannot_be_written_as_bytes_is_named(use: object) -> None:
    with pytest.raises(ValueError, match=r"path='a\\ud800' has the character '\\ud800'"):
        use("a\ud800")  # type: ignore[operator]


def test_json_of_the_manifest_is_what_the_header_says(tmp_path: Path) -> None:
    fds.save(state(), tmp_path)
    header = (tmp_path / "1" / MANIFEST).read_bytes().partition(b"\n")[0]
    assert set(json.loads(header)) == {"format", "version", "sha256"}
