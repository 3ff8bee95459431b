"""The table of collectives, and what a collective of your own is written with: a row, and a function that requests it."""

from typing import TYPE_CHECKING

from functional_ds.base.package_index import lazy_index

if TYPE_CHECKING:
    from functional_ds.comm.dispatch import collective, prepare, request
    from functional_ds.comm.record.collective import Call, Collective, Here, Traffic
    from functional_ds.comm.record.pending import Request
    from functional_ds.comm.record.table import TABLE

__all__ = ["TABLE", "Call", "Collective", "Here", "Request", "Traffic", "collective", "prepare", "request"]

lazy_index(__name__)
