"""Data parallelism whose gradients travel through a biased codec, with error feedback."""

import functools

from functional_ds import comm
from functional_ds.step.step import Transform

from .replicas import Replicas
from .replicated import replicated

__all__ = ["compressed_gradients"]


def compressed_gradients(codec: comm.codecs.Codec, group: comm.Group | None = None) -> Transform:
    """Each rank of ``group`` has its own batch; gradients are summed through ``codec``, and what it leaves out is sent later.

    With C for the codec, gᵢ for a rank's gradient of the mean loss and e for the slot ``compressed_gradients`` of the state:

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
    1/n; and 8 bytes for the weight and for whether all gradients are finite. Memory: one fp32 tensor a leaf and 1/n of one.

    Raises:
        ValueError: the ranks' params differ in structure; another transform reduces gradients, such as ``zero``.
        TypeError: ``group`` is no group, or ``codec`` no codec.

    >>> import torch
    >>> import functional_ds as fds
    >>> def program():
    ...     step = compressed_gradients(comm.codecs.TopK(0.5))(
    ...         fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(1.0))
    ...     )
    ...     state = step.init({"w": torch.zeros(2)})
    ...     for _ in range(2):
    ...         state, _ = step(state, torch.tensor([3.0, 2.0]))
    ...         print(step.params(state)["w"].tolist())
    >>> _ = comm.simulate(program, world_size=1)
    [-3.0, 0.0]
    [-3.0, -4.0]
    """
    if not all(hasattr(codec, name) for name in ("encode", "decode")):
        raise TypeError(
            f"codec={codec!r} is no codec; use comm.codecs.OneBit(), comm.codecs.TopK(...) or comm.codecs.Blocks(...)"
        )
    sums = comm.codecs.ErrorFeedback(codec)
    return replicated(
        group,
        reduce=functools.partial(sums.all_reduce, op="avg"),
        init=sums.init,
        slot="compressed_gradients",
        name=f"compressed_gradients({codec}, {Replicas(group)})",
    )
