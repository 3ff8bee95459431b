"""Data parallelism for optimizers that reduce gradients themselves."""

from typing import Any

from functional_ds import comm
from functional_ds.optim.param_groups import GroupStates
from functional_ds.step.compose import wrap
from functional_ds.step.state.state import State
from functional_ds.step.step import Step, Transform

from .replicas import Replicas


def local_gradients(group: comm.Group | None = None) -> Transform:
    """Data parallelism that leaves gradients unreduced, for optimizers that reduce them themselves.

    For ``fds.one_bit_adam`` and ``fds.zero_one_adam``, which get the group from ``LeafMap.reduce_group``. Weights, metrics and
    the overflow check are still summed over the ranks. ``init`` uses rank 0's params. No rank has the summed gradient, so
    ``clip`` raises an error.

    Raises:
        ValueError: the optimizer does not reduce gradients; the ranks' params differ in structure; a transform asks for a norm;
            another transform reduces gradients, such as ``zero``.
        TypeError: ``group`` is not a ``comm.Group``.

    >>> import functional_ds as fds
    >>> str(local_gradients()(fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.one_bit_adam(0.5, warmup=10))))[
    ...     -25:
    ... ]
    '-> local_gradients(world)'
    """
    replicas = Replicas(group, summed_in="update")
    name = f"local_gradients({replicas})"

    def init(inner: Any, step: Step, params: Any) -> State:
        state: State = inner(step, replicas.same(params))
        if not _sums(state.optimizer):
            raise ValueError(
                f"{name}: the optimizer does not sum gradients over ranks, so params would drift apart ({step}); use "
                "fds.one_bit_adam or fds.zero_one_adam, or T.zero(0) instead of this transform"
            )
        if step.leaf_map(state).reduce_group != replicas.ranks():
            raise ValueError(f"{name}: another transform of this step sums gradients, too ({step}); use either")
        return state

    return wrap(name, check=lambda step: replicas.alone(step, name), axes=[replicas], init=init)


def _sums(state: Any) -> bool:
    """Whether the optimizer of this state, or each of several, reduces gradients."""
    return all(map(_sums, state.states)) if isinstance(state, GroupStates) else bool(getattr(state, "reduces", False))
