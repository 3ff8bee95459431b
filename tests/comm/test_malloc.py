"""Which malloc options the library leaves alone: each user's choice, in a process of its own that loads no torch."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from functional_ds.comm.backends import malloc
from tests.planting import Bug, planted_source

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")

PROGRAM = """
import ctypes, importlib.util, sys
spec = importlib.util.spec_from_file_location("malloc", sys.argv[1])
malloc = importlib.util.module_from_spec(spec)
spec.loader.exec_module(malloc)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
exec(sys.argv[2])
print(malloc.keep_freed_memory() is not None, malloc.keep_freed_memory.__wrapped__() is not None)
"""


def _kept(before: str = "", source: str = str(malloc.__file__), **environment: str) -> str:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_", malloc.SETTING))}
    command = [sys.executable, "-c", PROGRAM, source, before]
    done = subprocess.run(command, env={**clean, **environment}, capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("before", ["", "libc.free(libc.malloc(20 << 20))", "libc.free(libc.malloc(40 << 20))"])
def test_what_no_user_has_set_is_set_once(before: str) -> None:
    assert _kept(before) == "True False"


@pytest.mark.parametrize(
    "environment",
    [
        {"MALLOC_MMAP_THRESHOLD_": "1048576"},
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        {"MALLOC_TOP_PAD_": "131072"},
        {"MALLOC_MMAP_MAX_": "0"},
        {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=2147483648"},
        {malloc.SETTING: "default"},
    ],
)
def test_choices_of_the_environment_stay(environment: dict[str, str]) -> None:
    assert _kept(**environment) == "False False"


@pytest.mark.parametrize(("parameter", "value"), [(-1, 1 << 20), (-2, 0), (-3, 1 << 16), (-3, 1 << 28), (-4, 0)])
def test_an_earlier_mallopt_stays(parameter: int, value: int) -> None:
    assert _kept(f"libc.mallopt({parameter}, {value})") == "False False"


PRELOADED = """
#include <stddef.h>
#include <string.h>
static _Alignas(16) char heap[1 << 28];
static size_t used;
void *malloc(size_t size) {
    size_t *block = (size_t *)(heap + __atomic_fetch_add(&used, (size + 31) / 16 * 16, __ATOMIC_SEQ_CST));
    block[0] = size, block[1] = size > 32 << 20 ? 2 : 0;  // as glibc marks its mappings
    return block + 2;
}
void free(void *block) {}
void *calloc(size_t count, size_t size) { return malloc(count * size); }
void *realloc(void *old, size_t size) {
    void *block = malloc(size);
    if (old) memcpy(block, old, ((size_t *)old)[-2] < size ? ((size_t *)old)[-2] : size);
    return block;
}
"""


OTHERS = Bug("any malloc is taken for glibc's", "comm.backends.malloc:_counts", "size <= grown < 2 * size", "True")


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_preloaded_allocator_stays(tmp_path: Path) -> None:
    """A planted bug is seen."""
    source, library, bad = tmp_path / "preloaded.c", tmp_path / "preloaded.so", tmp_path / "bad.py"
    source.write_text(PRELOADED)
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-fno-builtin", "-o", str(library), str(source)], check=True)
    assert _kept(LD_PRELOAD=str(library)) == "False False"
    bad.write_text(planted_source(OTHERS))
    assert _kept(source=str(bad), LD_PRELOAD=str(library)) != "False False"


def test_an_unknown_setting_is_refused() -> None:
    assert "is unknown" in _kept(**{malloc.SETTING: "keeps"})
