"""``dry_run``: a step on shapes, as one rank of many, recorded as events."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from functional_ds.base import tree
from functional_ds.base.torch_private import CPU_ATTENTION, CUDA_ATTENTION
from functional_ds.base.torch_replaced import instead_of_engine
from functional_ds.base.weighted import Weighted, weigh
from functional_ds.step.state.state import State
from functional_ds.step.step import Step

from .events import Events, recorded

_LEARNS = 2  # the first step learns in which order units are used, and the second agrees on it


def dry_run(step: Step, state: State, batch: Any) -> Events:
    """The events of a step on this rank, including the allocation of its state and batch.

    It is a later step, in which the order of units is known. In a world of shapes nothing is computed, so the model may have
    any size, on any number of ranks.

    The events are the same with values or without; they are the ledger's rows, the operations of a run, and its
    allocations.

    Args:
        step: the step.
        state: from ``step.init``; it is donated.
        batch: this rank's.

    >>> import functional_ds as fds
    >>> from functional_ds.comm.worlds.shapes import rank_on_shapes
    >>> def program():
    ...     step = fds.transforms.zero(1)(fds.train_step(lambda params, x: (x @ params["w"]).square().sum(), fds.adam(0.1)))
    ...     return dry_run(step, step.init({"w": torch.empty(512, 512, device="meta")}), torch.empty(8, 512, device="meta"))
    >>> events = rank_on_shapes(program, world_size=64, rank=7)
    >>> events.flops == 2 * 2 * 8 * 512 * 512, events.peak() > 4 * 2 * 512 * 512  # params, and whole gradients
    (True, True)
    >>> [(row.collective, row.bytes) for row in events.sent if row.group in ("world", "world/reduce") and row.bytes > 4096]
    [('reduce_scatter', 1032192), ('all_gather', 1032192)]
    """
    for _ in range(_LEARNS):
        state, _ = step(state, batch)
    with recorded(state, batch) as run:
        step(state, batch)
    return run.events


def loss_of_all(params: Any) -> Callable[[Any, Any], Weighted]:
    """A loss that uses all leaves, one after another in the tree's order, forward and backward.

    Integers, and frozen leaves before the first trained one, are used only forward: no gradient passes them.

    Args:
        params: the user's tree.
    """
    order = tree.as_written(params)

    def loss(params: Any, batch: Any) -> Weighted:
        leaves, total = dict(tree.named(params)), torch.ones((), device="meta")
        for path in order:
            leaf = leaves[path]
            if leaf.is_floating_point() or leaf.is_complex():
                total = (leaf * (leaf * total)).abs().sum().float()  # its derivative needs the leaf
            else:
                total = total + leaf.sum()
        return weigh(total, "the loss")

    return loss


class _KernelsOf(TorchFunctionMode):
    """Runs attention on the meta device with the kernel that a real device would choose, not as products of whole matrices.

    With ``whole``, queries of values return True: Hugging Face's models ask whether rows are neither padded nor packed.
    """

    def __init__(self, device: str, whole: bool) -> None:
        super().__init__()
        self._device, self._whole = device, whole

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._whole and function is Tensor.__bool__ and args[0].is_meta:
            return True
        if function is F.scaled_dot_product_attention and args[0].is_meta:
            output = self._attention(*args, **kwargs)
            if output is not None:
                return output
        return function(*args, **kwargs)

    def _attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor | None:
        if q.dim() != 4 or q.shape[-1] != v.shape[-1] or dropout_p:
            return None
        if enable_gqa and k.shape[1] != q.shape[1]:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        if self._device == "cpu":
            output: Tensor = CPU_ATTENTION(q, k, v, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
            return output
        half = q.dtype in (torch.float16, torch.bfloat16)
        if attn_mask is None and half:
            flash: Tensor = CUDA_ATTENTION(q, k, v, 0.0, is_causal, False, scale=scale)[0]
            return flash
        return None


@contextmanager
def kernels_of(device: str, *, whole: bool) -> Iterator[None]:
    """A context in which attention on the device "meta" uses the kernel that a real device would choose, also backward.

    Args:
        device: the device type.
        whole: whether queries of values return True.
    """
    mode = _KernelsOf(device, whole)

    def within(run_backward: Any, *args: Any, **kwargs: Any) -> Any:
        with mode:
            return run_backward(*args, **kwargs)

    with mode, instead_of_engine(within):  # torch leaves function modes before a backward pass, which may recompute
        yield
