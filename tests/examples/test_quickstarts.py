"""The quickstarts: their console blocks print what the pages show, and their programs do what these say."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import functional_ds as fds
from functional_ds import comm
from functional_ds.comm.algorithms.cost import counted

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import new_collective
import new_optimizer

TOP = Path(__file__).resolve().parents[2]
CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PATIENCE = 500  # seconds of a session: processes import torch


def words_and_numbers(text: str) -> tuple[str, list[float]]:
    number = r"\d+(?:\.\d+)?(?:e-\d+)?"
    return re.sub(number, "#", text.strip()), [float(found) for found in re.findall(number, text)]


def sessions(page: Path) -> list[list[tuple[str, str]]]:
    """The commands of each console block, with what the page shows of their outputs."""
    blocks = CONSOLE.findall(page.read_text(encoding="utf-8"))
    return [
        [(line, shown) for line, _, shown in (part.partition("\n") for part in block[2:].split("\n$ "))] for block in blocks
    ]


def run(commands: list[str], folder: Path) -> list[str]:
    """What each command prints, in one shell that begins in the folder."""
    mark = "--- next ---"
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": paths, "OMP_NUM_THREADS": "1", "COLUMNS": "140", "PYTHONDONTWRITEBYTECODE": "1"}
    script = "set -e\n" + "".join(f"{command}\necho '{mark}'\n" for command in commands)
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    return [printed.strip("\n") for printed in done.stdout.split(f"{mark}\n")[:-1]]


def check_sessions(page: Path, folder: Path, *, slow: bool) -> None:
    """Runs the page's commands, plans of large models only if slow, in one shell, and compares what they print."""
    shutil.copytree(TOP / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    pairs = [pair for session in sessions(page) for pair in session if ("functional-ds plan" in pair[0]) == slow]
    shutil.copy(TOP / "LICENSE", folder)  # the text that one trains on
    assert pairs
    for (line, shown), printed in zip(pairs, run([line for line, _ in pairs], folder), strict=True):
        words, numbers = words_and_numbers(shown)
        near = pytest.approx(numbers, rel=0 if slow else 5e-3, abs=0)  # a plan is arithmetic: last digits count
        assert words_and_numbers(printed) == (words, near), line


@pytest.mark.sample(1)
@pytest.mark.timeout(PATIENCE)
@pytest.mark.parametrize("name", ["deepspeed", "quickstart-llama"])
def test_commands_print_what_the_page_shows(name: str, tmp_path: Path) -> None:
    check_sessions(TOP / f"docs/{name}.md", tmp_path, slow=False)


@pytest.mark.sample(0)
@pytest.mark.timeout(PATIENCE)
def test_the_plan_of_a_large_model_is_the_pages(tmp_path: Path) -> None:
    check_sessions(TOP / "docs/quickstart-llama.md", tmp_path, slow=True)


def test_an_optimizer_of_ones_own_is_zeros() -> None:
    alone = new_optimizer.train(0)
    for stage in range(4):
        for losses in comm.simulate(new_optimizer.train, stage, world_size=4):
            assert losses == pytest.approx(alone, rel=1e-5)


def test_a_collective_of_ones_own_keeps_its_laws() -> None:
    """And a value goes to each neighbour once."""
    fds.testing.collective_holds(new_collective.neighbour_mean, world_sizes=(1, 2, 5, 3)).check(refusals=False)
    for ranks in (1, 2, 3, 5):
        loads = counted(new_collective.neighbour_mean, ranks, torch.empty(7, device="meta"))
        assert [load.bytes for load in loads] == [4 * 7 * min(ranks - 1, 2)] * ranks


def test_decentralized_sgd_converges() -> None:
    for wrong, apart in comm.simulate(new_collective.train, 40, world_size=4):
        assert wrong < 0.05
        assert apart < 0.05
