"""The pytest plugin: a method that holds passes, a wrong one fails with its table, and the mark leaves tests out."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = """
import sys
from functools import partial

import functional_ds as fds
from functional_ds import transforms as T


def centred():
    def update(inner, step, state, grads):
        return inner(step, state, fds.Weighted([grad - grad.mean() for grad in grads.sum], grads.weight))

    return fds.wrap("centred", update=update)


def test_other():
    assert "torch" not in sys.modules


def test_right(holds):
    assert holds(partial(T.clip, 0.1), only=["stages"]).outcomes() == {"stages": "ok"}


def test_wrong(holds):
    holds(centred, only=["stages"])


def test_refused(holds):
    holds(partial(T.mixed_precision, "bf16"), order="before", within=0.05, only=["bf16"], refusals=False)
"""


def run(folder: Path, *options: str) -> str:
    """What pytest prints for the tests above in an empty project."""
    (folder / "conftest.py").write_text('pytest_plugins = ["functional_ds.testing.fixtures"]\n')
    (folder / "test_methods.py").write_text(TESTS)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "error", "--strict-markers", *options]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False).stdout


def test_it_fails_with_the_table(tmp_path: Path) -> None:
    found = run(tmp_path)
    assert "2 failed, 2 passed" in found, found
    assert "centred(), listed after T.zero\nstages             wrong: compose(T.zero(" in found
    assert "Tensor-likes" not in found  # no traceback
    assert "for params in comm.simulate(" in found
    assert "bf16               refused: ValueError" in found


def test_the_mark_leaves_tests_out(tmp_path: Path) -> None:
    found = run(tmp_path, "-m", "not holds")
    assert "1 passed, 3 deselected" in found, found
