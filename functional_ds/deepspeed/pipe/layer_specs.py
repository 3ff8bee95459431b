"""Layers that are built later: a class and its arguments."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

__all__ = ["LayerSpec", "TiedLayerSpec"]


class LayerSpec:
    """A layer of a ``PipelineModule``: a module class and its arguments.

    >>> LayerSpec(nn.Linear, 2, 3, bias=False).build()
    Linear(in_features=2, out_features=3, bias=False)
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not issubclass(typename, nn.Module):
            raise TypeError(f"{type(self).__name__}({typename!r}, ...): a class of torch.nn.Module is needed")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        """The layer."""
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        given = [*map(repr, self.module_args), *(f"{name}={value!r}" for name, value in self.module_kwargs.items())]
        return f"{self.typename.__name__}({', '.join(given)})"


class TiedLayerSpec(LayerSpec):
    """A layer that occurs several times under one key, such as an embedding that is also the head.

    Attributes:
        key: layers with one key are one module; the first one builds it.
        forward_fn: ``forward_fn(module, x)`` instead of ``module(x)``.
        tied_weight_attr: has no effect: all of the module's params are shared.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = "weight",
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)
