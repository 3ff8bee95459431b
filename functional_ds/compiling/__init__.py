"""Whole steps as graphs."""

from .graph_passes import regather, schedule
from .graph_record import StepGraph
from .graph_trace import UntraceableError
from .jit_step import JitStep, JitWarning, jit

__all__ = ["JitStep", "JitWarning", "StepGraph", "UntraceableError", "jit", "regather", "schedule"]
