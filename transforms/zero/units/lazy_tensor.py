"""The tensor subclass for leaves whose values are fetched at first use."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from weakref import getweakrefcount

import torch
from torch import Tensor, nn

from functional_ds.base.torch_private import disable_torch_function_subclass, held_elsewhere, make_wrapper_subclass
from functional_ds.sharding.layout import Layout

_PROPERTIES = (
    *("shape", "dtype", "device", "layout", "requires_grad", "ndim", "is_leaf", "is_cuda", "is_cpu", "is_meta", "is_sparse"),
    *("is_quantized", "is_nested", "is_mkldnn", "is_xpu", "is_mps", "itemsize", "nbytes", "grad", "grad_fn", "names"),
)
_GRAD: Any = Tensor.grad
# Functions whose results depend only on shape, dtype and device: they fetch nothing.
_METADATA: frozenset[Any] = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES if hasattr(Tensor, name)),
        *(_GRAD.__set__, _GRAD.__delete__),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.ndimension, Tensor.stride, Tensor.is_contiguous),
        *(Tensor.element_size, Tensor.get_device, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_signed),
        *(Tensor.__len__, Tensor.__hash__),
        *(torch.is_floating_point, torch.is_complex, torch.numel),
    ]
)


_DATA: Any = Tensor.data
_VERSION: Any = Tensor._version
_REFUSED = {
    _VERSION.__get__: "the loss reads _version of a parameter of shape {shape}, which does not change from step to step: what "
    "is kept until it does would never be renewed. Compute it in each step, or keep the step's number as a buffer",
    _DATA.__set__: "the loss set the data of a parameter of shape {shape}, which has no memory of its own under zero: compute "
    "what it needs from the parameter, or change params after the update, in a transform: fds.wrap(..., update=...)",
    Tensor.register_post_accumulate_grad_hook: "the loss registered a hook on a parameter of shape {shape} by "
    "register_post_accumulate_grad_hook, which would never run, because gradients are not accumulated in .grad; use "
    "register_hook",
}
_IN_PLACE = [
    getattr(Tensor, name)
    for name in dir(Tensor)
    if (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__"
]
_COPY: Any = Tensor.__deepcopy__
_PLAIN = frozenset([Tensor, int, float, bool, type(None)])  # of arguments in which there is no lazy tensor
_WATCHED = frozenset([_DATA.__get__, _COPY, *_REFUSED, *filter(callable, _IN_PLACE)])


class LazyTensor(torch.Tensor):
    """A leaf as the loss function sees it: it has shape, dtype and device; its values are fetched at first use.

    A torch function called with one is called with the fetched tensor instead. Modules need no hooks, so any code that computes
    with tensors works.
    """

    _fetch: Callable[[], Tensor]
    _frees: bool

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        requires_grad: bool,
        fetch: Callable[[], Tensor],
        frees: bool,
    ) -> "LazyTensor":
        self = make_wrapper_subclass(cls, shape, dtype=dtype, device=device, requires_grad=requires_grad)
        self._fetch, self._frees = fetch, frees
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyTensor({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METADATA:
            with disable_torch_function_subclass():
                return func(*args, **(kwargs or {}))
        if func in _WATCHED and isinstance(args[0], LazyTensor):
            return _watched(func, *args, **(kwargs or {}))
        values = [x._fetch() if type(x) is LazyTensor else x if type(x) in _PLAIN else fetched(x) for x in args]
        return func(*values, **{name: fetched(x) for name, x in kwargs.items()}) if kwargs else func(*values)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch.no_grad():  # below autograd, which has recorded the lazy tensor as the param
            return func(*(fetched(x) for x in args), **{name: fetched(x) for name, x in (kwargs or {}).items()})


def _watched(func: Any, leaf: LazyTensor, *others: Any, **named: Any) -> Any:
    """Runs an operation that may write into the leaf, which is fetched last, so that its version counter records the write."""
    if func in _REFUSED:
        raise RuntimeError(_REFUSED[func].format(shape=list(leaf.shape)))
    if func == _COPY:  # of a leaf, as a parameter is one
        (memo,) = others
        if id(leaf) not in memo:
            memo[id(leaf)] = nn.Parameter(leaf._fetch().detach().clone(), leaf.requires_grad)
        return memo[id(leaf)]
    if leaf._frees and func == _DATA.__get__:
        return leaf._fetch().detach()
    rest = [fetched(x) for x in others], {name: fetched(x) for name, x in named.items()}
    return func(leaf._fetch(), *rest[0], **rest[1])


def fetched(value: Any) -> Any:
    """The value with each lazy tensor in it replaced by the tensor that it fetches."""
    if isinstance(value, LazyTensor):
        return value._fetch()
    if isinstance(value, (list, tuple)) and any(isinstance(v, (LazyTensor, list, tuple, dict)) for v in value):
        values = [fetched(v) for v in value]
        return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)
    if isinstance(value, dict):
        return {k: fetched(v) for k, v in value.items()}
    return value


class LazyValues:
    """Where lazy tensors find their values.

    Attributes:
        whole: the leaves of each unit that the view has gathered, by number.
        enter: gathers a unit; returns its leaves.
        bypassed: whether a leaf was used where autograd does not record.
    """

    def point(self, whole: Mapping[int, dict[int, Tensor]], enter: Callable[[int], dict[int, Tensor]]) -> None:
        """Points the tensors at what a view gathers."""
        self.whole, self.enter, self.bypassed = whole, enter, False

    def leaf(self, unit: int, leaf: int) -> Tensor:
        """A leaf's value."""
        if not torch.is_grad_enabled():  # as in the forward of a custom autograd.Function
            self.bypassed = True
        return (self.whole.get(unit) or self.enter(unit))[leaf]


class LazyLeaves:
    """The lazy tensors of a view. Once it is closed, the next view of the state has them: making them takes long.

    Nothing refers back to them, so that they end with the last reference, and with them what weak tables hold.

    Attributes:
        tensors: by the number of the leaf.
        paths: of the leaves, by the tensors' ids; those fetched together are adjacent.
        values: where they find their values.
    """

    def __init__(self, layout: Layout, device: torch.device, trains: bool, frees: bool) -> None:
        self._arguments, self.values, made = (layout, device, trains, frees), LazyValues(), dict[int, LazyTensor]()
        for segment in layout.segments:
            for slot in segment.slots:
                fetch, grad = partial(self.values.leaf, segment.unit, slot.leaf), trains and segment.trainable
                made[slot.leaf] = LazyTensor(slot.shape, segment.dtype, device, grad, fetch, frees)
        self.tensors = [made[leaf] for leaf in range(len(made))]
        self.paths = {id(tensor): layout.paths[leaf] for leaf, tensor in made.items()}  # segments are in order of units
        self.values.point({}, closed)

    @property
    def marked(self) -> bool:
        """Whether one has attributes that a loss has set, or weak references: these are of one pass."""
        unset = {*map(len, map(vars, self.tensors))} <= {len(LazyTensor.__annotations__)}
        return not unset or any(map(getweakrefcount, self.tensors))

    def fit(self, *arguments: Any) -> bool:
        """Whether a view of these arguments can have them, which nothing else refers to."""
        return self._arguments == arguments and not self.marked and not any(held_elsewhere(self.tensors))

    def __reduce__(self) -> Any:  # a copy of a state makes its own
        return type(None), ()


def closed(unit: int) -> dict[int, Tensor]:
    """What a view that is closed gathers.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError("the loss uses a parameter of an earlier pass, whose values are gone: use the params that it is given")
