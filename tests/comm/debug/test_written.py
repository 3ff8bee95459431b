"""A tensor that is written while a collective under way may read it: named, in the simulator and under ``checked``."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_ds import comm

SIZE = 8


def add(x: Tensor) -> None:
    x.add_(1)


def data(x: Tensor) -> None:
    x.data.add_(1)  # torch does not count it


def numpy(x: Tensor) -> None:
    x.numpy()[:] += 1


def alias(x: Tensor) -> None:
    x.view(2, -1)[1, 0] = 7


WRITES = [add, data, numpy, alias]
CALLS: dict[str, Callable[[Tensor], Any]] = {
    "all_reduce": lambda x: comm.start(comm.all_reduce, x),
    "all_gather": lambda x: comm.start(comm.all_gather, x),
    "reduce_scatter": lambda x: comm.start(comm.reduce_scatter, x),
    "all_to_all": lambda x: comm.start(comm.all_to_all, x),
    "broadcast": lambda x: comm.start(comm.broadcast, x, 0),
    "send": lambda x: comm.start(comm.send, x, 1) if comm.world().rank == 0 else comm.start(comm.recv, x, 0),
    "a tree": lambda x: comm.start(comm.all_reduce, {"a": torch.ones(3), "b": x}),
    "compressed": lambda x: comm.start(comm.codecs.compressed(comm.all_reduce, comm.codecs.Cast(torch.bfloat16)), x),
}
NAMED = r"rank 0 wrote into input.* of .*: started at test_written.py:\d+, written before the wait at test_written.py:\d+"


def program(call: str, write: Callable[[Tensor], None], late: bool = False) -> None:
    x = torch.arange(float(SIZE))
    pending = CALLS[call](x)
    if comm.world().rank == 0 and not late:
        write(x)
    pending.wait()
    write(x)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("call", sorted(set(CALLS) - {"compressed"}))
def test_the_simulator_names_both_lines(call: str, write: Callable[[Tensor], None]) -> None:
    with pytest.raises(comm.errors.WrittenError, match=NAMED):
        comm.simulate(program, call, write, world_size=2)


@pytest.mark.parametrize("call", sorted(CALLS))
def test_after_the_wait_anybody_may_write(call: str) -> None:
    comm.simulate(program, call, add, True, world_size=2)


def named(call: str, how: str) -> None:
    """Whether a write is named; a late one, or a receiver's, is not."""
    if how == "late":
        test_who_receives_may_write_into_what_told_the_shape(call)
        return
    try:
        comm.simulate(program, call, {write.__name__: write for write in WRITES}[how], world_size=2)
    except comm.errors.WrittenError:
        return
    raise AssertionError


@pytest.mark.parametrize("call", ["broadcast", "send"])
def test_who_receives_may_write_into_what_told_the_shape(call: str) -> None:
    def receiver() -> None:
        x = torch.zeros(SIZE)
        pending = CALLS[call](x)
        if comm.world().rank == 1:
            x += 1
        pending.wait()

    comm.simulate(receiver, world_size=2)


def test_a_codec_has_copied_what_it_sends() -> None:
    comm.simulate(program, "compressed", add, world_size=2)


def test_the_lines_are_the_programs() -> None:
    with pytest.raises(comm.errors.WrittenError) as caught:
        comm.simulate(program, "all_reduce", add, world_size=2)
    first = program.__code__.co_firstlineno
    start, end = map(int, re.findall(r"test_written.py:(\d+)", str(caught.value)))
    assert end == first + 5
    assert start == CALLS["all_reduce"].__code__.co_firstlineno


def test_explore_names_it() -> None:
    with pytest.raises(comm.errors.WrittenError, match=NAMED):
        comm.debug.explore(program, "all_gather", data, world_size=2, seeds=3)


def test_inference_tensors_are_watched() -> None:
    def inferred() -> None:
        with torch.inference_mode():
            program("all_reduce", add)

    with pytest.raises(comm.errors.WrittenError, match=NAMED):
        comm.simulate(inferred, world_size=2)


def checked(call: str, write: Callable[[Tensor], None]) -> str:
    try:
        with comm.debug.checked():
            program(call, write)
    except comm.errors.WrittenError as error:
        return str(error)
    return ""


def everything() -> list[str]:
    return [checked(call, write) for call in ("all_reduce", "send") for write in (add, data)]


def test_checked_names_it_on_processes() -> None:
    first, second = comm.spawn(everything, world_size=2)
    assert all(re.search(NAMED, text) for text in first)
    assert second == [""] * 4
