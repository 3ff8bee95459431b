"""Offloaded optimizer states and params: plans, files, buffers, and updates in pieces."""

from .files import DiskTraffic, OffloadError
from .handles import OnDisk, OnHost, fetched, restored
from .storage import traffic

__all__ = ["DiskTraffic", "OffloadError", "OnDisk", "OnHost", "fetched", "restored", "traffic"]
