"""Data parallelism with compressed gradients and error feedback."""

import functools

from functional_ds import comm
from functional_ds.step.step import Transform

from .replicas import Replicas
from .replicated import replicated


def compressed_gradients(codec: comm.codecs.Codec, group: comm.Group | None = None) -> Transform:
    """Data parallelism that sums gradients through a lossy ``codec`` with error feedback.

    With C for the codec, gᵢ for a rank's gradient of the mean loss and e, e' for the residuals in the slot
    ``compressed_gradients`` of the state:

    ```
    p = gᵢ + e;  e ← p - C(p)             before sending, on every rank
    q = Σ C(p) / n + e';  e' ← q - C(q)   before sending back, on the rank that sums a piece
    ```

    ``Σₜ C(qₜ) = Σₜ gₜ - (e + e' at the end)``: errors are sent later, never lost, so biased codecs such as 1-bit and
    top-k converge (Seide et al. 2014; Stich and Karimireddy 2019; both directions, Tang et al. 2019). The residuals are of
    means, so a loss scale and a batch's weight may change between steps. A skipped step, and one whose gradients are not finite
    on any rank, of any stage or slice, leaves the residuals unchanged. In a pipeline the law holds for each stage's leaves, and
    copies of a shared leaf stay bitwise equal.

    The transform wraps ``reduce``, so transforms that wrap ``update``, such as ``clip``, get the sum, which is bitwise equal on
    all ranks. ``init`` uses rank 0's params.

    Cost: in bytes of the codec's payload, each rank sends (n - 1) / n of each leaf and (n - 1) times its piece, which is 1/n of
    the leaf; and 8 bytes for the weight and the overflow check, which a pipeline sums over its stages, too; 1 byte more over
    each axis that divides gradients. Memory: fp32 residuals of (1 + 1/n) times the leaves.

    Raises:
        ValueError: the ranks' params differ in structure; another transform reduces gradients, such as ``zero``.
        TypeError: ``group`` is not a ``comm.Group``, or ``codec`` not a codec.

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
            f"codec={codec!r} is not a codec; use comm.codecs.OneBit(), comm.codecs.TopK(...) or comm.codecs.Blocks(...)"
        )
    sums = comm.codecs.ErrorFeedback(codec)
    return replicated(
        group,
        reduce=functools.partial(sums.all_reduce, op="avg"),
        init=sums.init,
        slot="compressed_gradients",
        name=f"compressed_gradients({codec}, {Replicas(group)})",
    )
