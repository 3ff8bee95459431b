"""Data parallelism whose gradients travel through a biased codec, with error feedback."""

from typing import Any

import torch

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.marks import trainable
from functional_ds.base.weighted import Weighted
from functional_ds.optim.kernels import reals
from functional_ds.step.state import State
from functional_ds.step.step import Step, Transform, wrap
from functional_ds.step.traits import Trait

from .data_parallel import Replicas

__all__ = ["feedback"]


def feedback(codec: comm.Codec, group: comm.Group | None = None) -> Transform:
    """Each rank of ``group`` has its own batch; gradients are summed through ``codec``, and what it leaves out is sent later.

    With C for the codec, gᵢ for a rank's gradient of the mean loss and e for what the slot ``feedback`` of the state keeps:

    ```
    p = gᵢ + e;  e ← p - C(p)           on the way out, on every rank
    q = Σ C(p) / n + e';  e' ← q - C(q)   on the way back, on the rank that sums a piece
    ```

    Law 38: ``Σₜ C(qₜ) = Σₜ gₜ - (e + e' at the end)``: nothing is lost, it comes later. So 1-bit and top-k gradients, which
    are biased, converge (Seide et al. 2014; Stich and Karimireddy 2019; both ways, Tang et al. 2019). Means are what is
    fed back, so a loss scale may change. A step whose gradients are not finite on any rank leaves what is owed as it was.

    It wraps ``reduce``: transforms that wrap ``update``, ``clip`` for one, get the sum, the same bits on all ranks. Rank 0's
    params count at ``init``.

    Cost: in bytes of the codec's payload, each rank sends (n - 1) / n of each leaf and (n - 1) times its piece, which is
    1/n; and 4 bytes for the weight. Memory: one fp32 tensor a leaf and 1/n of one.

    Raises:
        ValueError: the ranks' params differ in structure; another transform reduces gradients, such as ``zero``.
        TypeError: ``group`` is no group, or ``codec`` no codec.

    >>> import functional_ds as fds
    >>> def program():
    ...     step = feedback(comm.TopK(0.5))(fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(1.0)))
    ...     state = step.init({"w": torch.zeros(2)})
    ...     for _ in range(2):
    ...         state, _ = step(state, torch.tensor([3.0, 2.0]))
    ...         print(step.params(state)["w"].tolist())
    >>> _ = comm.simulate(program, world_size=1)
    [-3.0, 0.0]
    [-3.0, -4.0]
    """
    if not all(hasattr(codec, name) for name in ("encode", "decode")):
        raise TypeError(f"codec={codec!r} is no codec; use comm.OneBit(), comm.TopK(...) or comm.Blocks(...)")
    replicas, sums = Replicas(group), comm.ErrorFeedback(codec)
    name = f"feedback({codec}, {replicas})"

    def init(inner: Any, step: Step, params: Any) -> State:
        state: State = inner(step, replicas.same(params))
        return state.put(feedback=sums.init(reals(trainable(state.params)), replicas.ranks()))

    def reduce(inner: Any, step: Step, state: State, grads: Weighted) -> tuple[State, Weighted]:
        state, grads = inner(step, state, grads)
        ranks = replicas.ranks()
        weight = comm.all_reduce(grads.weight, ranks)
        weight = torch.where(weight == 0, torch.ones_like(weight), weight)
        own = [_wide(grad) * (ranks.size / weight) for grad in reals(grads.sum)]
        means, owed = sums.all_reduce(own, state.slots["feedback"], ranks, op="avg")
        finite = torch.stack([mean.isfinite().all() for mean in means]).all() if means else torch.tensor(True)
        owed = tree.map(lambda new, old: torch.where(finite, new, old), owed, state.slots["feedback"])
        total = [(mean * weight).view(-1) for mean in means]
        shaped = [_like(flat, grad) for flat, grad in zip(total, grads.sum, strict=True)]
        return state.put(feedback=owed), tree.replace(grads, sum=shaped)

    wrapped = wrap(
        name,
        slot="feedback",
        traits=[Trait.REDUCES_GRADIENTS, Trait.RESIDENT_SLOT],
        init=init,
        sync_buffers=replicas.sync_buffers,
        reduce=reduce,
        sum_over_ranks=replicas.sum_over_ranks,
        batch_shard=replicas.batch_shard,
    )

    def transform(step: Step) -> Step:
        replicas.alone(step, name)
        return wrapped(step)

    return transform


def _wide(grad: torch.Tensor) -> torch.Tensor:
    return grad.to(torch.promote_types(grad.dtype, torch.float32))


def _like(flat: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """As the gradient is shaped, complex where that is, but as wide as the sum."""
    return torch.view_as_complex(flat.view(*grad.shape, 2)) if grad.is_complex() else flat.view(grad.shape)
