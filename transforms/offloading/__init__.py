"""What ``offload`` keeps where: handles, and how a state is fetched for a checkpoint."""

from .disk import Traffic
from .folder import OffloadError
from .handles import OnDisk, OnHost, fetched, restored
from .home import traffic

__all__ = ["OffloadError", "OnDisk", "OnHost", "Traffic", "fetched", "restored", "traffic"]
