"""Prints the way of a ZeRO-3 step from ``step(state, batch)`` to the wire, as a run takes it; ``--write`` renews its page.

Files are in the order in which the run enters them, each once, with the functions that wait for one another when the first unit
of params is gathered.
"""

import re
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
WIRE = "SimulatedWorld.start"  # between processes it is ``ProcessWorld.start``, of comm/worlds/process.py


def _loss(params: Any, x: Tensor) -> Tensor:
    return (torch.tanh(x @ params["blocks"][0]["w"]) @ params["blocks"][1]["w"]).square().mean()


def _waiting() -> list[tuple[str, str]]:
    """(File, function) of the calls on this rank's stack, when the second step's first gather reaches the wire."""
    found: list[tuple[str, str]] = []

    def note(frame: FrameType | None, event: str, _: Any) -> None:
        if event != "call" or found or frame is None or frame.f_code.co_qualname != WIRE:
            return
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(TOP) and path.relative_to(TOP).parts[0] in FOLDERS:
                found.insert(0, (path.relative_to(TOP).as_posix(), frame.f_code.co_qualname))
            frame = frame.f_back

    step = T.zero(3)(fds.train_step(_loss, fds.adamw(1e-3)))
    state, batch = step.init({"blocks": [{"w": torch.ones(8, 8)} for _ in range(2)]}), torch.ones(2, 8)
    state, _ = step(state, batch)
    sys.setprofile(note)
    try:
        step(state, batch)
    finally:
        sys.setprofile(None)
    return found[next(i for i, (_, function) in enumerate(found) if function == "Step.__call__") :]


def path() -> dict[str, list[str]]:
    """The functions by file, in the order of the calls."""
    functions: dict[str, list[str]] = {}
    for file, function in comm.simulate(_waiting, world_size=2)[0]:
        name = re.sub(r"\.<locals>\.<\w+>", "", function).replace(".<locals>", "")
        names = functions.setdefault(file, [])
        if name not in names:
            names.append(name)
    return functions


def drawn() -> str:
    """The way as a text."""
    parts = ["\n".join([file, *(f"    {name}" for name in names), ""]) for file, names in path().items()]
    return "```text\nstep(state, batch)\n  |\n" + "  |\n".join(parts) + "  |\nthe wire\n```\n"


def main() -> None:
    """Prints it, or renews it in contributing.md."""
    page = TOP / "docs/contributing.md"
    if sys.argv[1:] == ["--write"]:
        text = page.read_text(encoding="utf-8")
        block = f"<!-- path -->\n{drawn()}<!-- /path -->"
        page.write_text(re.sub("<!-- path -->\n.*?<!-- /path -->", lambda _: block, text, flags=re.DOTALL), encoding="utf-8")
    else:
        print(drawn(), end="")


if __name__ == "__main__":
    main()
