"""What stands in place of an attribute whose value is another call's, or would not follow training."""

from typing import Any

from functional_ds.base import tree

__all__ = ["Stale"]


class Stale:
    """Stands in a copy for an attribute that would not follow training, and says so when it is used.

    Modules that assign the attribute in each forward pass (``torch.nn.utils.weight_norm``, ``spectral_norm``, ``prune``) never
    use it.
    """

    def __init__(self, message: str) -> None:
        self._message = message

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(self._message)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse()

    def __deepcopy__(self, memo: Any) -> "Stale":
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuses to be computed with."""
        given = tree.leaves((args, kwargs))
        return next(each for each in given if isinstance(each, Stale))._refuse()

    __getitem__ = __setitem__ = __len__ = __iter__ = __bool__ = __float__ = __int__ = __neg__ = __add__ = __radd__ = _refuse
    __call__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __pow__ = _refuse
