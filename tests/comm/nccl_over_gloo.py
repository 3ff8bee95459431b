"""What NCCL would run, run over Gloo's own collectives: for tests without a GPU.

A communicator is then one of torch's Gloo process groups, which connects as an eager NCCL communicator does: its
constructor returns once all its ranks have come.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from functional_ds.comm.backends import nccl
from functional_ds.comm.worlds.process import ProcessWorld

__all__ = ["install"]


def install(*, cpu: bool = True) -> None:
    """Sends this process's CPU tensors as if they were CUDA tensors; without ``cpu`` as if NCCL were the only backend."""
    reduce_scatter: Callable[..., Any] = nccl._REDUCE_SCATTER

    def flat_reduce_scatter(result: Tensor, source: Tensor, *args: Any, **options: Any) -> dist.Work | None:
        """Gloo takes sources of one dim alone."""
        work: dist.Work | None = reduce_scatter(result.view(-1), source.reshape(-1), *args, **options)
        return work

    nccl._REDUCE_SCATTER = flat_reduce_scatter
    ProcessWorld._start_gloo = ProcessWorld._start_nccl  # type: ignore[method-assign,assignment]
    if not cpu:
        ProcessWorld._backends = {"cuda": "nccl"}  # type: ignore[assignment]
        ProcessWorld.device = torch.device("cpu")  # type: ignore[assignment]
        torch.cuda.current_device = lambda: 0
