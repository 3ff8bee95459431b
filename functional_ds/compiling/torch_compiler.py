"""Everything private of torch's compiler that this library uses, in one place. Tried with torch 2.13.0.

Importing the compiler takes a second, so each function does it when it is called. torch may change any of it in any release,
so these are tested with the entries of ``base.torch_private``.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import CodeType
from typing import Any

import torch

__all__ = ["compiler_backend", "keep_saved_tensors", "recompile_reasons", "refuse_graph_breaks"]


def compiler_backend(
    name: str, *, mode: str | None, options: dict[str, Any] | None, dynamic: bool | None
) -> Callable[..., Any]:
    """torch.compile's back end of this name, as a function of a graph and its inputs: so graphs can be counted."""
    if name == "inductor":
        return torch._TorchCompileInductorWrapper(mode, options, dynamic)
    from torch._dynamo import lookup_backend

    return partial(lookup_backend(name), **({"options": options} if options else {}))


def recompile_reasons(code: CodeType) -> list[str]:
    """Why torch.compile compiled a function anew: the guards that failed, in order. It has no public record of them."""
    from torch._dynamo.utils import guard_failures

    return list(guard_failures[code])


def refuse_graph_breaks(refuse: bool) -> AbstractContextManager[Any]:
    """Whether torch.compile raises within the block where it cannot go on with a graph. ``fullgraph`` has no exceptions."""
    from torch._dynamo import error_on_graph_break

    return error_on_graph_break(refuse)


def keep_saved_tensors() -> AbstractContextManager[Any]:
    """What is compiled within the block does not write into what it has saved, so a graph can be gone through once more.

    Without it, backward passes in two parts (zero-bubble schedules) and ``retain_graph=True`` would be refused by torch.
    """
    from torch._functorch import config

    return config.patch(donated_buffer=False)  # type: ignore[no-any-return]
