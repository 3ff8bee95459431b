"""Ranks as processes: collectives lowered to torch's process groups."""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from time import monotonic

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from .allocator import keep_freed_memory
from .collective import Call
from .exchange import EXCHANGES, Started
from .group import Group
from .lane import Lane, Queued
from .ledger import Ledger
from .native import NATIVE

__all__ = ["ProcessWorld", "init_distributed", "process_world"]


@attrs.define(eq=False)
class _Coalesced:
    """Leaves of one dtype that travel as one payload."""

    places: list[int]
    payloads: list[Tensor]
    started: Started | Queued

    def pieces(self) -> list[Tensor]:
        result = self.started.wait()
        if len(self.payloads) == 1:
            return [result]
        return list(result.split([payload.shape[-1] for payload in self.payloads], dim=-1))  # [m] or [n, m]


@attrs.define(eq=False)
class _ProcessHandle:
    call: Call
    tensors: Sequence[Tensor]
    size: int
    parts: list[_Coalesced]

    def poll(self, patience: float) -> bool:
        deadline = monotonic() + patience
        return all(part.started.poll(max(0.0, deadline - monotonic())) for part in self.parts)

    def wait(self) -> list[Tensor]:
        results: list[Tensor] = [*self.tensors]
        for part in self.parts:
            for place, piece in zip(part.places, part.pieces(), strict=True):
                leaf = self.tensors[place]
                result = self.call.collective.unpack(piece, leaf, self.size, self.call.options)
                # Pieces of a coalesced payload would share one storage, each keeping all of it alive.
                results[place] = result.clone() if len(part.places) > 1 else result
        return results


def _dense(payload: Tensor) -> Tensor:
    """Contiguous, and viewable as bytes: torch calls a lone element contiguous whatever its stride."""
    return payload.contiguous() if payload.stride(-1) == 1 else payload.clone(memory_format=torch.contiguous_format)


@attrs.define(eq=False)
class ProcessWorld:
    """The world as one process sees it: a torch process group for each group and channel."""

    rank: int
    groups: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = attrs.field(factory=dict)
    lanes: dict[tuple[tuple[int, ...], str], Lane] = attrs.field(factory=dict)
    books: list[Ledger] = attrs.field(factory=list)

    def start(self, call: Call, tensors: Sequence[Tensor], group: Group, *, ahead: bool) -> _ProcessHandle:
        key = (group.ranks, group.name)
        pg = self.groups[key]
        lane = self.lanes.setdefault(key, Lane(group.name))
        by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for place, tensor in enumerate(tensors):
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(place)
        collective, n = call.collective, group.size
        parts = []
        for (_, device), places in by_kind.items():
            plain = [tensors[place].detach().resolve_conj().resolve_neg() for place in places]  # bytes as they read
            payloads = [collective.pack(tensor, n, call.options) for tensor in plain]
            payload = torch.cat(payloads, dim=-1) if len(payloads) > 1 else _dense(payloads[0])
            primitive = (NATIVE if device.type == "cuda" else EXCHANGES)[collective.primitive]
            begin = partial(primitive, pg, payload, call.options)
            if device.type == "cuda":
                started: Started | Queued = begin()
            elif ahead or not lane.idle:
                started = lane.submit(partial(_carry_out, begin))
            else:  # both rounds at once, as on a lane: other ranks' lanes may be busier, and messages have one order
                started = Started([], partial(_itself, _carry_out(begin)))
            parts.append(_Coalesced(places, payloads, started))
        return _ProcessHandle(call, tensors, n, parts)

    def group(self, ranks: Sequence[int], name: str) -> Group:
        """A new group; every rank calls this alike, since torch names a group by how many there are."""
        key = (tuple(ranks), name)
        if key not in self.groups:
            self.groups[key] = dist.new_group(list(ranks), use_local_synchronization=True, group_desc=name)
        return Group(key[0], list(ranks).index(self.rank), name, self)

    def channel(self, group: Group, name: str) -> Group:
        return self.group(group.ranks, f"{group.name}/{name}")

    def adopt(self, pg: dist.ProcessGroup, name: str) -> Group:
        """A torch process group as a group."""
        ranks = tuple(dist.get_process_group_ranks(pg))
        self.groups[ranks, name] = pg
        return Group(ranks, ranks.index(self.rank), name, self)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _carry_out(begin: Callable[[], Started]) -> Tensor:
    return begin().wait()


_WORLDS: dict[dist.ProcessGroup, ProcessWorld] = {}  # one entry: torch's default process group and its world


def process_world() -> Group | None:
    """torch's default process group as a world, or None where there is none."""
    if not dist.is_initialized():
        return None
    pg = dist.group.WORLD
    if pg is None:
        return None
    if pg not in _WORLDS:
        _WORLDS.clear()
        _WORLDS[pg] = ProcessWorld(dist.get_rank())
    return _WORLDS[pg].adopt(pg, "world")


def _local_device(backend: str | None, local_rank: int, ranks_here: int) -> str:
    """The backend to use; takes this rank's GPU where there are enough of them."""
    wants_gpu = torch.cuda.is_available() if backend is None else "nccl" in backend
    if not wants_gpu:
        return backend or "gloo"
    gpus = torch.cuda.device_count()
    if ranks_here > gpus:
        raise ValueError(
            f"{ranks_here} ranks on this host and {gpus} GPUs: NCCL needs a GPU for each rank; "
            f"start at most {gpus} ranks here, or pass backend='gloo' to run on CPUs"
        )
    torch.cuda.set_device(local_rank)
    return backend or "cpu:gloo,cuda:nccl"


def init_distributed(
    backend: str | None = None,
    *,
    store: Store | None = None,
    timeout: timedelta = timedelta(minutes=10),
) -> Group:
    """Joins the world that torchrun's environment describes and returns it; outside torchrun, a world of one.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. ``backend=None`` takes NCCL for CUDA
    tensors and Gloo for CPU tensors where there are GPUs, else Gloo. Calling it again returns the same world. Where there is
    Gloo alone, the process keeps freed memory for later allocations (glibc's ``mallopt``).

    Raises:
        ValueError: more ranks on this host than GPUs, under NCCL.
    """
    from .world import world  # the surroundings stand above the process groups

    if not dist.is_initialized() and "RANK" in os.environ:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        chosen = _local_device(backend, local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", size)))
        if "nccl" not in chosen:
            keep_freed_memory()
        dist.init_process_group(chosen, store=store, rank=rank, world_size=size, timeout=timeout)
    return world()
