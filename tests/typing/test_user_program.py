"""What a type checker tells a user of the installed library: results have types, and mistakes are found."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy", reason="the extra lint")

HERE = Path(__file__).parent
TOP = HERE.parents[1]


@pytest.mark.timeout(600)  # mypy reads torch's sources once; afterwards it takes seconds
def test_mistakes_are_reported_and_nothing_else() -> None:
    """Exactly the marked lines, each with its code, in a copy of the library as the wheel installs it."""
    program = HERE / "user_program.py"
    lines = program.read_text().splitlines()
    expected = {(n, line.rpartition("# error: ")[2]) for n, line in enumerate(lines, 1) if "# error: " in line}
    run = subprocess.run(
        [str(TOP / ".ci" / "typecheck.sh"), sys.executable, str(program)], capture_output=True, text=True, check=False
    )
    assert not run.stderr, run.stderr
    errors = re.findall(r"^([^:\n]+):(\d+): error: .*\[([\w-]+)\]$", run.stdout, re.MULTILINE)
    assert {(int(n), code) for file, n, code in errors if file == program.name} == expected, run.stdout
    assert all(file == program.name for file, _, _ in errors), run.stdout
