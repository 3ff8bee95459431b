"""The reading order of the core is the path of a ZeRO-3 step: it enters no other file."""

import runpy
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T

TOP = Path(__file__).resolve().parents[1]
FOLDERS = ("functional_ds", "comm", "transforms")
BESIDE = {  # read, and entered before a step or in simulations
    "functional_ds/step/compose.py",
    "functional_ds/step/phases.py",
    "comm/simulation/simulator.py",
    "comm/simulation/schedule.py",
}
FILES, LINES = 40, 4_875  # of what a first step on simulated ranks enters, and of the code in it
ON_THE_WAY = 10  # files between a step and the wire


def loss(params: Any, x: Tensor) -> Tensor:
    for block in params["blocks"]:
        x = (x @ block["w"]).tanh()
    return (x @ params["head"]).square().mean()


def entered(steps: int = 2) -> set[str]:
    """The files of the library that the first steps of ZeRO-3 enter on this rank."""
    files = set[str]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(TOP) and path.relative_to(TOP).parts[0] in FOLDERS:
            files.add(path.relative_to(TOP).as_posix())

    params = {"blocks": [{"w": torch.ones(8, 8)} for _ in range(3)], "head": torch.ones(8, 1)}
    step = T.zero(3)(fds.train_step(loss, fds.adamw(1e-3)))
    state, batch = step.init(params), torch.ones(2, 8)
    sys.setprofile(note)
    try:
        for _ in range(steps):
            state, _ = step(state, batch)
    finally:
        sys.setprofile(None)
    return files


def _script(name: str) -> dict[str, Any]:
    return runpy.run_path(str(TOP / "docs" / name))


def test_a_step_enters_the_files_of_the_reading_order_alone() -> None:
    reading = _script("tree.py")["READING"]
    files = {name for names in reading.values() for name in names.split()}
    seen = set.union(*comm.spawn(entered, world_size=2))
    assert sorted(seen - files - {"functional_ds/base/package_index.py"}) == []  # it imports a name when that is first used
    others = {name for what, names in reading.items() if what == "three transforms" for name in names.split()}
    assert sorted(files - seen - others - BESIDE) == []


def test_a_first_step_enters_few_files() -> None:
    """On simulated ranks; files and lines of code, without blanks, comments and docstrings."""
    seen = set.union(*comm.simulate(entered, 1, world_size=2)) - {"functional_ds/base/package_index.py"}
    files, lines, _ = _script("tree.py")["size"](TOP / name for name in seen)
    assert files <= FILES
    assert lines <= LINES


def test_the_way_to_the_wire_is_drawn_as_a_step_takes_it() -> None:
    script = _script("path.py")
    page = (TOP / "docs/contributing.md").read_text(encoding="utf-8")
    assert f"<!-- path -->\n{script['drawn']()}<!-- /path -->" in page
    assert len(script["path"]()) <= ON_THE_WAY
