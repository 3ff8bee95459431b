"""Files: what is written is read back past the page cache or through it, replacement is atomic, and a lock has one owner."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from functional_ds.base.disk import direct_io
from functional_ds.base.disk.direct_io import PAGE, DirectFile, aligned
from functional_ds.base.disk.files import FileLock, process_note, reserve, write_at, write_atomically, write_synced


@pytest.mark.parametrize("direct", [True, False])
@given(
    writes=st.lists(st.tuples(st.integers(0, 3 * PAGE), st.binary(min_size=1, max_size=2 * PAGE)), max_size=4),
    pages=st.integers(0, 2),
    data=st.data(),
)
def test_reads_give_what_was_written(
    tmp_path_factory: pytest.TempPathFactory,
    direct: bool,
    writes: list[tuple[int, bytes]],
    pages: int,
    data: st.DataObject,
) -> None:
    """At any position, aligned or not, in any order; a read ends where the file does."""
    path, expected = tmp_path_factory.mktemp("f") / "a", bytearray()
    whole = aligned(pages * PAGE).fill_(7)
    with DirectFile.open(path, os.O_RDWR | os.O_CREAT, direct=direct) as file:
        for position, values in [(0, bytes(whole.numpy().data)), *writes]:
            into = aligned(len(values)).numpy().data[: len(values)]
            into[:] = values
            file.write(into, position=position)
            expected.extend(bytes(max(0, position + len(values) - len(expected))))
            expected[position : position + len(values)] = values
        assert file.size == len(expected)
    assert path.read_bytes() == expected
    start, nbytes = data.draw(st.integers(0, len(expected))), data.draw(st.integers(0, 2 * PAGE))
    into = aligned(nbytes).numpy().data
    with DirectFile.open(path, direct=direct) as file:
        count = file.read(into, position=start, nbytes=nbytes)
    assert count >= min(nbytes, len(expected) - start)
    assert bytes(into[:count]) == expected[start : start + count]


def test_whole_pages_go_past_the_cache_and_the_rest_through_it(tmp_path: Path) -> None:
    memory = aligned(2 * PAGE).numpy().data
    with DirectFile.open(tmp_path / "a", os.O_WRONLY | os.O_CREAT) as file:
        if not (direct_io._DIRECT and file.direct):
            pytest.skip("this file system has no direct access")
        file.write(memory, position=0)
        assert file.direct
        file.write(memory[:10], position=2 * PAGE)
        assert not file.direct


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    write_atomically(path, b"before")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        for write in (lambda: write_atomically(path, b"after"), lambda: write_synced(tmp_path / "b", b"new")):
            with pytest.raises(OSError, match="No space left"):
                write()
    assert path.read_bytes() == b"before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_reserved_space_is_written_in_pieces(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "a", os.O_WRONLY | os.O_CREAT)
    reserve(descriptor, 8)
    write_at(descriptor, memoryview(b"cd"), position=4)
    os.close(descriptor)
    assert (tmp_path / "a").read_bytes() == bytes(4) + b"cd" + bytes(2)


HOLDS = """
import sys
from pathlib import Path
from functional_ds.base.disk.files import FileLock
lock = FileLock.take(Path(sys.argv[1]))
print("taken", flush=True)
sys.stdin.read()
"""


def test_a_lock_has_one_owner_and_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    words = [sys.executable, "-c", HOLDS, str(path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"taken\n"
        assert FileLock.take(path) is None
        assert FileLock.owner(path) == {"host": process_note()["host"], "pid": process.pid}
        process.kill()
    lock = FileLock.take(path)
    assert lock is not None
    assert FileLock.take(path) is None  # of this process, too
    assert FileLock.owner(path) == process_note()
    lock.release()
    lock.release()
    assert FileLock.owner(path) is None
