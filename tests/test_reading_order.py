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
BESIDE = {"functional_ds/step/compose.py", "comm/simulation/simulator.py"}  # read, and entered before a step or in simulations


def loss(params: Any, x: Tensor) -> Tensor:
    for block in params["blocks"]:
        x = (x @ block["w"]).tanh()
    return (x @ params["head"]).square().mean()


def entered() -> set[str]:
    """The files of the library that two steps of ZeRO-3 enter on this rank."""
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
        for _ in range(2):
            state, _ = step(state, batch)
    finally:
        sys.setprofile(None)
    return files


def _reading() -> dict[str, str]:
    return runpy.run_path(str(TOP / "docs/tree.py"))["READING"]  # type: ignore[no-any-return]


def test_a_step_enters_the_files_of_the_reading_order_alone() -> None:
    reading = _reading()
    files = {name for names in reading.values() for name in names.split()}
    seen = set.union(*comm.spawn(entered, world_size=2))
    assert sorted(seen - files - {"functional_ds/base/package_index.py"}) == []  # it imports a name when that is first used
    others = {name for what, names in reading.items() if what == "three transforms" for name in names.split()}
    assert sorted(files - seen - others - BESIDE) == []
