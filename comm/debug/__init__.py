"""Debugging: checked calls, exploration of interleavings, timings, traffic and traces."""

from typing import TYPE_CHECKING

from functional_ds.base.package_index import lazy_index

if TYPE_CHECKING:
    from .checked import checked, monitored_barrier
    from .clock import Offsets, clock_offsets
    from .explore import explore
    from .page import Arrow, Chart, calls_chart, waits_chart, write_page
    from .trace import Slice, Spread, spreads, write_trace
    from .traffic import draw_traffic, traffic

__all__ = [
    "Arrow",
    "Chart",
    "Offsets",
    "Slice",
    "Spread",
    "calls_chart",
    "checked",
    "clock_offsets",
    "draw_traffic",
    "explore",
    "monitored_barrier",
    "spreads",
    "traffic",
    "waits_chart",
    "write_page",
    "write_trace",
]

lazy_index(__name__)
