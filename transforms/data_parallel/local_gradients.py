"""Data parallelism whose gradients stay where they are, for optimizers that sum them."""

from typing import Any

from functional_ds import comm
from functional_ds.optim.param_groups import GroupStates
from functional_ds.step.compose import wrap
from functional_ds.step.state.state import State
from functional_ds.step.step import Step, Transform

from .replicas import Replicas

__all__ = ["local_gradients"]


def local_gradients(group: comm.Group | None = None) -> Transform:
    """Each rank of ``group`` has its own batch and keeps its own gradients; the optimizer sums them, in its own way.

    For ``fds.one_bit_adam`` and ``fds.zero_one_adam``, which learn from ``LeafMap.reduce_group`` over which ranks. Rank 0's
    params count at ``init``. Weights, metrics and the check for overflow are summed over the ranks as ever. There is no
    whole gradient to take a norm of, so ``clip`` raises an error.

    Raises:
        ValueError: the optimizer does not sum gradients; the ranks' params differ in structure; a norm is asked for; another
            transform reduces gradients, such as ``zero``.
        TypeError: ``group`` is no group.

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

    return wrap(
        name,
        check=lambda step: replicas.alone(step, name),
        axes=[replicas],
        init=init,
    )


def _sums(state: Any) -> bool:
    """Whether this state's optimizer sums gradients; of several, each of other leaves, whether all do."""
    return all(map(_sums, state.states)) if isinstance(state, GroupStates) else bool(getattr(state, "reduces", False))
