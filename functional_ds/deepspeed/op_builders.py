"""``deepspeed.ops.op_builder``: whether a kernel can be used, for scripts that ask. Nothing is compiled here."""

from types import MappingProxyType
from typing import Any

from .api_names import BUILDERS
from .config.explain import UsageError

__all__ = ["COMPATIBLE", "OpBuilder"]

COMPATIBLE = MappingProxyType(
    {kernel: group == "here" for group in ("here", "elsewhere") for kernel in BUILDERS[group].values()}
)
"""By DeepSpeed's name of a kernel, whether what it is for is here: its training optimizers are."""


class OpBuilder:
    """Reports whether a kernel can be used.

    Attributes:
        NAME: DeepSpeed's.
    """

    NAME = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether its functionality is available here."""
        del verbose
        return COMPATIBLE.get(self.NAME, False)

    def load(self, verbose: bool = True) -> Any:
        """Raises an error.

        Raises:
            UsageError: always.
        """
        del verbose
        raise UsageError(
            f"{type(self).__name__}().load(): nothing is compiled here; DeepSpeed's optimizers are in deepspeed.ops"
        )


def __getattr__(name: str) -> type[OpBuilder]:
    """A builder by its name."""
    kernel = next((kernels[name] for kernels in BUILDERS.values() if name in kernels), None)
    if kernel is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return type(name, (OpBuilder,), {"NAME": kernel})
