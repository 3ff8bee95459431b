"""``deepspeed.ops.op_builder``: what scripts ask it, whether a kernel can be used. Nothing is compiled here."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from functional_ds.deepspeed.config.explain import UsageError

__all__ = ["COMPATIBLE", "OpBuilder"]

# By a builder's name, DeepSpeed's name of its kernel.
_OPTIMIZERS: Mapping[str, str] = MappingProxyType(
    {
        "CPUAdagradBuilder": "cpu_adagrad",
        "CPUAdamBuilder": "cpu_adam",
        "CPULionBuilder": "cpu_lion",
        "FusedAdamBuilder": "fused_adam",
        "FusedLambBuilder": "fused_lamb",
        "FusedLionBuilder": "fused_lion",
    }
)
_OTHERS: Mapping[str, str] = MappingProxyType(
    {
        "AsyncIOBuilder": "async_io",
        "EvoformerAttnBuilder": "evoformer_attn",
        "FPQuantizerBuilder": "fp_quantizer",
        "GDSBuilder": "gds",
        "InferenceBuilder": "transformer_inference",
        "QuantizerBuilder": "quantizer",
        "RandomLTDBuilder": "random_ltd",
        "SpatialInferenceBuilder": "spatial_inference",
        "StochasticTransformerBuilder": "stochastic_transformer",
        "TransformerBuilder": "transformer",
        "UtilsBuilder": "utils",
    }
)
COMPATIBLE: Mapping[str, bool] = MappingProxyType(
    {**dict.fromkeys(_OPTIMIZERS.values(), True), **dict.fromkeys(_OTHERS.values(), False)}
)
"""By DeepSpeed's name of a kernel, whether what it is for is here: its training optimizers are."""


class OpBuilder:
    """Says whether a kernel can be used.

    Attributes:
        NAME: DeepSpeed's.
    """

    NAME = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether what it is for is here."""
        del verbose
        return COMPATIBLE.get(self.NAME, False)

    def load(self, verbose: bool = True) -> Any:
        """Refused.

        Raises:
            UsageError: always.
        """
        del verbose
        raise UsageError(
            f"{type(self).__name__}().load(): nothing is compiled here; DeepSpeed's optimizers are in deepspeed.ops"
        )


def __getattr__(name: str) -> type[OpBuilder]:
    """A builder by its name."""
    kernel = _OPTIMIZERS.get(name) or _OTHERS.get(name)
    if kernel is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return type(name, (OpBuilder,), {"NAME": kernel})
