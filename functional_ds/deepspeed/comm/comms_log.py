"""The log of collectives: calls, bytes and times, in a ledger that is open in the world."""

import functools
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, ParamSpec, TypeVar

import attrs

from functional_ds import comm
from functional_ds.deepspeed.config.config_reader import value_of

__all__ = ["configure", "has_comm_data", "log_summary", "reset_log"]

P = ParamSpec("P")
R = TypeVar("R")
_LOG_NAMES = ("prof", "log_name", "debug")


def logged(function: Callable[P, R]) -> Callable[P, R]:
    """The function with DeepSpeed's log arguments, which have no effect: every call is logged under its own name."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in _LOG_NAMES:
            kwargs.pop(name, None)
        return function(*args, **kwargs)

    return call


@attrs.define(eq=False)
class CommsLedger(comm.Ledger):
    """The ledger that ``configure`` opens; the other functions look it up in the world."""


def _ledgers() -> list[comm.Ledger]:
    return comm.world().world.ledgers


def _book() -> CommsLedger | None:
    return next((book for book in _ledgers() if isinstance(book, CommsLedger)), None)


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: list[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Opens or closes the log of this rank's world. On a GPU the host then waits for the device at every collective.

    Args:
        deepspeed_config: a config's path, dict or text, whose ``comms_logger.enabled`` is used.
        enabled: whether the log is open.
        prof_all: has no effect: every collective is logged.
        prof_ops: has no effect; choose rows of the summary.
        verbose: has no effect: calls are not printed.
        debug: has no effect.

    Raises:
        ConfigError: the config cannot be read.
    """
    if deepspeed_config is not None and enabled is None:
        enabled = value_of(deepspeed_config, "comms_logger.enabled") or None
    if enabled is None:
        return
    ledgers = _ledgers()
    if enabled and _book() is None:
        ledgers.append(CommsLedger(comm.world().rank, times=True))
    elif not enabled:
        ledgers[:] = [book for book in ledgers if not isinstance(book, CommsLedger)]


def reset_log() -> None:
    """Empties the log."""
    if _book() is not None:
        configure(enabled=False)
        configure(enabled=True)


def has_comm_data() -> bool:
    """Whether the log has an entry."""
    book = _book()
    return book is not None and bool(book.events)


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Prints the log on rank 0: calls, times, and bandwidths as in nccl-tests, by collective and size.

    All ranks call it.

    Args:
        show_straggler: also print which rank each collective waited for.
        return_dict: returns DeepSpeed's {"summary": {name: {bytes: numbers}}, "straggler_analysis": ..., "metadata": ...}.
    """
    here, book = comm.world(), _book()
    comm.barrier()
    rows = [] if book is None else book.by_size()
    summary: dict[str, dict[int, dict[str, Any]]] = {}
    lines = [f"{'collective':<24}{'bytes':>14}{'count':>8}{'total ms':>12}{'avg ms':>10}{'tput Gbps':>12}{'busbw Gbps':>12}"]
    for row in rows:
        size, total = row.payload // max(1, row.calls), row.seconds * 1e3
        rates = [(rate or 0.0) * 8 / 1e9 for rate in (row.algorithmic_bandwidth, row.bus_bandwidth)]
        summary.setdefault(row.collective, {})[size] = {
            "count": row.calls,
            "total_latency_ms": total,
            "avg_latency_ms": total / max(1, row.calls),
            "tput_avg_gbps": rates[0],
            "busbw_avg_gbps": rates[1],
            "msg_size_bytes": size,
            "msg_size_str": f"{size:,} B",
        }
        mean = total / max(1, row.calls)
        lines.append(
            f"{row.collective:<24}{size:>14,}{row.calls:>8}{total:>12.3f}{mean:>10.3f}{rates[0]:>12.3f}{rates[1]:>12.3f}"
        )
    stragglers = None
    if show_straggler:
        spreads = comm.debug.spreads(comm.all_gather_object(comm.Ledger() if book is None else _plain(book)))
        stragglers = {
            spread.collective: {"slowest_rank": spread.slowest, "seconds": list(spread.seconds)} for spread in spreads
        }
        lines += [str(spread) for spread in spreads]
    if here.rank == 0:
        found_text = lines if rows else ["no collective is in the log; deepspeed.comm.configure(enabled=True) opens it"]
        sys.stdout.write("\n".join([*found_text, ""]))
    if not return_dict:
        return None
    known = {"world_size": here.size, "rank": here.rank, "timestamp": datetime.now(UTC).isoformat()}
    return {"summary": summary, "straggler_analysis": stragglers, "metadata": known}


def _plain(book: comm.Ledger) -> comm.Ledger:
    """The rows alone, as every process can unpickle them."""
    return comm.Ledger(book.rank, book.times, list(book.rows))
