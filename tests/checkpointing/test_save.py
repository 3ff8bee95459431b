"""Saves in the background: nothing is lost, nothing is held twice, and whatever goes wrong is heard of."""

import ctypes
import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import functional_ds as fds
from functional_ds import checkpointing, comm, transforms
from functional_ds.checkpointing import storage
from functional_ds.checkpointing.save import _described
from functional_ds.transforms.offloading import fetched

STEP = transforms.zero(1)(fds.train_step(lambda p, x: (p["w"] * x).sum(), fds.adamw(0.1)))


def fresh() -> Any:
    return {"w": torch.arange(6.0)}


class Gate:
    """Writers wait here until they are let through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.active, self.most = threading.Event(), 0, 0
        self._write, self._lock = storage.write, threading.Lock()
        monkeypatch.setattr(storage, "write", self)

    def __call__(self, path: Path, pieces: Any) -> Any:
        with self._lock:
            self.active += 1
            self.most = max(self.most, self.active)
        try:
            assert self.opened.wait(60)
            return self._write(path, pieces)
        finally:
            with self._lock:
                self.active -= 1


def test_the_step_goes_on_while_the_copy_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps donate the state that is being saved, and what is saved is what it was; published on its own, without a call."""
    gate = Gate(monkeypatch)

    def program() -> tuple[Any, fds.State]:
        state, _ = STEP(STEP.init(fresh()), torch.ones(6))
        with checkpointing.Saver(tmp_path) as saver:
            tag = saver.save(state, extra={"batches": 1})
            kept = STEP.params(state)
            for _ in range(3):
                state, _ = STEP(state, torch.ones(6))
            assert checkpointing.latest(tmp_path) is None
            comm.barrier()
            gate.opened.set()
            until = time.monotonic() + 60
            while comm.world().rank == 0 and checkpointing.latest(tmp_path) != tag:
                assert time.monotonic() < until
                time.sleep(0.01)
            saver.check()
        return kept, fds.load(tmp_path, like=STEP.init(fresh()), with_extra=True)

    for kept, (state, extra) in comm.simulate(program, world_size=2):
        assert extra == {"batches": 1}
        assert int(state.step) == 1
        assert torch.equal(torch.cat([leaf[:6] for leaf in state.params]), kept["w"])


def test_one_copy_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save waits for the one before, in its memory; leaving the block waits for the last."""
    gate = Gate(monkeypatch)
    gate.opened.set()

    def program() -> int:
        state, rooms = STEP.init(fresh()), set()
        with checkpointing.Saver(tmp_path, keep_last=2) as saver:
            for _ in range(4):
                state, _ = STEP(state, torch.ones(6))
                saver.save(state)
                rooms.add(saver._buffer.data_ptr())
        return len(rooms)

    assert comm.simulate(program, world_size=1) == [1]
    assert gate.most == 1
    assert checkpointing.tags(tmp_path) == ["3", "4"]
    assert checkpointing.latest(tmp_path) == "4"


def test_a_writers_error_comes_with_the_next_call_on_every_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = storage.write

    def failing(path: Path, pieces: Any) -> Any:
        if path.name == "00001.bin":
            raise OSError(5, "Input/output error", str(path))
        return real(path, pieces)

    monkeypatch.setattr(storage, "write", failing)

    def program(call: str) -> None:
        state = STEP.init(fresh())
        saver = checkpointing.Saver(tmp_path)
        saver.save(state, tag="bad")
        named = "" if comm.world().rank == 1 else "rank 1: "
        with pytest.raises(
            checkpointing.CheckpointError, match=f"^{named}the checkpoint 'bad' could not be written into .*: Input/output"
        ):
            saver.wait() if call == "wait" else saver.save(state, tag="next")
        saver.wait()  # said once
        saver.close()

    for call in ("wait", "save"):
        comm.simulate(program, call, world_size=3)
    monkeypatch.undo()
    assert checkpointing.tags(tmp_path) == []
    assert [entry.name for entry in tmp_path.iterdir()] == [".lock"]


def check_for_a_minute(saver: checkpointing.Saver) -> None:
    for _ in range(600):
        saver.check()
        time.sleep(0.1)


def test_check_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(path: Path, pieces: Any) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(storage, "write", failing)
    saver = checkpointing.Saver(tmp_path)
    saver.check()
    saver.save(STEP.init(fresh()))
    with pytest.raises(checkpointing.CheckpointError, match="Input/output"):
        check_for_a_minute(saver)
    with pytest.raises(checkpointing.CheckpointError, match="Input/output"):
        saver.close()
    checkpointing.Saver(tmp_path).close()  # the folder is free


def test_an_error_in_the_block_is_the_one_that_is_seen(tmp_path: Path) -> None:
    """What was under way is finished all the same."""

    def block() -> None:
        with checkpointing.Saver(tmp_path) as saver:
            saver.save(STEP.init(fresh()), tag="last")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        block()
    assert checkpointing.tags(tmp_path) == ["last"]


def test_a_rank_that_dies_leaves_the_checkpoint_from_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits for a file that never comes, and gives up when its own program does."""
    monkeypatch.setattr(checkpointing.writer, "_GRACE", 0.3)
    real = storage.write

    def dying(path: Path, pieces: Any) -> Any:
        if path.name == "00001.bin" and checkpointing.tags(tmp_path):
            raise SystemExit
        return real(path, pieces)

    def program() -> None:
        state = STEP.init(fresh())
        with checkpointing.Saver(tmp_path) as saver:
            saver.save(state, tag="whole")
            saver.wait()
            monkeypatch.setattr(storage, "write", dying)
            saver.save(state, tag="half")
            with pytest.raises(checkpointing.CheckpointError):
                saver.close()

    comm.simulate(program, world_size=2)
    assert checkpointing.tags(tmp_path) == ["whole"]
    fds.save(STEP.init(fresh()), tmp_path, tag="next")
    assert not list(tmp_path.glob(".saving*"))


# -- offloaded states ----------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("background", [False, True])
def test_an_offloaded_state_is_saved_as_the_same_files(tmp_path: Path, stage: int, background: bool) -> None:
    """Law: ``save(state)`` writes the files of ``save(fetched(state))``, whatever the pieces and the leaves' places in them."""
    (tmp_path / "files").mkdir()
    params = "disk" if stage == 3 else None
    away = transforms.offload("disk", params, path=tmp_path / "files", buffer_bytes=2**13, direct=False)

    def program() -> None:
        torch.manual_seed(0)
        params = {"a": torch.randn(5000), "b": torch.randn(3), "c": torch.randn(70, 90)}
        step = transforms.zero(stage)(away(fds.train_step(lambda p, x: sum((w * x).sum() for w in p.values()), fds.adamw(0.1))))
        state, _ = step(step.init(params), torch.ones(1))
        with checkpointing.Saver(tmp_path / "pieces") as saver:
            saver._start(partial(_described, state), tag="1", extra=None, snapshot=background)
        fds.save(fetched(state), tmp_path / "whole", tag="1")

    comm.simulate(program, world_size=2)
    names = sorted(path.name for path in (tmp_path / "whole" / "1").iterdir())
    assert names == ["00000.bin", "00001.bin", "manifest.json"]
    for name in names:
        assert (tmp_path / "pieces" / "1" / name).read_bytes() == (tmp_path / "whole" / "1" / name).read_bytes()


def resident(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def growth(folder: Path) -> int:
    """By how many bytes this process grew at most while it saved 60 MiB from a disk."""
    away = transforms.offload("disk", "disk", path=folder, buffer_bytes=2**20)
    step = transforms.zero(3)(away(fds.train_step(lambda p, x: p["0"].sum(), fds.adamw(0.1))))
    fds.save(step.init({"0": torch.ones(9)}), folder / "warm")
    state = step.init({f"{i}": torch.full((2**20,), float(i)) for i in range(5)})
    getattr(ctypes.CDLL(None), "malloc_trim", int)(0)  # so that the save does not take memory that is free, but counted
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    fds.save(state, folder / "run")
    return resident("VmHWM") - before


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's account of a process's memory")
def test_an_offloaded_state_is_never_whole_in_memory(tmp_path: Path) -> None:
    (grown,) = comm.spawn(growth, tmp_path, world_size=1)
    assert grown < 28 * 2**20, grown / 2**20  # the writer's buffers, pieces, and the interpreter's own
