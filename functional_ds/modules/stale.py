"""What stands in place of an attribute whose value is another call's, or would not follow training."""

import copy
from collections.abc import Callable
from typing import Any

import attrs
from torch import nn

from functional_ds.base import tree

__all__ = ["HiddenAttributes", "Stale"]


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


@attrs.define(eq=False)
class HiddenAttributes:
    """The attributes of ``Apply.module`` that calls set to what has a graph: reading them there says that they did not change.

    Attributes:
        module: ``Apply.module``.
        overlook: lets the attribute at a place, as it is then, be no change of the user's.
    """

    module: nn.Module
    overlook: Callable[[tuple[str, str]], None]
    _own: dict[int, tuple[Stale, Any]] = attrs.field(factory=dict)
    _names: set[str] = attrs.field(factory=set)

    def hide(self, names: list[str]) -> None:
        """Puts something that says so in their places."""
        for name in [name for name in names if name not in self._names]:
            self._names.add(name)
            path, _, key = name.rpartition(".")
            owner = self.module.get_submodule(path)
            if key in vars(owner) and not isinstance(vars(owner)[key], Stale):
                stale = Stale(
                    f"the attribute {name!r} of apply.module is not what a call has set: a call changes a copy of the module; "
                    "let forward return the value, (output, aux), and add it in the loss"
                )
                self._own[id(stale)] = stale, vars(owner)[key]
                owner.__dict__[key] = stale
                self.overlook((path, key))

    def undo(self, memo: dict[int, Any]) -> None:
        """Lets a deep copy of the module have the attributes that it was built with."""
        memo.update((place, copy.deepcopy(own, memo)) for place, (_, own) in self._own.items())
