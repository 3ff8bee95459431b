"""Errors for blocks that cannot be compiled."""

import re
from typing import Any

_COLLECTIVE = re.compile(r'File "[^"]*[/\\\\]comm[/\\\\](?:api|exchange|p2p|megatron|uneven|objects)\.py", line \d+, in (\w+)')
_FORWARD = re.compile(r'File "[^"]*", line \d+, in forward')
_ADVICE = "Name what cannot be traced in eager='...', compile the modules inside of it that can be, by path, or leave it out"
_OF_COMPILER = ("torch._dynamo.", "torch._inductor.", "torch._functorch.")


class Refusal(RuntimeError):
    """A block that ``T.compiled`` cannot run.

    Args:
        path: the block's.
        module: the block, or what of it cannot be compiled.
        why: the reason, and what to do instead.
    """

    def __init__(self, path: str, module: Any, why: str) -> None:
        super().__init__(f"compiled: the block {path!r} ({type(module).__name__}) cannot be compiled: {why}")

    @staticmethod
    def of(path: str, module: Any, error: Exception) -> "Refusal | None":
        """The refusal for an error of the compiler; None for an error of the block itself."""
        if not type(error).__module__.startswith(_OF_COMPILER):
            return None
        words, called = str(error), _COLLECTIVE.search(str(error))
        if called is not None:
            return Refusal(
                path,
                module,
                f"it calls comm.{called[1]}, and a collective cannot be a part of compiled code: let the module that calls it, "
                "inside of the block, stay Python, eager='blocks.*.experts', or compile modules between collectives, by path",
            )
        code = words.rpartition("from user code:")[2].split("\n\n")[0].split("\n") if "from user code:" in words else []
        where = " ".join(line.strip() for line in code[-4:] if line.strip() and set(line.strip()) != {"^"})
        return Refusal(path, module, f"{_first(words)} {f'({where})' if where else ''} {_ADVICE}")


def backward_refusal(blocks: str, error: Exception) -> RuntimeError | None:
    """The refusal for an error of the compiler in a backward pass, which is compiled when it first runs; else None."""
    if isinstance(error, Refusal) or not type(error).__module__.startswith(_OF_COMPILER):
        return None
    places = [place for place in _FORWARD.findall(str(error)) if "torch" not in place]
    where = f" ({places[-1]})" if places else ""
    return RuntimeError(
        f"compiled: the backward pass of a block of {blocks!r} cannot be compiled: {_first(str(error))}{where} {_ADVICE}"
    )


def _first(words: str) -> str:
    return " ".join(words.split("\n\n", maxsplit=1)[0].split())
