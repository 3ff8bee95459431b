"""The table of collectives, and the tools for custom collectives: the record of a row, and functions that request one."""

from typing import TYPE_CHECKING

from functional_ds.base.package_index import lazy_index

if TYPE_CHECKING:
    from functional_ds.comm.backends.primitives import Communicator, Options, Prepared, Started
    from functional_ds.comm.calls.dispatch import collective, prepare, request
    from functional_ds.comm.composed import composed
    from functional_ds.comm.record.pending import Request

    from .collective import Call, CallContext, Collective, Traffic, Variance
    from .exchanges import TABLE

__all__ = [
    "TABLE",
    "Call",
    "CallContext",
    "Collective",
    "Communicator",
    "Options",
    "Prepared",
    "Request",
    "Started",
    "Traffic",
    "Variance",
    "collective",
    "composed",
    "prepare",
    "request",
]

lazy_index(__name__)
