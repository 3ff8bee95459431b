"""``deepspeed.comm``: torch.distributed's in-place functions, over this library's groups and worlds."""

# ruff: noqa: F403
from . import comms_log, in_place, joining, point_to_point, works
from .comms_log import *
from .in_place import *
from .joining import *
from .point_to_point import *
from .works import *

__all__: list[str] = []
__all__ += comms_log.__all__ + in_place.__all__ + joining.__all__ + point_to_point.__all__ + works.__all__
