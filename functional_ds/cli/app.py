"""The commands, by name. Each is in a separate file, and does not import folders of the library that it does not need."""

import sys
from collections.abc import Sequence
from typing import Any

import typer

from functional_ds.base.package_index import optional

from .hosts_command import hosts
from .report_command import report
from .train_command import train
from .words.errors_in_one_line import CommandError

_HELP = "Reports, plans, tuning, checkpoints, drawings, hosts and jobs of functional_ds."


_COMMANDS: dict[str, Any] = {"report": report}

with optional("functional_ds.deepspeed", "functional_ds.memory", "functional_ds.profiling"):
    from .plan_command import plan
    from .tune_command import tune

    _COMMANDS |= {"plan": plan, "tune": tune}
with optional("functional_ds.checkpointing", "functional_ds.interchange"):
    from .checkpoint_commands import convert, inspect

    _COMMANDS |= {"inspect": inspect, "convert": convert}
with optional("functional_ds.deepspeed", "functional_ds.memory", "functional_ds.pipelining", "functional_ds.profiling"):
    from .draw_command import draw

    _COMMANDS |= {"draw": draw}
_COMMANDS |= {"hosts": hosts, "train": train}


def application() -> Any:
    """Typer's application."""
    made = typer.Typer(
        help=_HELP,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich" if sys.stdout.isatty() else None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )
    for name, function in _COMMANDS.items():
        made.command(name)(function)
    return made


def run(argv: Sequence[str]) -> int:
    """Runs the command that these words name; its exit code.

    Raises:
        CommandError: words that the command does not take.
    """
    command = typer.main.get_command(application())
    try:
        code = command.main(args=list(argv), prog_name="functional-ds", standalone_mode=False)
    except Exception as error:
        message = getattr(error, "format_message", None)  # a usage error, of click or of typer's own copy of it
        if message is None:
            raise
        words = message()
        if not words:  # no arguments: the help was printed
            return 2
        raise CommandError(words) from None
    return code if isinstance(code, int) else 0
