"""Text is read up to a size, JSON up to a depth, and strings are those that can be written."""

import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from functional_ds.base.disk.files import MAX_DEPTH, MAX_TEXT, check_plain, checked_path, parse_json, read_regular, read_text
from tests.planting import Bug, planted

CHARACTERS = st.characters(codec="utf-8")
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(CHARACTERS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(CHARACTERS), inner, max_size=3),
)


@given(PLAIN)
def test_what_json_writes_is_read(data: object) -> None:
    check_plain(data)
    assert parse_json(json.dumps(data)) == json.loads(json.dumps(data))


@given(st.integers(1, 3 * MAX_DEPTH), st.sampled_from(["[", '{"a":']))
def test_the_depth_has_a_bound(depth: int, block: str) -> None:
    text = block * depth + "1" + ("]" if block == "[" else "}") * depth
    if depth <= MAX_DEPTH:
        parse_json(text)
    else:
        with pytest.raises(json.JSONDecodeError, match="nested deeper than 64"):
            parse_json(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, "nested deeper than 64"),
        ("[" * 1000, "nested deeper than 64"),
        ('{"a": "]' + "[" * 1000, "Unterminated"),
        ("[" * 65 + "1", "nested deeper than 64"),
        ("9" * 5000, "4300 digits"),
        (r'{"\ud800": 1}', "half of a surrogate pair"),
        (r'["a\udfff"]', "half of a surrogate pair"),
        ("[1", "Expecting"),
    ],
)
@pytest.mark.parametrize("limit", [1000, 3000])
def test_what_is_no_such_text_is_a_json_error(text: str, says: str, limit: int) -> None:
    """Whatever recursion limit another library has set."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    try:
        with pytest.raises(json.JSONDecodeError, match=says):
            parse_json(text)
    finally:
        sys.setrecursionlimit(before)


def test_a_pair_of_surrogates_is_a_character() -> None:
    assert parse_json(r'"\ud83d\ude00"') == "\U0001f600"


@pytest.mark.parametrize("size", [0, 1, 20])
@pytest.mark.parametrize("limit", [0, 1, 19, 20])
def test_a_file_has_at_most_the_limit(tmp_path: Path, size: int, limit: int) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"x" * size)
    if size <= limit:
        assert read_regular(path, limit=limit) == b"x" * size
    else:
        with pytest.raises(OSError, match=f"it has {size} bytes, and at most {limit} are read"):
            read_regular(path, limit=limit)


def test_a_file_of_the_kernels_says_that_it_has_no_bytes() -> None:
    path = Path("/proc/self/status")
    assert path.stat().st_size == 0
    assert read_regular(path, limit=1 << 16).startswith(b"Name:")
    assert read_regular(path, limit=1 << 60).startswith(b"Name:")  # no limit of memory is asked for
    with pytest.raises(OSError, match="at most 10 are read"):
        read_regular(path, limit=10)


def test_a_sparse_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, 1 << 42)
    with pytest.raises(OSError, match="it has 4,398,046,511,104 bytes"):
        read_text(path)
    bug = Bug("the size is not looked at", "base.disk.files:read_open", "size <= limit", "True", MemoryError)
    with planted(bug), pytest.raises(bug.shows):
        read_text(path)


@pytest.mark.parametrize("path", ["/dev/zero", "pipe", "."])
def test_what_is_no_file_of_bytes_is_named(tmp_path: Path, path: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=r"not a file of bytes|directory"):
        read_text(tmp_path / path, limit=MAX_TEXT)


def test_a_path_that_no_file_system_takes() -> None:
    with pytest.raises(ValueError, match=r"path='a\\ud800' has the character '\\ud800'"):
        checked_path("a\ud800")
    assert checked_path("a\udc80") == Path("a\udc80")  # a byte that is no UTF-8
