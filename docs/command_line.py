"""Runs the commands of command-line.md and fitting.md and prints the pages with their outputs; ``--write`` writes them.
Names of pictures draw these alone: ``docs/command_line.py report``.

A block of the language ``console`` has lines ``$ functional-ds ...``; what follows each is its output.
"""

import contextlib
import io
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

import functional_ds as fds
from functional_ds.cli.entry import main as program

PAGES = [Path(__file__).with_name(name) for name in ("command-line.md", "fitting.md")]
FIGURES = Path(__file__).with_name("figures")
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FONTS = re.compile(r"@font-face \{.*?\}", re.DOTALL)
PICTURES = {
    "report": "report",
    "plan": "plan train.py:model --mesh dp=8 --micro-batch 64 --zero 1,3 --limit 40MB --machine h100",
    "tune": "tune train.py:model --rows 64 --zero 0,2 --micro-batch 16,64 --best 3 --steps 2 --save-machine here.json",
    "inspect": "inspect run --verify",
    "convert": "convert run params.safetensors",
    "draw": "draw schedule zb_h1 --ranks 4 --microbatches 8",
    "hosts": "hosts hostfile --exclude worker-1:0 -- train.py --epochs 3",
    "train": "train job.toml",
}
WIDTHS = {"plan": 150, "hosts": 144}  # columns; others have 118


@contextlib.contextmanager
def files_of_the_page(page: str) -> Iterator[None]:
    """Within the block the current folder has the files that the page's commands name."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            Path("train.py").write_text(page.partition("```python\n")[2].partition("```")[0])
            Path("models.py").write_text(page.split("```python\n")[2].partition("```")[0])
            Path("job.toml").write_text(page.partition("```toml\n")[2].partition("```")[0])
            Path("hostfile").write_text(page.partition("```text\n")[2].partition("```")[0])
            Path("typo.json").write_text(json.dumps({"train_batch_size": 64, "zero_optimisation": {"stage": 2}}))
            torch.manual_seed(0)
            params = {"embed": torch.randn(64, 8), "head": torch.randn(8, 64)}
            step = fds.transforms.mixed_precision("bf16")(fds.train_step(_loss, fds.adamw(1e-2)))
            state, _ = step(step.init(params), torch.ones(2, 64))
            fds.save(state, "run", tag="1", extra={"rows": 2})
            yield
        finally:
            os.chdir(before)


def _loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return (x @ params["embed"] @ params["head"]).square().mean()


def output(line: str) -> str:
    """What a command prints, on both streams."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        program(shlex.split(line)[1:])
    return "\n".join(text.rstrip() for text in printed.getvalue().splitlines())


def written(page: str, *, files: str) -> str:
    """The page with all outputs renewed; the commands' files are on the page ``files``."""

    def renewed(block: re.Match[str]) -> str:
        lines = [line[2:] for line in block[1].splitlines() if line.startswith("$ ")]
        return "```console\n" + "".join(f"$ {line}\n{output(line)}\n" for line in lines) + "```"

    with files_of_the_page(files):
        return BLOCK.sub(renewed, page)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def draw(page: str, names: Iterable[str] = PICTURES) -> None:
    """The pictures: what rich shows on a terminal."""
    from rich.console import Console
    from rich.text import Text

    with files_of_the_page(page):
        for name in names:
            line = PICTURES[name]
            shown, width = _Terminal(), WIDTHS.get(name, 118)
            os.environ.update(FORCE_COLOR="1", COLUMNS=str(width), TERM="xterm-256color")
            with contextlib.redirect_stdout(shown):
                program(shlex.split(line))
            console = Console(record=True, width=width, file=io.StringIO())
            console.print(Text.from_ansi(shown.getvalue()))
            picture = console.export_svg(title=f"functional-ds {line}", unique_id=f"cli-{name}")
            (FIGURES / f"cli-{name}.svg").write_text(FONTS.sub("", picture))  # a page loads nothing from elsewhere


def main() -> None:
    """Prints the pages, or writes them, or draws pictures."""
    pages = [page.read_text(encoding="utf-8") for page in PAGES]
    if sys.argv[1:] and sys.argv[1:] != ["--write"]:
        return draw(pages[0], sys.argv[1:])
    for path, page in zip(PAGES, pages, strict=True):
        found = written(page, files=pages[0])
        if sys.argv[1:] == ["--write"]:
            path.write_text(found, encoding="utf-8")
        else:
            print(found, end="")
    return draw(pages[0]) if sys.argv[1:] else None


if __name__ == "__main__":
    main()
