"""Profiling: where the time, the operations and the bytes of a step go."""

from .module_flops import Flops
from .peak import peak_flops
from .profiler import Profiled, Profiling, profile
from .rank import MemoryStatus, RankProfile
from .record import Recording, record
from .result import Profile
from .spans import STAGES, SpanKey

__all__ = [
    "STAGES",
    "Flops",
    "MemoryStatus",
    "Profile",
    "Profiled",
    "Profiling",
    "RankProfile",
    "Recording",
    "SpanKey",
    "peak_flops",
    "profile",
    "record",
]
