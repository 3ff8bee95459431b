"""The command-line arguments that DeepSpeed's scripts have."""

import argparse


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds ``--deepspeed``, ``--deepspeed_config``, and their old names with ``deepscale``; returns the parser.

    >>> parser = add_config_arguments(argparse.ArgumentParser())
    >>> parser.parse_args(["--deepspeed", "--deepspeed_config", "ds.json"]).deepspeed_config
    'ds.json'
    """
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", action="store_true", help="for the script's own use")
    group.add_argument("--deepspeed_config", type=str, help="the config, a JSON file")
    group.add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", type=str, help=argparse.SUPPRESS)
    return parser
