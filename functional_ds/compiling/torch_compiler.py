"""All private APIs of torch's compiler that this library uses. Tested with torch 2.13.0.

Importing the compiler takes a second, so each function imports it when called. torch may change any of these in any release, so
they are tested together with ``base.torch_private``.
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
    """torch.compile's backend of this name, as a function of a graph and its inputs, so that graphs can be counted."""
    if name == "inductor":
        return torch._TorchCompileInductorWrapper(mode, options, dynamic)
    from torch._dynamo import lookup_backend

    return partial(lookup_backend(name), **({"options": options} if options else {}))


def recompile_reasons(code: CodeType) -> list[str]:
    """Why torch.compile recompiled a function: the guards that failed, in order. torch has no public record of them."""
    from torch._dynamo.utils import guard_failures

    return list(guard_failures[code])


def refuse_graph_breaks(refuse: bool) -> AbstractContextManager[Any]:
    """A context in which torch.compile raises an error on graph breaks. ``fullgraph`` allows no exceptions."""
    from torch._dynamo import error_on_graph_break

    return error_on_graph_break(refuse)


def keep_saved_tensors() -> AbstractContextManager[Any]:
    """A context in which compiled code does not overwrite its saved tensors, so that a graph can be used again.

    Without it, torch raises an error for backward passes in two parts (zero-bubble schedules) and ``retain_graph=True``.
    """
    from torch._functorch import config

    return config.patch(donated_buffer=False)  # type: ignore[no-any-return]
