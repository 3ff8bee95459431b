"""What goes wrong with files: a clear error that names the file, and the last state as it was; what dead runs leave."""

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.testing import assert_same
from functional_ds.transforms.offloading import fetched, traffic
from functional_ds.transforms.offloading.leaf_states import joined, list_lengths, parted, without_leaves

Undo = Callable[[], None]


def flipped(path: Path) -> Undo:
    """A bit of each page is another."""
    whole = path.read_bytes()
    path.write_bytes(bytes(byte ^ 4 if i % 4096 == 17 else byte for i, byte in enumerate(whole)))
    return lambda: _write(path, whole)


def shorter(path: Path) -> Undo:
    whole = path.read_bytes()
    os.truncate(path, len(whole) - 1)
    return lambda: _write(path, whole)


def longer(path: Path) -> Undo:
    whole = path.read_bytes()
    os.truncate(path, len(whole) + 1)
    return lambda: _write(path, whole)


def missing(path: Path) -> Undo:
    whole = path.read_bytes()
    path.unlink()
    return lambda: _write(path, whole)


def a_folder(path: Path) -> Undo:
    whole = path.read_bytes()
    path.unlink()
    path.mkdir()

    def undo() -> None:
        path.rmdir()
        _write(path, whole)

    return undo


def _write(path: Path, whole: bytes) -> None:
    path.write_bytes(whole)


DAMAGES = (flipped, shorter, longer, missing, a_folder)
MESSAGES = {
    "flipped": r"bytes at \d+ are not those that were written \(checksum",
    "shorter": "bytes long, but was",
    "longer": "bytes long, but was",
    "missing": "No such file",
    "a_folder": "bytes long, but was|Is a directory",
}


def files(folder: Path, name: str = "") -> list[Path]:
    return sorted(path for path in folder.glob("fds-offload-*/*") if name in path.name and path.name != "manifest.json")


def made(folder: Path, *chain: fds.Transform, params: str | None = None, numel: int = 3000) -> tuple[fds.Step, fds.State]:
    offload = T.offload("disk", params, path=folder, buffer_bytes=2**13, direct=False)
    zero = (T.zero(3),) if params else ()
    step = fds.compose(*chain, offload, *zero)(fds.train_step(lambda p, x: sum((w * x).sin().sum() for w in p), fds.adamw(0.1)))
    return step, step.init([torch.linspace(-1, 1, numel), torch.linspace(0, 1, 70)])


def content(step: fds.Step, state: fds.State) -> Any:
    return step.params(state), fetched(fds.tree.replace(state, slots={}, batch=None))


@pytest.mark.sample(7)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["exp_avg_sq", "masters"])
@pytest.mark.parametrize("which", [0, -1])
def test_an_update_that_fails_changes_nothing(damage: Any, name: str, which: int, tmp_path: Path) -> None:
    """The error names the file; the donated state is given back; once the file is good again, all goes on as if nothing was."""
    x = torch.tensor(0.5)
    step, state = made(tmp_path, T.mixed_precision("bf16"))
    state, _ = step(state, x)
    before, path = content(step, state), files(tmp_path, name)[which]
    expected = content(step, step(state, x, donate=False)[0])
    undo = damage(path)
    with pytest.raises(T.OffloadError, match=MESSAGES[damage.__name__]) as error:
        step(state, x)
    assert str(path) in str(error.value)
    undo()
    assert_same(content(step, state), before)
    state, _ = step(state, x)
    assert_same(content(step, state), expected)
    step(state, x)


@pytest.mark.parametrize("damage", [flipped, missing])
def test_params_that_cannot_be_read(damage: Any, tmp_path: Path) -> None:
    """Where they are needed, in the forward pass, and the state is intact."""
    step, state = made(tmp_path, params="disk")
    undo = damage(files(tmp_path, "params")[0])
    with pytest.raises(T.OffloadError, match="params"):
        step(state, torch.tensor(0.5))
    undo()
    step(state, torch.tensor(0.5))


def test_a_relative_folder_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the process goes elsewhere; its files go with the state."""
    (tmp_path / "files").mkdir()
    monkeypatch.chdir(tmp_path)
    step, state = made(Path("files"))
    monkeypatch.chdir("/")
    state, _ = step(state, torch.tensor(0.5))
    assert files(tmp_path / "files")
    del state
    gc.collect()
    assert not files(tmp_path / "files")


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_no_rank_goes_on_alone(stage: int, tmp_path: Path) -> None:
    """A file of one rank goes wrong: all ranks raise, and no rank's state has changed."""

    def program() -> Any:
        folder = tmp_path / str(comm.world().rank)
        folder.mkdir()
        chain = (T.mixed_precision("fp16", 8.0), T.offload("disk", path=folder, buffer_bytes=1, direct=False), T.zero(stage))
        step = fds.compose(*chain, T.clip(1.0))(fds.train_step(lambda p, x: (p["w"] * x).sin().sum(), fds.adamw(0.1)))
        state, _ = step(step.init({"w": torch.linspace(-1, 1, 300)}), torch.tensor(0.5))
        before = content(step, state)
        undo = flipped(files(folder, "masters")[0]) if comm.world().rank == 1 else lambda: None
        with pytest.raises(T.OffloadError) as error:
            step(state, torch.tensor(0.5))
        undo()
        assert_same(content(step, state), before)
        state, _ = step(state, torch.tensor(0.5))
        return str(error.value), content(step, state)

    found = comm.simulate(program, world_size=3)
    assert [("masters" in message, "1 other ranks" in message) for message, _ in found] == [
        (False, True),
        (True, False),
        (False, True),
    ]


def test_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads and writes that the system refuses, or cuts short."""
    step, state = made(tmp_path)
    before = content(step, state)
    read, write = os.preadv, os.pwritev

    def refuses(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    for name in ("preadv", "pwritev"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, refuses)
            with pytest.raises(T.OffloadError, match=r"exp_avg.*: Input/output error"):
                step(state, torch.tensor(0.5))
        assert_same(content(step, state), before)
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: read(fd, [buffers[0][:4096]], offset))
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: write(fd, [buffers[0][:1000]], offset))
    expected = content(step, step(state, torch.tensor(0.5), donate=False)[0])  # pieces of reads and writes are put together
    monkeypatch.undo()
    assert_same(content(step, step(state, torch.tensor(0.5))[0]), expected)


@pytest.mark.parametrize("slow", ["preadv", "pwritev"])
def test_a_slow_disk(slow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No buffer is filled again before it is written, also where units without files (scalars) come between."""
    params = {str(i): torch.tensor(1.0) if i % 3 else torch.ones(1500) for i in range(7)}

    def final(*strategy: fds.Transform) -> Any:
        step = fds.compose(*strategy)(fds.train_step(lambda p, x: sum((w * x).sum() for w in p.values()), fds.adamw(0.1)))
        state = step.init(params)
        for _ in range(3):
            state, _ = step(state, torch.tensor(0.5))
        return step.params(state)

    expected, quick = final(), getattr(os, slow)

    def slowly(*args: Any) -> Any:
        time.sleep(0.003)
        return quick(*args)

    monkeypatch.setattr(os, slow, slowly)
    assert_same(final(T.offload("disk", path=tmp_path, buffer_bytes=2**13)), expected)


def test_a_disk_that_fills_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kept state needs a third version; where there is no room for it, nothing has changed."""
    step, state = made(tmp_path)
    kept, _ = step(state, torch.tensor(0.5), donate=False)  # both versions are in use
    before = content(step, kept)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(T.OffloadError, match="exp_avg: no room for 20480 more bytes at 40960: No space left"):
            step(kept, torch.tensor(0.5))
    assert_same(content(step, kept), before)
    del state  # its version is free again
    step(kept, torch.tensor(0.5))
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(T.OffloadError, match="no room"):
            made(tmp_path)


def test_an_error_of_the_optimizer_leaves_nothing_under_way(tmp_path: Path) -> None:
    """Whatever it raises; the state was donated then, but the one it came from can go on."""
    calls = []

    def update(params: Any, grads: Any, state: Any, rate: Any) -> Any:
        calls.append(None)
        if len(calls) == 2:
            raise ZeroDivisionError("once")
        return [p.add_(m.add_(1)) for p, m in zip(params, state, strict=True)], state

    rule = fds.Optimizer(lambda params: [torch.zeros_like(p) for p in params], update, elementwise=True)
    offload = T.offload("disk", path=tmp_path, buffer_bytes=1)
    step = offload(fds.train_step(lambda p, x: (p["w"] * x).sum(), rule))
    state = step.init({"w": torch.zeros(1000)})
    with pytest.raises(ZeroDivisionError):
        step(state, torch.tensor(1.0), donate=False)
    state, _ = step(state, torch.tensor(1.0))
    assert_same(step.params(state)["w"], torch.ones(1000))


# -- what runs leave ---------------------------------------------------------------------------------------------------

DIES = """
import os, signal, sys, torch
import functional_ds as fds
from functional_ds import transforms as T
step = T.offload("disk", path=sys.argv[1])(fds.train_step(lambda p, x: (p["w"] * x).sum(), fds.adamw(0.1)))
state = step.init({"w": torch.ones(5000)})
print("ready", flush=True)
sys.stdin.read() if sys.argv[2] == "waits" else os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_dead_processes_left_is_removed_and_what_live_ones_have_is_not(tmp_path: Path) -> None:
    run = [sys.executable, "-c", DIES, str(tmp_path)]
    with subprocess.Popen([*run, "waits"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as alive:
        assert alive.stdout is not None
        assert alive.stdout.readline() == b"ready\n"
        (living,) = tmp_path.iterdir()
        assert subprocess.run([*run, "dies"], stdout=subprocess.PIPE, check=False).returncode == -signal.SIGKILL
        (dead,) = {*tmp_path.iterdir()} - {living}
        (tmp_path / "fds-offload-notours").mkdir()  # without a manifest nobody knows
        with pytest.warns(RuntimeWarning, match=f"removed what dead processes left in .*: {dead.name}"):
            step, state = made(tmp_path)
        assert living.exists()
        assert not dead.exists()
        assert (tmp_path / "fds-offload-notours").exists()
        alive.communicate(b"")
    assert not living.exists()  # a process that ends takes its files with it
    step(state, torch.tensor(0.5))


def test_bytes_on_the_disk_and_through_it(tmp_path: Path) -> None:
    """Two versions of each tensor, in whole pages a piece; an update reads one and writes the other."""
    step, state = made(tmp_path)
    sizes = [path.stat().st_size for path in files(tmp_path)]
    assert len(sizes) == 4  # a file a leaf and moment
    once = sum(sizes) // 2
    assert once == 2 * (5 + 1) * 4096  # 3000 elements come in five pieces, 70 in one; each has a page of its own
    before = traffic(state).read, traffic(state).written
    state, _ = step(state, torch.tensor(0.5))
    assert (traffic(state).read - before[0], traffic(state).written - before[1]) == (once, once)
    with pytest.raises(ValueError, match="this state has no files"):
        traffic(fds.train_step(lambda p, x: p["w"].sum(), fds.sgd(0.1)).init({"w": torch.ones(2)}))


# -- taking states apart -------------------------------------------------------------------------------------------------

_LISTS = st.lists(st.lists(st.integers(), max_size=3), min_size=2, max_size=2)


@pytest.mark.law(26)
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(_LISTS, max_size=4), st.integers())
def test_parted_is_the_inverse_of_joined(rows: list[list[list[int]]], scalar: int) -> None:
    """parted ∘ joined = id, what is in no list apart, of which all have the whole's."""
    rests = [{"a": (row[0], scalar), "b": row[1]} for row in rows]
    whole = joined(rests, {"a": ([], scalar), "b": []})
    assert whole == {"a": ([x for row in rows for x in row[0]], scalar), "b": [x for row in rows for x in row[1]]}
    assert parted(whole, [list_lengths(rest) for rest in rests]) == rests
    assert without_leaves(whole) == {"a": ([], scalar), "b": []}
