"""docs/contributing.md: each of its diffs is applied to a copy of the library, and a small program uses what it adds.

A second program has the diff without one of its files, and must end with the error that the page names.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

TOP = Path(__file__).parents[1]
PAGE = TOP / "docs/contributing.md"
PATCHES = TOP / "docs/patches"
_START = """
import torch
import functional_ds as fds
from functional_ds import comm, transforms as T

def loss(params, x):
    return torch.tanh(x @ params["w"]).square().mean()

def run(*strategy, optimizer=None, steps=2):
    step = fds.compose(*strategy)(fds.train_step(loss, optimizer or fds.adamw(0.1)))
    state, world = step.init({"w": torch.linspace(-1, 1, 12).view(4, 3)}), comm.world()
    for _ in range(steps):
        x = torch.linspace(-1, 1, 32).view(8, 4).tensor_split(world.size)[world.rank]
        state, metrics = step(state, x)
    return step.params(state)["w"]

def same(found, expected, **tolerance):
    for one in found:
        torch.testing.assert_close(one, expected, **tolerance)
"""


@attrs.frozen
class Change:
    """A diff of the page.

    Attributes:
        shows: a program that uses it.
        forgotten: what the program says, by the file of the diff that is left out.
    """

    shows: str
    forgotten: dict[str, str] = attrs.field(factory=dict)


CHANGES = {
    "optimizer": Change(
        """
for stage in range(4):
    same(comm.simulate(lambda: run(T.zero(stage), optimizer=fds.signum(0.1)), world_size=2), run(optimizer=fds.signum(0.1)))
""",
        {"functional_ds/__init__.py": "module 'functional_ds' has no attribute 'signum'"},
    ),
    "zero-variant": Change(
        """
def program(stage):
    with comm.ledger() as book:
        params = run(T.zero(stage, aggregate="all_to_all"))
    return params, {row.collective for row in book.rows}

for stage in (1, 2, 3):
    for params, sent in comm.simulate(program, stage, world_size=2):
        same([params], run())
        assert "all_to_all" in sent and "reduce_scatter" not in sent, f"sent: {sent}"
""",
        {
            "transforms/zero/config.py": "aggregate='all_to_all' is unknown: use one of reduce_scatter, all_reduce, owner",
            "transforms/zero/collectives.py": "AssertionError: sent: ",  # right numbers, by reduce_scatter
        },
    ),
    "collective": Change(
        """
def program():
    x = torch.tensor([1.0 + comm.world().rank], requires_grad=True)
    y = comm.neighbour_mean(x)
    y.sum().backward()
    return y.item(), x.grad.item()

assert comm.simulate(program, world_size=4) == [(2.0, 1.0), (2.0, 1.0), (3.0, 1.0), (3.0, 1.0)]
""",
        {"comm/__init__.py": "module 'functional_ds.comm' has no attribute 'neighbour_mean'"},
    ),
    "attention-kernel": Change(
        """
from functional_ds.parallel.sequence import block_attention

generator = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(2, 4, 6, width, generator=generator) for width in (8, 8, 12))
grad = torch.randn(2, 4, 6, 12, generator=generator)
assert block_attention.takes(q, v, False) == "padded"
mine = block_attention.attend(q, k, v, scale=0.3, causal=True)
back = block_attention.attend_backward(grad, q, k, v, o=mine[0], lse=mine[1], scale=0.3, causal=True)
block_attention.takes = lambda q, v, masked: "formula"
formula = block_attention.attend(q, k, v, scale=0.3, causal=True)
same([torch.cat([x.flatten() for x in mine])], torch.cat([x.flatten() for x in formula]))
plain = block_attention.attend_backward(grad, q, k, v, o=mine[0], lse=mine[1], scale=0.3, causal=True)
same([torch.cat([x.flatten() for x in back])], torch.cat([x.flatten() for x in plain]))
"""
    ),
    "graph-pass": Change(
        """
from functional_ds import compiling
from functional_ds.testing import check_pass

def program():
    step = T.zero(3)(fds.train_step(loss, fds.adamw(0.1)))
    return step, step.init({"w": torch.ones(4, 3)}), torch.ones(2, 4)

check_pass(compiling.without_detach, program)
""",
        {"functional_ds/compiling/__init__.py": "module 'functional_ds.compiling' has no attribute 'without_detach'"},
    ),
    "stream-rule": Change(
        """
from functional_ds.testing import simulated_cuda

with simulated_cuda(check=False) as gpu:
    torch.cuda.Stream().wait_event(torch.cuda.Event())
assert "waits for an event that was never recorded" in gpu.races[0].text
with simulated_cuda() as gpu:
    torch.cuda.Stream().wait_event(torch.cuda.current_stream().record_event())
"""
    ),
    "schedule": Change(
        """
from functional_ds import pipelining as pp

schedule = pp.published("patient_one_f_one_b", 4, 8)
pp.validate(schedule)
assert pp.in_flight(schedule) == (7, 5, 3, 1)
assert "patient_one_f_one_b" in pp.by_name(4, 8)
""",
        {"functional_ds/pipelining/schedules/published.py": "there is no schedule 'patient_one_f_one_b'"},
    ),
    "mesh-axis": Change(
        """
for program in (lambda: run(T.data_axis()), lambda: run(T.clip(0.1), T.data_axis())):
    same(comm.simulate(program, world_size=4), program())

def on_a_mesh():
    mesh = comm.mesh(dp=2, tp=2)
    return run(T.data_axis(mesh["dp"])) if mesh["tp"].rank < 0 else mesh["dp"].size

assert comm.simulate(on_a_mesh, world_size=4) == [2] * 4
""",
        {"transforms/__init__.py": "module 'functional_ds.transforms' has no attribute 'data_axis'"},
    ),
}


def files(patch: str) -> list[str]:
    """The files that a patch changes."""
    return re.findall(r"^\+\+\+ b/(.+)$", (PATCHES / f"{patch}.patch").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library's folders, linked so that they are one import package."""
    place = tmp_path_factory.mktemp("library")
    for layer in ("functional_ds", "comm", "transforms"):
        shutil.copytree(TOP / layer, place / layer, ignore=shutil.ignore_patterns("*.pyc.*"))
    for layer in ("comm", "transforms"):
        (place / "functional_ds" / layer).symlink_to(place / layer)
    return place


def apply(place: Path, patch: str, *options: str) -> None:
    subprocess.run(["git", "apply", *options, str(PATCHES / f"{patch}.patch")], cwd=place, check=True)


def run(place: Path, program: str) -> "subprocess.CompletedProcess[str]":
    """A program in a process that imports the library from there."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(place)}
    file = place / "program.py"
    file.write_text(_START + program, encoding="utf-8")
    return subprocess.run([sys.executable, str(file)], cwd=place, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.sample(4)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CHANGES)
def test_the_diff_works_and_a_forgotten_file_is_named(name: str, copy: Path) -> None:
    change = CHANGES[name]
    apply(copy, name)
    try:
        done = run(copy, change.shows)
    finally:
        apply(copy, name, "-R")
    assert done.returncode == 0, done.stderr
    for forgotten, error in change.forgotten.items():
        assert forgotten in files(name)
        apply(copy, name, f"--exclude={forgotten}")
        try:
            done = run(copy, change.shows)
        finally:
            apply(copy, name, "-R", f"--exclude={forgotten}")
        assert done.returncode != 0
        assert error in done.stderr, done.stderr


def test_the_page_has_every_diff_and_at_most_two_files() -> None:
    """The page's table names each patch with its files, and what one is told who forgets the second."""
    page = PAGE.read_text(encoding="utf-8")
    assert sorted(path.stem for path in PATCHES.glob("*.patch")) == sorted(CHANGES)
    for name, change in CHANGES.items():
        row = next(line for line in page.splitlines() if line.startswith("|") and f"patches/{name}.patch" in line)
        assert len(files(name)) <= 2
        assert re.findall(r"`((?:comm|functional_ds|transforms)/[\w/]+\.py)`", row) == files(name)
        assert all(error in row for error in change.forgotten.values() if not error.startswith("AssertionError"))


def test_a_row_without_a_part_is_an_error() -> None:
    """What the page says of a collective's row."""
    from functional_ds.comm.table import Collective

    with pytest.raises(TypeError, match="'mine' communicates, so it needs volume, result, traffic, gloo, nccl"):
        Collective(name="mine", denotation=lambda xs, options: list(xs))
