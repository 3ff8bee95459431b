"""Data files: what is wanted of them comes back, and a wrong bit in it does not."""

import errno
import fcntl
import itertools
import os
import random
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from functional_ds.base.disk import direct_io
from functional_ds.checkpointing import DamagedError, manifest, storage
from functional_ds.checkpointing.manifest import BLOCK


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 8 bytes, reads of 32, writes of 16: all that happens with megabytes happens with a few dozen bytes."""
    monkeypatch.setattr(storage, "BLOCK", 8)
    monkeypatch.setattr(manifest, "BLOCK", 8)
    monkeypatch.setattr(storage, "_READ_SIZE", 32)
    monkeypatch.setattr(storage, "_WRITE_SIZE", 16)


@given(data=st.binary(max_size=20_000), more=st.binary(max_size=100))
def test_the_checksum_is_zlibs(data: bytes, more: bytes) -> None:
    """Whichever package computes it: what one installation wrote another reads."""
    assert storage.crc32(more, storage.crc32(memoryview(data))) == zlib.crc32(data + more)


@pytest.mark.usefixtures("small")
@given(
    pieces=st.lists(st.binary(max_size=80), max_size=8),
    places=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 100)), max_size=5),
    flip=st.none() | st.integers(0, 10_000),
)
@example(pieces=[bytes(range(40))], places=[(0, 40), (0, 1), (33, 2)], flip=None)
def test_reading_gives_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], places: list[tuple[int, int]], flip: int | None
) -> None:
    """Any stretches of a file, overlapping or not, are what was written, and a flipped bit in a block of theirs is found."""
    folder, data = tmp_path_factory.mktemp("f"), b"".join(pieces)
    file = storage.write(folder / "00000.bin", (memoryview(piece) for piece in pieces))
    assert file.size == len(data)
    assert len(file.checks) == -(-len(data) // 8)
    storage.check_file(folder, file)
    found = [(min(p, len(data)), min(p + n, len(data))) for p, n in places]
    room = [bytearray(high - low) for low, high in found]
    wants = [storage.ReadRequest(low, memoryview(into)) for (low, _), into in zip(found, room, strict=True)]
    storage.read(folder, file, requests=wants)
    assert [bytes(into) for into in room] == [data[low:high] for low, high in found]
    if flip is not None and data:
        place = flip // 8 % len(data)
        spoilt = bytearray(data)
        spoilt[place] ^= 1 << flip % 8
        (folder / "00000.bin").write_bytes(spoilt)
        touched = any(low // 8 * 8 <= place < -(-high // 8) * 8 for low, high in found if high > low)
        if touched:
            with pytest.raises(DamagedError, match="is damaged in the block"):
                storage.read(folder, file, requests=wants)
        else:
            storage.read(folder, file, requests=wants)
        with pytest.raises(DamagedError):
            storage.check_file(folder, file)


@pytest.mark.parametrize("past_the_cache", [True, False])
@pytest.mark.parametrize("more", [0, 1, 4096, 5000])
def test_large_files_are_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int, past_the_cache: bool
) -> None:
    """Whole pages past the cache, where there is such a way, and the rest through it."""
    if not past_the_cache:
        monkeypatch.setattr(direct_io, "_DIRECT", 0)
    data = random.Random(more).randbytes(2 * storage._WRITE_SIZE + more)
    cuts = [0, 3, 3, BLOCK + 1, storage._WRITE_SIZE - 1, len(data)]
    file = storage.write(tmp_path / "a", (memoryview(data)[low:high] for low, high in itertools.pairwise(cuts)))
    assert (tmp_path / "a").read_bytes() == data
    assert file.size == len(data)
    storage.check_file(tmp_path, file)


def test_bytes_are_read_straight_into_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system writes into the requests' own memory, in as many calls as it wants; only what lies between goes elsewhere."""
    data = random.Random(0).randbytes(BLOCK + 5000)
    file = storage.write(tmp_path / "a", [memoryview(data)])
    call, given = os.preadv, list[tuple[int, int]]()

    def short(handle: int, parts: list[memoryview], position: int) -> int:
        given.extend((np.frombuffer(part, np.uint8).ctypes.data, len(part)) for part in parts)
        return call(handle, [parts[0][:300_000]], position)

    monkeypatch.setattr(os, "preadv", short)
    room = np.zeros(len(data), np.uint8)
    requests = [storage.ReadRequest(low, room[low:high].data) for low, high in ((0, 400_000), (400_010, len(data)))]
    storage.read(tmp_path, file, requests=requests)
    room[400_000:400_010] = np.frombuffer(data, np.uint8)[400_000:400_010]
    assert room.tobytes() == data
    inside = [count for place, count in given if 0 <= place - room.ctypes.data < len(room)]
    assert len(inside) > 4
    assert {count for place, count in given} - set(inside) == {10}


def test_a_file_system_that_refuses_a_write_past_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some take the flag, and then no writes."""
    write, refused = os.pwritev, [0]

    def picky(handle: int, data: list[memoryview], position: int) -> int:
        if fcntl.fcntl(handle, fcntl.F_GETFL) & direct_io._DIRECT:
            refused[0] += 1
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return write(handle, [data[0][:1000]], position)

    monkeypatch.setattr(os, "pwritev", picky)
    data = bytes(range(256)) * 100
    storage.write(tmp_path / "a", [memoryview(data)])
    assert (tmp_path / "a").read_bytes() == data
    assert refused[0] <= 1


def test_no_file_is_overwritten(tmp_path: Path) -> None:
    storage.write(tmp_path / "a", [memoryview(b"one")])
    with pytest.raises(FileExistsError):
        storage.write(tmp_path / "a", [memoryview(b"two")])
    assert (tmp_path / "a").read_bytes() == b"one"
    assert BLOCK % 4096 == 0
