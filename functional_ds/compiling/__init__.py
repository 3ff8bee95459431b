"""Whole steps as graphs."""

from .graph_passes import regather, schedule
from .graph_trace import StepGraph
from .jit_step import JitStep, JitWarning, jit

__all__ = ["JitStep", "JitWarning", "StepGraph", "jit", "regather", "schedule"]
