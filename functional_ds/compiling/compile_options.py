"""The arguments of torch.compile, checked."""

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from functional_ds.sharding.path_patterns import nearest

from .torch_compiler import compiler_backend


@attrs.frozen
class CompileOptions:
    """The arguments of torch.compile.

    Attributes:
        backend: a name that ``torch.compiler.list_backends`` knows, or a function of a graph and its inputs.
        mode: of inductor.
        options: of the back end.
        dynamic: whether sizes are symbols; None lets the second size of a dim make it one.
        recompile_limit: how often a class of blocks may be compiled.
    """

    backend: str | Callable[..., Any]
    mode: str | None
    options: tuple[tuple[str, Any], ...]
    dynamic: bool | None
    recompile_limit: int

    @staticmethod
    def checked(
        backend: Any, mode: str | None, options: Mapping[str, Any] | None, dynamic: bool | None, recompile_limit: int
    ) -> "CompileOptions":
        """The options, if torch has such a backend and the backend such a mode.

        Raises:
            ValueError: there is no such backend or mode.
            TypeError: a value of another type.
        """
        if isinstance(backend, str):
            known = torch.compiler.list_backends(exclude_tags=())
            if backend not in known:
                raise ValueError(
                    f"compiled: there is no back end {backend!r} here; {nearest(backend, known)}, of {', '.join(known)}"
                )
        elif not callable(backend):
            raise TypeError(f"compiled: backend={backend!r} is neither a name nor a function of a graph and its inputs")
        if mode is not None and backend != "inductor":
            raise ValueError(f"compiled: mode={mode!r} is inductor's, and backend={backend!r} has no modes")
        if mode is not None and options:
            raise ValueError(f"compiled: mode={mode!r} is a set of options; give the mode or options={dict(options)!r}")
        if type(recompile_limit) is not int or recompile_limit < 1:
            raise ValueError(f"compiled: recompile_limit={recompile_limit!r} is not a number of compilations, 1 or more")
        parsed = CompileOptions(backend, mode, tuple(sorted((options or {}).items())), dynamic, recompile_limit)
        if mode is not None or options:
            try:
                parsed.made()
            except RuntimeError as error:  # which lists all options, hundreds of them
                raise ValueError(f"compiled: {str(error)[:300]}") from error
        return parsed

    def made(self) -> Any:
        """The back end."""
        if not isinstance(self.backend, str):
            return self.backend
        return compiler_backend(self.backend, mode=self.mode, options=dict(self.options) or None, dynamic=self.dynamic)

    @property
    def fixes_addresses(self) -> bool:
        """Whether the code replays CUDA graphs, which read memory where it was when they were recorded."""
        return self.mode in ("reduce-overhead", "max-autotune") or bool(dict(self.options).get("triton.cudagraphs"))
