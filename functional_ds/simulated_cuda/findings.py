"""What the simulated device detects, with lines of code."""

import os
import sys
from pathlib import Path
from types import FrameType
from typing import Literal

import attrs
import torch

from functional_ds.base import torch_private

Kind = Literal["race", "early free", "host sync"]
_SKIPPED = (str(Path(torch.__file__).parent) + os.sep, str(Path(__file__).parent) + os.sep, torch_private.__file__, "<")
_STANDARD = (str(Path(os.__file__).parent / "contextlib.py"), str(Path(os.__file__).parent / "unittest") + os.sep)


@attrs.frozen
class Site:
    """A line of code, and the nearest calling line in another file."""

    file: str
    line: int
    caller: "Site | None" = None

    def __str__(self) -> str:
        path = os.path.relpath(self.file) if self.file.startswith(str(Path.cwd()) + os.sep) else self.file
        return f"{path}:{self.line}" + (f" (called from {self.caller})" if self.caller else "")


@attrs.frozen
class Finding:
    """A fault, or a wait of the host that the program did not request.

    Attributes:
        kind: "race", "early free" or "host sync".
        text: what is wrong and what to do instead.
        first: the earlier access; None if the memory had none.
        second: the later access, the line that frees the memory, or the line that waits.
    """

    kind: Kind
    text: str
    first: Site | None
    second: Site

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}\n    at    {self.second}" + (f"\n    after {self.first}" if self.first else "")


def is_programs(frame: FrameType) -> bool:
    """Whether a frame is neither torch's, nor the simulation's, nor that of a mode that passes operators on."""
    code = frame.f_code
    return not code.co_filename.startswith(_SKIPPED) and code.co_name not in ("__torch_dispatch__", "__torch_function__")


def here() -> Site:
    """The innermost line outside of torch and of the simulation, and the nearest calling line in another file."""
    frame: FrameType | None = sys._getframe(1)
    lines: list[tuple[str, int]] = []
    while frame is not None and len(lines) < 2:
        file = frame.f_code.co_filename
        if is_programs(frame) and not file.startswith(_STANDARD) and (not lines or lines[0][0] != file):
            lines.append((file, frame.f_lineno))
        frame = frame.f_back
    sites = [Site(file, line) for file, line in lines] or [Site("unknown", 0)]
    return attrs.evolve(sites[0], caller=sites[1]) if len(sites) > 1 else sites[0]


@attrs.define(eq=False)
class Findings:
    """What a device has detected so far.

    Attributes:
        findings: races, early frees, and waits of the host that the program did not request; each once.
        waits: requested waits: ``synchronize`` of streams, of events, and of the device, with their lines.
    """

    findings: list[Finding] = attrs.field(factory=list)
    waits: list[tuple[str, Site]] = attrs.field(factory=list)

    @property
    def races(self) -> list[Finding]:
        """Accesses that are not ordered after the last conflicting one."""
        return self._of("race")

    @property
    def early_frees(self) -> list[Finding]:
        """Memory that was freed while work on another stream might still use it."""
        return self._of("early free")

    @property
    def host_syncs(self) -> list[Finding]:
        """Lines at which the host waits for the device without ``synchronize``."""
        return self._of("host sync")

    def clear(self) -> None:
        """Clears the findings so far, for example after a first step."""
        self.findings.clear()
        self.waits.clear()

    def check(self, *, host_syncs: bool = False) -> None:
        """Raises AssertionError with all races and early frees, and with ``host_syncs`` also those."""
        errors = [finding for finding in self.findings if host_syncs or finding.kind != "host sync"]
        if errors:
            raise AssertionError(f"{len(errors)} findings on the simulated device\n" + "\n".join(map(str, errors)))

    def _of(self, kind: Kind) -> list[Finding]:
        return [finding for finding in self.findings if finding.kind == kind]

    def report(self, kind: Kind, text: str, first: Site | None, second: Site | None = None) -> None:
        """Adds a finding, once."""
        finding = Finding(kind, text, first, second or here())
        if finding not in self.findings:
            self.findings.append(finding)
