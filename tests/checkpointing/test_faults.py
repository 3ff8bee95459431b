"""Damage, crashes, full disks, foreign files and other jobs: found every time, and nothing that was there is lost."""

import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

import functional_ds as fds
from functional_ds import checkpointing, comm, transforms
from functional_ds.checkpointing import directory
from functional_ds.checkpointing.manifest import MANIFEST
from functional_ds.testing import assert_same

STEP = transforms.zero(1)(fds.train_step(lambda p, x: (p["w"] * x).sum() + p["b"].sum(), fds.adamw(0.1)))


def fresh() -> Any:
    return {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(5)}


def trained(steps: int) -> fds.State:
    state = STEP.init(fresh())
    for _ in range(steps):
        state, _ = STEP(state, torch.ones(3))
    return state


def save(path: Path, steps: int, **options: Any) -> None:
    comm.simulate(lambda: fds.save(trained(steps), path, **options), world_size=2)


def load(path: Path, tag: str | None = None) -> tuple[int, dict[str, Any]]:
    """The count of updates and the params of what two ranks load."""

    def program() -> tuple[int, dict[str, Any]]:
        state = fds.load(path, like=STEP.init(fresh()), tag=tag)
        return int(state.step), STEP.params(state)

    first, second = comm.simulate(program, world_size=2)
    assert_same(first, second)
    return first


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pristine") / "run"
    save(path, 1)
    save(path, 2)
    return path


@pytest.fixture
def run(pristine: Path, tmp_path: Path) -> Path:
    """A folder with the checkpoints 1 and 2."""
    shutil.copytree(pristine, tmp_path / "run")
    return tmp_path / "run"


# -- damage --------------------------------------------------------------------------------------------------------------


FLIPS = 50 if settings.default.max_examples > 100 else 10


def spoilt(data: bytes, chooser: random.Random) -> Iterator[bytes]:
    """A file cut short, emptied, made longer, and with single bits flipped all over."""
    yield data[: chooser.randrange(len(data))]
    yield data[:-1]
    yield b""
    yield data + b"\0"
    for _ in range(FLIPS):
        place = chooser.randrange(len(data))
        yield data[:place] + bytes([data[place] ^ 1 << chooser.randrange(8)]) + data[place + 1 :]


def test_any_damage_to_any_file_is_detected(run: Path) -> None:
    """Every file truncated, emptied, and with a bit flipped: a load of the tag raises; without one it falls back."""
    chooser = random.Random(0)
    files = sorted(file for file in (run / "2").iterdir())
    assert [file.name for file in files] == ["00000.bin", "00001.bin", MANIFEST]
    count = 0
    for file in [*files, run / "latest"]:
        data = file.read_bytes()
        for bad in spoilt(data, chooser):
            file.write_bytes(bad)
            count += 1
            with pytest.raises(checkpointing.CheckpointError):
                checkpointing.verify(run)
            if file.name != "latest":
                with pytest.raises(checkpointing.CheckpointError):
                    fds.load(run, like=STEP.init(fresh()), tag="2")
                with pytest.warns(UserWarning, match="passed over"):
                    assert int(fds.load(run, like=STEP.init(fresh())).step) == 1
            else:
                with pytest.warns(UserWarning, match="latest is damaged|passed over"):
                    assert int(fds.load(run, like=STEP.init(fresh())).step) == 2
        file.write_bytes(data)
        checkpointing.verify(run)
    assert count == 4 * (FLIPS + 4)
    assert load(run)[0] == 2


def test_damage_on_one_rank_is_an_error_on_all(run: Path) -> None:
    """Each rank reads its own blocks; whoever finds damage tells the others, and all fall back together."""
    data = (run / "2" / "00001.bin").read_bytes()
    (run / "2" / "00001.bin").write_bytes(data[:-1])
    with pytest.raises(checkpointing.DamagedError, match=r"00001\.bin"):
        load(run, "2")
    with pytest.warns(UserWarning, match="'2' is passed over") as told:
        assert load(run)[0] == 1
    assert len(told) == 1  # by rank 0 alone


def test_missing_and_foreign_files(run: Path) -> None:
    assert checkpointing.latest(run) == "2"
    (run / "2" / "00000.bin").unlink()
    with pytest.raises(checkpointing.DamagedError, match=r"00000\.bin cannot be read: No such file"):
        load(run, "2")
    shutil.copy(run / "1" / "00000.bin", run / "2" / "00000.bin")  # a file of another checkpoint
    with pytest.raises(checkpointing.DamagedError, match=r"00000\.bin is damaged"):
        checkpointing.verify(run, "2")
    (run / "2" / MANIFEST).write_text('{"format": "something else"}\n')
    with pytest.raises(checkpointing.DamagedError, match="not a manifest of this library's"):
        load(run, "2")
    (run / "2" / MANIFEST).unlink()
    with pytest.raises(checkpointing.DamagedError, match=r"manifest\.json cannot be read"):
        load(run, "2")
    shutil.copytree(run / "1", run / "moved")
    with pytest.raises(checkpointing.DamagedError, match="holds the checkpoint '1'; it was moved"):
        load(run, "moved")
    (run / "notes.txt").write_text("not a checkpoint")
    (run / "stuff").mkdir()
    (run / "no:tag").mkdir()
    with pytest.warns(UserWarning, match="'2' is passed over"):
        assert int(fds.load(run, like=STEP.init(fresh())).step) == 1


@pytest.mark.parametrize("where", ["header", "summary", "body"])
def test_a_manifest_of_brackets(run: Path, where: str) -> None:
    """Nested deeper than Python counts is damage like any other."""
    from functional_ds.checkpointing import manifest

    path, deep = run / "2" / MANIFEST, b"[" * 50_000 + b"\n"
    _, summary, body = path.read_bytes().split(b"\n")[:3]
    rest = (deep if where == "summary" else summary + b"\n") + (deep if where == "body" else body + b"\n")
    path.write_bytes(deep if where == "header" else manifest._header(rest, 1) + rest)
    with pytest.raises(checkpointing.DamagedError, match="not a manifest of this library's"):
        load(run, "2")
    with pytest.warns(UserWarning, match="'2' is passed over"):
        assert load(run)[0] == 1


def test_verify_reads_older_checkpoints_too(run: Path) -> None:
    """Also one whose manifest says nothing any more, so that it is not among the tags."""
    for file, data in ((MANIFEST, b""), (MANIFEST, None), ("00000.bin", None)):
        before = (run / "1" / file).read_bytes()
        if data is None:
            (run / "1" / file).unlink()
        else:
            (run / "1" / file).write_bytes(data)
        with pytest.raises(checkpointing.DamagedError, match=file):
            checkpointing.verify(run)
        (run / "1" / file).write_bytes(before)
    (run / "stuff").mkdir()  # somebody's, and no checkpoint
    checkpointing.verify(run)


def test_a_pointer_that_cannot_be_read(run: Path) -> None:
    (run / "latest").unlink()
    (run / "latest").mkdir()
    with pytest.warns(UserWarning, match="latest cannot be read: Is a directory"):
        assert load(run)[0] == 2
    with pytest.raises(checkpointing.NoCheckpointError):
        load(run / "1" / MANIFEST)  # a file where there should be a folder


def test_without_a_pointer_what_is_passed_over_is_told(run: Path) -> None:
    (run / "latest").unlink()
    assert load(run)[0] == 2
    (run / "2" / MANIFEST).write_bytes(b"")
    with pytest.warns(UserWarning, match="2 has no manifest that can be read"):
        assert load(run)[0] == 1


def test_a_disk_that_cannot_be_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sector that is gone is damage, so the one before is taken."""
    real = os.preadv
    bad = (run / "2" / "00000.bin").stat().st_ino

    def failing(handle: int, *args: Any) -> int:
        if os.fstat(handle).st_ino == bad:
            raise OSError(5, "Input/output error")
        return real(handle, *args)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(checkpointing.DamagedError, match="cannot be read at byte 0: Input/output error"):
        load(run, "2")
    with pytest.warns(UserWarning, match="'2' is passed over"):
        assert load(run)[0] == 1


def test_nothing_whole_is_left(run: Path) -> None:
    for tag in ("1", "2"):
        (run / tag / "00000.bin").write_bytes(b"")
    with (
        pytest.warns(UserWarning, match="passed over"),
        pytest.raises(checkpointing.DamagedError, match="no checkpoint that is whole"),
    ):
        fds.load(run, like=STEP.init(fresh()))


def test_no_checkpoint(tmp_path: Path) -> None:
    assert checkpointing.tags(tmp_path / "none") == []
    assert checkpointing.latest(tmp_path / "none") is None
    for tag in (None, "3"):
        with pytest.raises(checkpointing.NoCheckpointError, match="has no checkpoint"):
            load(tmp_path / "none", tag)
    with pytest.raises(checkpointing.NoCheckpointError):
        checkpointing.verify(tmp_path)


def test_a_newer_format(run: Path) -> None:
    """It is said, and not taken for damage, whatever it holds."""
    from functional_ds.checkpointing import manifest

    path = run / "2" / MANIFEST
    rest = path.read_bytes().split(b"\n", 1)[1]
    path.write_bytes(manifest._header(rest, 3) + rest)
    for tag in ("2", None):
        with pytest.raises(checkpointing.NewerFormatError, match="has the format 3, and this version"):
            load(run, tag)


def test_manifests_that_lie(run: Path) -> None:
    """A manifest whose checksum is right but which points out of its files, its folder or its tensors."""
    from functional_ds.checkpointing import manifest

    path = run / "2" / MANIFEST
    _, summary, body = path.read_bytes().split(b"\n")[:3]

    def forged(change: Callable[[Any], Any]) -> None:
        found = json.loads(body)
        change(found)
        rest = summary + b"\n" + json.dumps(found, separators=(",", ":")).encode() + b"\n"
        path.write_bytes(manifest._header(rest, 1) + rest)

    def set_row(where: tuple[Any, ...], value: Any) -> Callable[[Any], None]:
        def change(found: Any) -> None:
            for key in where[:-1]:
                found = found[key]
            found[where[-1]] = value

        return change

    lies = [
        (("files", 0, 0), "../1/00000.bin"),
        (("files", 0, 1), 1 << 40),
        (("tensors", "params/w", 0), "object"),
        (("tensors", "params/w", 1), [-2, -3]),
        (("tensors", "params/w", 2, 0), [0, 7, 0, 0]),
        (("tensors", "params/w", 2, 0, 3), 1 << 30),
        (("tensors", "params/w", 2, 0, 2), 9),
        (("tensors", "params/w", 2), 3),
        (("tensors",), []),
    ]
    for where, value in lies:
        forged(set_row(where, value))
        with pytest.raises(checkpointing.DamagedError, match="not a manifest of this library's"):
            load(run, "2")
    forged(set_row(("tensors", "params/w", 2), [[0, 5, 0, 0]]))
    with pytest.raises(checkpointing.DamagedError, match="no chunk for its elements 5 to 6"):
        load(run, "2")


# -- tags and arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tag", ["../other", "a/b", "..", ".hidden", "", "latest", "/etc", "a\0b", "x" * 300, " a", "C:\\x", "a\n"]
)
def test_tags_that_walk_out_of_the_folder(tmp_path: Path, tag: str) -> None:
    state = trained(0)
    for use in (lambda: fds.save(state, tmp_path / "run", tag=tag), lambda: fds.load(tmp_path / "run", like=state, tag=tag)):
        with pytest.raises(ValueError, match="must be a plain name"):
            use()
    assert {entry.name for entry in tmp_path.rglob("*")} <= {"run", ".lock"}


def test_bad_arguments(tmp_path: Path) -> None:
    state = trained(0)
    for options, match in [
        ({"keep_last": 0}, "keep_last=0"),
        ({"keep_last": 1.5}, "keep_last=1.5"),
        ({"keep_every": 2}, "without keep_last"),
    ]:
        with pytest.raises(ValueError, match=match):
            fds.save(state, tmp_path, **options)
    with pytest.raises(TypeError, match="must be a dict of JSON values"):
        fds.save(state, tmp_path, extra={"x": torch.ones(1)})
    with pytest.raises(TypeError, match="takes the state"):
        fds.save({"w": torch.ones(1)}, tmp_path)
    with pytest.raises(TypeError, match="takes a state"):
        fds.load(tmp_path, like={"w": torch.ones(1)})
    (tmp_path / "file").write_text("")
    with pytest.raises(checkpointing.CheckpointError, match="cannot be made"):
        fds.save(state, tmp_path / "file")
    assert checkpointing.tags(tmp_path) == []


# -- crashes and full disks ---------------------------------------------------------------------------------------------


class Crash(BaseException):
    """The process dies here."""


def crashing_at(monkeypatch: pytest.MonkeyPatch, place: int) -> list[str]:
    """Every change to the file system from the ``place``-th on does not happen: the process is dead by then."""
    done: list[str] = []

    def counted(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            if len(done) >= place:
                raise Crash(name)
            done.append(name)
            return real(*args, **options)

        monkeypatch.setattr(owner, name, call)

    for name in ("rename", "replace", "mkdir", "unlink"):
        counted(Path, name)
    for name in ("pwritev", "fsync"):
        counted(os, name)
    counted(shutil, "rmtree")
    return done


@pytest.mark.parametrize("replaces", [False, True])
def test_a_crash_at_any_point_leaves_a_checkpoint(run: Path, tmp_path: Path, replaces: bool) -> None:
    """However far a save came, what load gives next is whole: the checkpoint from before, or the new one. And the next save
    cleans up. The new one may have the tag of the newest, which it is to replace."""
    tag = "2" if replaces else "3"
    reached = 0
    for place in range(100):
        here = tmp_path / f"at {place}"
        shutil.copytree(run, here)
        with pytest.MonkeyPatch.context() as patch:
            done = crashing_at(patch, place)
            try:
                fds.save(trained(3), here, tag=tag, keep_last=1)
            except (Crash, checkpointing.CheckpointError):
                pass
            else:
                assert len(done) < place + 1
                break
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            state = fds.load(here, like=STEP.init(fresh()))
        assert int(state.step) in (2, 3)
        reached = max(reached, int(state.step))
        assert torch.equal(STEP.params(state)["b"], STEP.params(trained(int(state.step)))["b"])
        fds.save(trained(4), here)
        assert int(fds.load(here, like=STEP.init(fresh())).step) == 4
        assert not [entry.name for entry in here.iterdir() if entry.name.startswith((".saving", ".deleting", ".replaced"))]
        shutil.rmtree(here)
    else:
        pytest.fail("the save never came to its end")
    assert place > 8
    assert reached == 3  # once published, it is there, whatever comes after


class Full:
    """A disk that takes so many bytes more."""

    def __init__(self, room: int) -> None:
        self.room, self.write = room, os.pwritev

    def __call__(self, handle: int, data: list[Any], position: int) -> int:
        if self.room <= 0:
            raise OSError(28, "No space left on device")
        part = memoryview(data[0])[: max(1, self.room)]
        self.room -= len(part)
        return self.write(handle, [part], position)


@pytest.mark.parametrize("room", [0, 30, 100])
@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_is_an_error_on_all_ranks(run: Path, monkeypatch: pytest.MonkeyPatch, room: int, background: bool) -> None:
    monkeypatch.setattr(os, "pwritev", Full(room))

    def saves() -> None:
        if not background:
            fds.save(trained(3), run)
            return
        with checkpointing.Saver(run) as saving:
            saving.save(trained(3))
            saving.save(trained(4))

    def program() -> None:
        with pytest.raises(checkpointing.CheckpointError, match="No space left on device"):
            saves()

    comm.simulate(program, world_size=2)
    assert checkpointing.tags(run) == ["1", "2"]
    assert not [entry for entry in run.iterdir() if entry.name.startswith(".saving")]
    monkeypatch.undo()
    checkpointing.verify(run)
    save(run, 5)
    assert load(run)[0] == 5


@pytest.mark.parametrize("tag", ["2", "3"])
def test_no_room_for_the_pointer(run: Path, monkeypatch: pytest.MonkeyPatch, tag: str) -> None:
    """The last bytes that a save needs are refused: nothing is published, and what it would have replaced is there."""
    real = os.fsync

    def full(handle: int) -> None:
        if Path(f"/proc/self/fd/{handle}").readlink().name == ".latest.new":
            raise OSError(28, "No space left on device")
        real(handle)

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("this system does not say which file is open")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(checkpointing.CheckpointError, match="No space left on device"):
        fds.save(trained(3), run, tag=tag)
    assert sorted(entry.name for entry in run.iterdir()) == [".lock", "1", "2", "latest"]
    assert load(run)[0] == load(run, "2")[0] == 2


@contextlib.contextmanager
def files_of_at_most(limit: int) -> Iterator[None]:
    """The system refuses to make a file larger."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_the_system_refuses_a_write(run: Path) -> None:
    """A limit of the system's on files: its words come back, and the folder is as it was."""
    step = fds.train_step(lambda p, x: p["w"].sum() * x, fds.sgd(0.1))
    state = step.init({"w": torch.ones(1 << 20)})
    with files_of_at_most(1 << 20), pytest.raises(checkpointing.CheckpointError, match="File too large"):
        fds.save(state, run, tag="big")
    assert sorted(entry.name for entry in run.iterdir()) == [".lock", "1", "2", "latest"]
    checkpointing.verify(run)


def test_a_pointer_to_nothing(run: Path) -> None:
    shutil.rmtree(run / "2")
    assert checkpointing.latest(run) == "1"
    with pytest.warns(UserWarning, match="names the checkpoint '2', which is not there"):
        assert int(fds.load(run, like=STEP.init(fresh())).step) == 1


# -- several jobs -------------------------------------------------------------------------------------------------------


def test_two_jobs_saving_to_one_folder(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "_PATIENCE", 0.2)
    with checkpointing.Saver(run) as first:
        first.save(trained(3))
        (run / ".lock").write_text(json.dumps({"pid": 1, "host": "elsewhere"}))  # as another process would have written it
        for other in (lambda: fds.save(trained(4), run), lambda: checkpointing.Saver(run)):
            with pytest.raises(checkpointing.BusyError, match=r"another job saves here .process 1 on elsewhere"):
                other()
        assert load(run)[0] in (2, 3)  # reading is free
    assert load(run)[0] == 3
    save(run, 5)


def test_another_saver_of_the_same_process(run: Path) -> None:
    """Waiting for oneself would be in vain."""
    with checkpointing.Saver(run):
        began = time.monotonic()
        with pytest.raises(checkpointing.BusyError, match="a Saver of this process is open here"):
            fds.save(trained(3), run, tag="best")
        assert time.monotonic() - began < directory._PATIENCE / 2
    fds.save(trained(3), run, tag="best")


def test_a_closed_saver_saves_no_more(run: Path) -> None:
    with checkpointing.Saver(run) as save:
        pass
    with pytest.raises(checkpointing.CheckpointError, match="is closed; make another one"):
        save.save(trained(3))


# -- what others have put there -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_a_tag_takes_the_place_of_checkpoints_alone(run: Path, kind: str) -> None:
    """Of nothing else that happens to have its name."""
    place = run / "logs"
    if kind == "folder":
        place.mkdir()
        (place / "precious.txt").write_text("kept")
    elif kind == "file":
        place.write_text("kept")
    else:
        place.symlink_to("nowhere")
    before = sorted(run.iterdir())
    with pytest.raises(checkpointing.CheckpointError, match=r"tag='logs': .* exists and is not a checkpoint of this tag"):
        fds.save(trained(3), run, tag="logs")
    assert sorted(run.iterdir()) == before
    assert kind != "folder" or (place / "precious.txt").read_text() == "kept"
    assert kind != "file" or place.read_text() == "kept"
    assert load(run)[0] == 2


def test_an_empty_folder_and_a_damaged_checkpoint_may_be_replaced(run: Path) -> None:
    (run / "new").mkdir()
    (run / "2" / MANIFEST).write_bytes(b"no manifest")
    fds.save(trained(3), run, tag="new")
    fds.save(trained(2), run, tag="2")
    assert load(run, "2")[0] == 2
    assert load(run, "new")[0] == 3


def test_a_folder_of_another_library(tmp_path: Path) -> None:
    """DeepSpeed, too, has a file named latest: it must still find its checkpoint."""
    (tmp_path / "global_step10").mkdir()
    (tmp_path / "latest").write_text("global_step10")
    for use in (lambda: fds.save(trained(1), tmp_path), lambda: load(tmp_path), lambda: checkpointing.Saver(tmp_path)):
        with pytest.raises(checkpointing.CheckpointError, match=r"was not written by this library.*from_deepspeed"):
            use()
    assert (tmp_path / "latest").read_text() == "global_step10"


def test_the_pointer_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    with pytest.raises(checkpointing.CheckpointError, match="latest is a folder"):
        fds.save(trained(1), tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["latest"]


def test_a_pipe_in_a_files_place(run: Path) -> None:
    """Opening it would wait for ever."""
    (run / "2" / "00000.bin").unlink()
    os.mkfifo(run / "2" / "00000.bin")
    with pytest.raises(checkpointing.DamagedError, match="is not a file of bytes"):
        load(run, "2")


@pytest.mark.parametrize("use", [lambda run: fds.save(trained(1), run, tag=100), lambda run: load(run, 100)])
def test_a_tag_is_a_string(run: Path, use: Callable[[Path], Any]) -> None:
    with pytest.raises(TypeError, match="tag=100 must be a string; pass tag='100'"):
        use(run)


def test_a_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A process that was forked meanwhile, as a loader's workers are, has the lock's file open for longer."""
    first = directory.take_lock(tmp_path)
    child = os.dup(first.descriptor)
    first.release()
    directory.take_lock(tmp_path).release()
    os.close(child)


def test_all_ranks_hear_of_a_busy_folder(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "_PATIENCE", 0.1)

    def program() -> None:
        with pytest.raises(checkpointing.BusyError):
            fds.save(trained(3), run)

    with checkpointing.Saver(run):
        comm.simulate(program, world_size=2)


def test_ranks_that_see_no_common_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two hosts without a common file system nobody waits for files that cannot come."""
    monkeypatch.setattr(
        importlib.import_module("functional_ds.checkpointing.save"), "staging", lambda folder: folder / "on another host"
    )

    def program() -> None:
        with pytest.raises(checkpointing.CheckpointError, match="all ranks must see the same file system"):
            fds.save(trained(1), tmp_path)

    comm.simulate(program, world_size=2)


def test_ranks_of_different_programs(tmp_path: Path) -> None:
    def program() -> None:
        step = fds.train_step(lambda p, x: p["w"].sum() * x, fds.sgd(0.1))
        state = step.init({"w": torch.ones(2 + comm.world().rank)})
        with pytest.raises(checkpointing.CheckpointError, match="is this the state of one step on all ranks"):
            fds.save(state, tmp_path)

    comm.simulate(program, world_size=2)
    assert not list(tmp_path.glob(".saving*"))


def test_parts_of_the_state_that_nobody_has(tmp_path: Path) -> None:
    """Saving on one rank of two what both have in shards is refused, and says what is missing."""

    def program() -> None:
        step = transforms.zero(3)(fds.train_step(lambda p, x: p["w"].sum() * x, fds.sgd(0.1)))
        state = step.init({"w": torch.ones(9)})
        with pytest.raises(checkpointing.CheckpointError, match="no rank has the elements"):
            fds.save(state, tmp_path / str(comm.world().rank), group=comm.new_group([comm.world().rank]))

    comm.simulate(program, world_size=2)
