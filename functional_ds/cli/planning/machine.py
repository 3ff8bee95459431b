"""A machine as a few numbers: how fast it computes, how fast its memory and its links are, and how much it holds."""

import json
from pathlib import Path
from time import perf_counter
from typing import Any

import attrs
import torch

from functional_ds.cli.words.errors_in_one_line import CommandError
from functional_ds.comm.algorithms.cost import Link, Network, predict
from functional_ds.comm.record.ledger import Row
from functional_ds.profiling.peak import peak_flops

__all__ = ["MACHINES", "Machine", "machine_of", "measured_here"]

_TWICE = ("all_reduce", "reduce_from")


@attrs.frozen
class Machine:
    """A rank's device and its links.

    Attributes:
        name: for tables.
        flops: operations a second of products in bf16.
        flops_fp32: the same in fp32.
        memory_bandwidth: bytes a second of the device's memory.
        link_bandwidth: bytes a second that a rank sends.
        link_latency: seconds of an empty message.
        operation_latency: seconds that the host takes to start an operation.
        memory: bytes; 0 where nobody said.
        device: the kind, "cuda" or "cpu".
    """

    name: str
    flops: float
    flops_fp32: float
    memory_bandwidth: float
    link_bandwidth: float
    link_latency: float = 5e-6
    operation_latency: float = 5e-6
    memory: int = 0
    device: str = "cuda"

    def __attrs_post_init__(self) -> None:
        for field in ("flops", "flops_fp32", "memory_bandwidth", "link_bandwidth"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise CommandError(f"--machine: {field}={value!r} must be a number above 0")

    def computes(self, flops: int, *, operations: int, precision: str) -> float:
        """Seconds of the products, and of starting operations, which a device computes beside.

        Args:
            flops: of the products.
            operations: how many.
            precision: "fp32", or a half one.
        """
        products = flops / (self.flops_fp32 if precision == "fp32" else self.flops)
        starts = operations * self.operation_latency
        return products + starts if self.device == "cpu" else max(products, starts)

    def moves(self, count: int) -> float:
        """Seconds to read and write so many bytes once each."""
        return 2 * count / self.memory_bandwidth

    def sends(self, row: Row) -> float:
        """Seconds of a ledger's row: rings, one call after another; other collectives send their bytes once."""
        link = Link(latency=self.link_latency, bandwidth=self.link_bandwidth)
        if row.collective in _TWICE and row.calls:
            payload = row.bytes / row.calls * row.size / max(1, 2 * (row.size - 1))
            return row.calls * predict("ring", payload, row.size, Network(link)).seconds
        return row.calls * max(1, row.size - 1) * self.link_latency + row.bytes / self.link_bandwidth


# Data sheets' dense rates; links are NVLink's in one direction.
MACHINES = {
    "a100-40gb": Machine("A100 40 GB", 312e12, 156e12, 1.555e12, 300e9, memory=40 * 10**9),
    "a100-80gb": Machine("A100 80 GB", 312e12, 156e12, 2.039e12, 300e9, memory=80 * 10**9),
    "h100": Machine("H100 SXM 80 GB", 989e12, 494e12, 3.35e12, 450e9, memory=80 * 10**9),
    "h200": Machine("H200 SXM 141 GB", 989e12, 494e12, 4.8e12, 450e9, memory=141 * 10**9),
}


def machine_of(name: str) -> Machine:
    """A machine by name, by a JSON file of its fields, or ``here``: measured in a second.

    Raises:
        CommandError: an unknown name; a file with unknown or missing fields.
    """
    if name == "here":
        return measured_here()
    if name in MACHINES:
        return MACHINES[name]
    path = Path(name)
    if not path.is_file():
        raise CommandError(f"--machine: {name!r} is no file, and none of here, {', '.join(MACHINES)}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Machine(**found)
    except (OSError, ValueError, TypeError) as error:
        names = ", ".join(field.name for field in attrs.fields(Machine))
        raise CommandError(f"--machine: {name} should be JSON with {names}: {error}") from error


def measured_here() -> Machine:
    """This machine: the fastest square products, and copies of memory; links are copies within the machine."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = None if device == "cuda" else 512
    rates = {dtype: peak_flops(dtype, device, size=size, seconds=0.1) for dtype in (torch.bfloat16, torch.float32)}
    copied = _copy_bandwidth(device)
    total: Any = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else 0
    name = torch.cuda.get_device_name() if device == "cuda" else "this CPU"
    rate = rates[torch.bfloat16], rates[torch.float32]
    return Machine(name, *rate, 2 * copied, copied, 5e-5, _operation_latency(device), int(total), device)


def _operation_latency(device: str) -> float:
    x, found = torch.zeros(1, device=device), list[float]()
    for _ in range(5):
        start = perf_counter()
        for _ in range(100):
            x.add_(1)
        found.append((perf_counter() - start) / 100)
    return min(found)


def _copy_bandwidth(device: str) -> float:
    x = torch.zeros(1 << 22, device=device)
    y, found = torch.empty_like(x), list[float]()
    for _ in range(5):
        start = perf_counter()
        y.copy_(x)
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(perf_counter() - start)
    return x.nbytes / min(found)
