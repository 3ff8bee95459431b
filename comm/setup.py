"""Joins and leaves a world of processes; ranks, sizes and new groups."""

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from operator import index

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but torch's __all__ lacks it
from torch.distributed.distributed_c10d import Store

from functional_ds.comm.backends.malloc import HostMemory, keep_freed_memory
from functional_ds.comm.record.group import Group, check_ranks_per_node, neighbours
from functional_ds.comm.worlds.current import simulated_world, world
from functional_ds.comm.worlds.process import DEFAULT_TIMEOUT, check_timeout, leave_process_world, process_world
from functional_ds.comm.worlds.rendezvous import Deadline, connect, meet, open_store

_PER_NODE = "functional_ds/ranks_per_node"
_BACKENDS = ("gloo", "nccl", "cpu:gloo,cuda:nccl")


def _local_device(backend: str | None, local_rank: int, ranks_here: int) -> tuple[str, torch.device | None]:
    """The back end to use and, for NCCL, this rank's GPU, which becomes the current device.

    If a launcher shows each process a single GPU (as SLURM's ``--gpus-per-task``), it is number 0 there.
    """
    if backend is not None and backend not in _BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; use one of {', '.join(map(repr, _BACKENDS))}, or None to choose")
    wants_gpu = torch.cuda.is_available() if backend is None else "nccl" in backend
    if not wants_gpu:
        return backend or "gloo", None
    gpus = torch.cuda.device_count()
    if ranks_here > gpus != 1:
        raise ValueError(
            f"{ranks_here} ranks on this host and {gpus} GPUs: NCCL needs a GPU for each rank; "
            f"start at most {gpus} ranks here, show each process one GPU, or pass backend='gloo' to run on CPUs"
        )
    device = torch.device("cuda", 0 if gpus == 1 else local_rank)
    torch.cuda.set_device(device)
    return backend or "cpu:gloo,cuda:nccl", device


def _check_own_gpu(store: Store, rank: int, size: int) -> None:
    """Raises ValueError on all ranks if two of them have the same GPU."""
    gpus = [store.get(f"functional_ds/gpu/{other}") for other in range(size)]
    same = [other for other, gpu in enumerate(gpus) if gpu == gpus[rank]]
    shared = same if len(same) > 1 else next(([a, b] for b in range(size) for a in range(b) if gpus[a] == gpus[b]), [])
    if shared:
        raise ValueError(
            f"ranks {shared} have the same GPU: NCCL needs a GPU for each rank; start fewer ranks, show each process a GPU "
            "of its own, or pass backend='gloo' to run on CPUs"
        )


def _from_environment(variable: str) -> int | None:
    """An environment variable as an integer; None if it is not set."""
    text = os.environ.get(variable)
    try:
        return None if text is None else int(text)
    except ValueError:
        raise ValueError(
            f"{variable}={text!r} in the environment is not an integer; torchrun sets it: start the program with torchrun, or "
            f"unset {variable}"
        ) from None


def _place(world_size: int | None, rank: int | None) -> tuple[int, int] | None:
    """This process's rank and the world's size, from the arguments or the environment; None if neither is given."""
    size = _from_environment("WORLD_SIZE") if world_size is None else world_size
    place = _from_environment("RANK") if rank is None else rank
    if size is None and place is None:
        return None
    if size is None or place is None:
        known, missing = ("rank", "world_size") if size is None else ("world_size", "rank")
        raise ValueError(
            f"{known} is given and {missing} is not: pass both, or start the program with torchrun, which sets both"
        )
    if size < 1:
        raise ValueError(f"world_size={size}: a world has at least one rank")
    if not 0 <= place < size:
        raise ValueError(f"rank={place} is not a rank of a world of {size}; its ranks are 0..{size - 1}")
    return place, size


def init_distributed(
    backend: str | None = None,
    world_size: int | None = None,
    rank: int | None = None,
    init_method: str | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    *,
    store: Store | None = None,
    ranks_per_node: int | None = None,
) -> Group:
    """Joins the world of processes given by the arguments or by torchrun's environment variables, and returns its group.

    Without either, it returns a world of one rank. Further calls return the same world; after ``destroy_process_group`` a call
    joins again. In a simulation it returns the simulated world. With Gloo only, it also makes the process keep freed memory
    for later allocations (glibc's ``mallopt``), unless you set malloc's options or FUNCTIONAL_DS_MALLOC=default.

    Args:
        backend: "gloo", "nccl", or "cpu:gloo,cuda:nccl". None chooses the last one if there are GPUs, else Gloo.
        world_size: the number of processes; None reads WORLD_SIZE.
        rank: this process's rank; None reads RANK.
        init_method: where the processes meet: ``"tcp://host:port"``, ``"file:///path"``, or ``"env://"`` for MASTER_ADDR and
            MASTER_PORT, the default.
        timeout: for joining, and for each message.
        store: a torch store in which the processes meet, instead of ``init_method``.
        ranks_per_node: how many consecutive ranks share a node, the same on all ranks; None reads LOCAL_WORLD_SIZE, or else
            compares the hosts' names. All-reduces, reduce-scatters and all-gathers over Gloo are hierarchical
            (``Group.ranks_per_node``); 1 disables that.

    Raises:
        ValueError: a rank is out of range; world_size is given without rank; the backend is unknown; there is no address; an
            environment variable is not an integer; the process is already in a world with another size or rank; NCCL has more
            ranks on this host than GPUs, or two ranks have the same GPU.
        TimedOutError: some processes have not joined; names their ranks.

    >>> from functional_ds import comm
    >>> comm.simulate(lambda: comm.init_distributed().size, world_size=2)
    [2, 2]
    """
    check_timeout(timeout)
    if simulated_world() is None and not dist.is_initialized():
        place = _place(world_size, rank)
        if place is not None:
            per_node, host = _join(backend, *place, init_method, timeout, store, ranks_per_node)
            joined = process_world(timeout) or world()
            joined.world.ranks_per_node, joined.world.host = per_node, host
    here = simulated_world() or process_world(timeout) or world()
    for name, given, actual in (("world_size", world_size, here.size), ("rank", rank, here.rank)):
        if given is not None and given != actual:
            raise ValueError(
                f"{name}={given}, and this process is rank {here.rank} of a world of {here.size} already; "
                "call destroy_process_group() first to join another"
            )
    return here


def _join(
    backend: str | None,
    rank: int,
    size: int,
    init_method: str | None,
    timeout: timedelta,
    store: Store | None,
    ranks_per_node: int | None,
) -> tuple[int, HostMemory | None]:
    deadline = Deadline(timeout)
    local_rank, ranks_here = _from_environment("LOCAL_RANK"), _from_environment("LOCAL_WORLD_SIZE")
    per_node = ranks_here if ranks_per_node is None else ranks_per_node
    if ranks_per_node is not None:
        check_ranks_per_node(ranks_per_node, size)
    ranks_here = size if ranks_here is None else ranks_here
    chosen, device = _local_device(backend, rank if local_rank is None else local_rank, ranks_here)
    if init_method is not None and not init_method.startswith(("tcp://", "file://", "env://")):
        raise ValueError(f"init_method={init_method!r} is unknown; use 'tcp://host:port', 'file:///path' or 'env://'")
    if store is None and init_method in (None, "env://"):
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing and size == 1:
            store, init_method = HashStore(), None
        elif missing:
            raise ValueError(
                f"{' and '.join(missing)} not set: {size} processes need a place to meet; start them with torchrun, "
                "or pass init_method='tcp://host:port'"
            )
        else:
            _from_environment("MASTER_PORT")
    host = None if "nccl" in chosen else keep_freed_memory()
    whole = open_store(init_method or "env://", rank=rank, size=size, deadline=deadline) if store is None else store
    # The launcher's store may outlive a world: a prefix keeps this world's keys apart from those of an earlier one.
    part = meet(whole, rank=rank, size=size, deadline=deadline)
    if store is None:
        whole.set_timeout(timeout)  # it was made with the remaining time for joining

    agreed_per_node = 1

    def make() -> None:
        nonlocal agreed_per_node
        if device is not None:
            torch.cuda.set_device(device)  # of this thread
            part.set(f"functional_ds/gpu/{rank}", str(torch.cuda.get_device_properties(device).uuid))
            if ranks_here > torch.cuda.device_count():
                _check_own_gpu(part, rank, size)
        # With a device, NCCL connects all ranks here, not at the first call, in which some of them may not take part.
        dist.init_process_group(chosen, store=part, rank=rank, world_size=size, timeout=timeout, device_id=device)
        # After connecting: a rank that knows all nodes may leave again, and closes its connections.
        part.set(f"functional_ds/node/{rank}", str(rank // per_node) if per_node else socket.gethostname())
        if rank == 0:  # one rank asks for all names
            part.set(_PER_NODE, str(neighbours([part.get(f"functional_ds/node/{other}") for other in range(size)])))
        agreed_per_node = int(part.get(_PER_NODE))

    connect(part, rank=rank, size=size, timeout=timeout, make=make)
    return agreed_per_node, host


def destroy_process_group() -> None:
    """Leaves the world of processes; afterwards ``world()`` has one rank.

    Later collectives on groups of that world raise CommError. In a simulation, or without such a world, it does nothing.

    >>> destroy_process_group()
    """
    if simulated_world() is not None:
        return
    leave_process_world()
    if dist.is_initialized():
        dist.destroy_process_group()


def is_initialized() -> bool:
    """Whether the program is in a world of processes or in a simulation.

    >>> is_initialized()
    False
    """
    return simulated_world() is not None or process_world() is not None


def get_rank(group: Group | None = None) -> int:
    """This process's rank in the group, by default in the world; -1 if it is not a member.

    >>> get_rank()
    0
    """
    return (group or world()).rank


def get_world_size(group: Group | None = None) -> int:
    """The number of ranks in the group, by default in the world.

    >>> get_world_size()
    1
    """
    return (group or world()).size


def get_local_rank() -> int:
    """This process's rank on its host: LOCAL_RANK, as torchrun and ``spawn`` set it; without it, or simulated, the rank.

    Raises:
        ValueError: LOCAL_RANK is not an integer.

    >>> get_local_rank()
    0
    """
    simulated = simulated_world()
    local = _from_environment("LOCAL_RANK") if simulated is None else simulated.rank
    return get_rank() if local is None else local


def new_group(ranks: Sequence[int], name: str = "group") -> Group:
    """Makes a group of ranks of the world, in the given order.

    Unlike torch's ``new_group``, it is not a collective call: the members connect when they first use the group. On a rank that
    is not a member, the group's collectives raise CommError. Groups with the same ranks and name are one group, whose
    collectives have one order.

    Args:
        ranks: distinct ranks of the world.
        name: the group's name in messages and in the ledger.

    Raises:
        ValueError: a rank is out of range or occurs twice; there are no ranks.

    >>> import torch
    >>> from functional_ds import comm
    >>> def program():
    ...     odd = comm.new_group([1, 3])
    ...     return comm.all_reduce(torch.tensor(1), odd).item() if odd.rank >= 0 else None
    >>> comm.simulate(program, world_size=4)
    [None, 2, None, 2]
    """
    everyone = world()
    try:
        chosen = [index(rank) for rank in ranks]
    except TypeError:
        raise TypeError(f"ranks={ranks!r}: pass ranks of the world, like [0, 2]") from None
    outside = [rank for rank in chosen if not 0 <= rank < everyone.size]
    if outside or not chosen:
        known = f"is not one of the world's, which are 0..{everyone.size - 1}"
        raise ValueError(f"ranks={chosen}: {f'rank {outside[0]} {known}' if outside else 'a group needs a rank'}")
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"ranks={chosen}: a rank is listed twice")
    return everyone.world.group(chosen, name)
