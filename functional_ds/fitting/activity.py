"""What a thread is doing, read off its stack from another one, so that being watched costs it nothing."""

import os
import sys
from types import FrameType
from typing import Any

from functional_ds.comm.collective import Call

__all__ = ["activity"]

_LIBRARIES = ("functional_ds", "torch", "optree")
_PYTHON = os.path.dirname(os.__file__) + os.sep  # noqa: PTH120  # compared as text
_COMM, _STEP = "functional_ds.comm.", "functional_ds.step"


def activity(thread: int) -> dict[str, str]:
    """Where a thread is.

    ``phase``: the step's phase that it is in; ``call``: the collective that it is in, with its options and shapes where they
    can be seen; ``site``: the file and line of the innermost code that is not this library's, torch's or Python's. What does
    not apply is left out.

    >>> import threading
    >>> isinstance(activity(threading.get_ident()), dict)
    True
    """
    frame = sys._current_frames().get(thread)
    found: dict[str, str] = {}
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_COMM) and "site" not in found:
            _note_call(frame, found)
        elif module == _STEP and not frame.f_code.co_name.startswith("_"):
            found.setdefault("phase", frame.f_code.co_name)
        elif module.partition(".")[0] not in _LIBRARIES and not _is_pythons(frame.f_code.co_filename):
            found.setdefault("site", f"{frame.f_code.co_filename.rpartition(os.sep)[2]}:{frame.f_lineno}")
        frame = frame.f_back
    return found


def _is_pythons(file: str) -> bool:
    """Whether this is Python's own library, which is where waiting often ends up."""
    return file.startswith(("<frozen", _PYTHON)) and "site-packages" not in file


def _note_call(frame: FrameType, found: dict[str, str]) -> None:
    """The call as the world carries it out, which knows its shapes; else the name of the outermost function of comm."""
    if "[" in found.get("call", ""):
        return
    local = frame.f_locals
    known = _signature(local) or _signature({name: getattr(local.get("self"), name, None) for name in _PARTS})
    found["call"] = known or frame.f_code.co_name


_PARTS = ("call", "tensors", "group", "here")


def _signature(parts: dict[str, Any]) -> str | None:
    call, tensors, group, here = (parts.get(name) for name in _PARTS)
    if not isinstance(call, Call) or tensors is None or group is None or here is None:
        return None
    return f"{call.signature(tensors, here)} on group {group.name!r} [{group.size}]"
