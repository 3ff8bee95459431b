"""What ``offload`` keeps where: handles, and how a state is fetched for a checkpoint."""

from .disk import DiskTraffic
from .files import OffloadError
from .handles import OnDisk, OnHost, fetched, restored
from .storage import traffic

__all__ = ["DiskTraffic", "OffloadError", "OnDisk", "OnHost", "fetched", "restored", "traffic"]
