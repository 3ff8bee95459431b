"""Measures a device's peak floating-point rate."""

from time import perf_counter

import torch

from functional_ds.base.device import overlaps, seconds_of


def peak_flops(
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    *,
    size: int | None = None,
    seconds: float = 0.2,
) -> float:
    """Measures the peak floating-point operations per second of square matrix products on a device.

    Law: the product of two n x n matrices has 2 n^3 operations. The fastest of several products counts.

    Args:
        dtype: of the matrices; use that of most of the model's products.
        device: where.
        size: n; by default 1,024 on the host and 8,192 on a device.
        seconds: how long to try; at least three products are computed.

    Raises:
        ValueError: ``size`` or ``seconds`` is not positive.

    >>> peak_flops(size=32, seconds=0.001) > 0
    True
    """
    place = torch.device(device)
    n = size if size is not None else 8192 if overlaps(place) else 1024
    if n < 1 or seconds <= 0:
        raise ValueError(f"size={size}, seconds={seconds}: pass positive numbers")
    x, times = torch.ones(n, n, dtype=dtype, device=place), list[float]()
    began = perf_counter()
    while len(times) < 3 or perf_counter() - began < seconds:
        times.append(seconds_of(lambda: x @ x, [place]))
    return float(2 * n**3 / min(times))
