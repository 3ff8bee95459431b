"""Activation memory: measured, or predicted from shapes."""

import gc
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.marks import like_marked
from functional_ds.base.torch_private import FakeTensorMode
from functional_ds.base.weighted import weigh
from functional_ds.dry_run.events import FakeRecorder
from functional_ds.step.pass_scope import Pass
from functional_ds.step.views.plain_view import stored_view


@attrs.frozen
class Activations:
    """Bytes of activations, without params, the batch and what outlives the backward pass (module buffers).

    Attributes:
        kept: allocated at the end of the forward pass, for the backward pass.
        forward: the peak within the forward pass.
        backward: the peak within the backward pass, including whole gradients.
    """

    kept: int
    forward: int
    backward: int


def activations(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    device: str | torch.device = "cpu",
    autocast: torch.dtype | None = None,
) -> Activations:
    """The activation memory of ``loss_fn(params, batch)``: the bytes kept for the backward pass, and the peaks, on one rank.

    If params or batch are on the meta device, the function runs on torch's fake tensors for ``device``: nothing is computed, so
    the model may have any size, but the function must not read values. Otherwise the function is run and measured.

    Law: both give exactly the same ``kept``, if operations choose the same kernels (an LSTM on the CPU does not). The peaks may
    differ by temporary memory of kernels, which is not seen. With recomputation only kept tensors count; but ``fds.remat``
    keeps everything on fake tensors, so a loss with it must be measured with values.

    Args:
        loss_fn: as in ``train_step``; without a key.
        params: the user's tree, in the dtypes that the loss sees.
        batch: what one rank processes at once: a micro-batch, with gradient accumulation.
        device: the device of the fake tensors.
        autocast: the dtype of an autocast around the loss; None for no autocast.

    >>> w, x = torch.empty(100, 200, device="meta"), torch.empty(8, 100, device="meta")
    >>> activations(lambda params, batch: torch.tanh(batch @ params["w"]).sum(), {"w": w}, x).kept  # tanh keeps its result
    6400
    """
    if tree.on_meta((params, batch)):
        with FakeTensorMode(allow_non_fake_inputs=True):
            params, batch = (tree.map(lambda x: _standing_for(x, device), held) for held in (params, batch))
            return _run(loss_fn, params, batch, torch.device(device), autocast)
    devices = [leaf.device for leaf in tree.leaves(params) if isinstance(leaf, Tensor)]
    return _run(loss_fn, params, batch, devices[0] if devices else torch.device(device), autocast)


def _standing_for(leaf: Any, device: str | torch.device) -> Any:
    return like_marked(torch.empty_like(leaf, device=device), leaf) if isinstance(leaf, Tensor) else leaf


def _run(
    loss_fn: Callable[..., Any], params: Any, batch: Any, device: torch.device, autocast: torch.dtype | None
) -> Activations:
    view = stored_view(params, trains=True)
    with Pass(view=view) as pass_, FakeRecorder((params, batch)) as run:
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            result = loss_fn(view.params, batch)
        loss = result[0] if isinstance(result, tuple) else result
        loss = weigh(loss, "the loss").sum
        outputs = run.allocated(result)
        del result
        pass_.end_forward()
        held = {number: size for number, size in run.allocated().items() if number not in outputs}
        middle = len(run.events)
        pass_.pull(loss, None, True).wait()
        del loss
    gc.collect()  # a graph may be in a cycle
    lasting = run.allocated()
    kept, lasts = sum(size for number, size in held.items() if number not in lasting), sum(lasting.values())
    before = sum(size for number, size in held.items() if number in lasting)  # the backward pass may also make what lasts
    return Activations(kept, run.events.peak(until=middle) - before, max(run.events.peak(since=middle) - lasts, 0))
