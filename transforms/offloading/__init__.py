"""Optimizer states and params on the host or a disk: plans, files, buffers, and updates in pieces."""

from .files import DiskTraffic, OffloadError
from .handles import OnDisk, OnHost, fetched, restored
from .storage import traffic

__all__ = ["DiskTraffic", "OffloadError", "OnDisk", "OnHost", "fetched", "restored", "traffic"]
