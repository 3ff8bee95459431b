"""Races, early frees and waits of the host, each with the lines that made it; and what is none."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from functional_ds.testing import SimulatedGpu, simulated_cuda


def found(program: Callable[[Tensor, torch.cuda.Stream], object]) -> list[str]:
    """What a program finds with a tensor and a side stream."""
    with simulated_cuda(check=False) as gpu:
        x, side = torch.zeros(4, device="cuda"), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        program(x, side)
        return [each.kind for each in gpu.findings]


def on_side(x: Tensor, side: torch.cuda.Stream) -> Tensor:
    """Reads on the side stream."""
    with torch.cuda.stream(side):
        return x + 1


def unordered_write(x: Tensor, side: torch.cuda.Stream) -> None:
    y = on_side(x, side)
    x.add_(1)
    side.synchronize()
    del y


def unordered_read(x: Tensor, side: torch.cuda.Stream) -> None:
    with torch.cuda.stream(side):
        x.add_(1)
    x.sum()
    side.synchronize()


def event(x: Tensor, side: torch.cuda.Stream) -> None:
    with torch.cuda.stream(side):
        x.add_(1)
        done = side.record_event()
    torch.cuda.current_stream().wait_event(done)
    x.sum()


def early_event(x: Tensor, side: torch.cuda.Stream) -> None:
    with torch.cuda.stream(side):
        done = side.record_event()
        x.add_(1)
    done.wait()
    x.sum()
    side.synchronize()


def parts(x: Tensor, side: torch.cuda.Stream) -> None:
    with torch.cuda.stream(side):
        x[:2].add_(1)
    x[2:].add_(1)
    side.synchronize()


def freed(x: Tensor, side: torch.cuda.Stream) -> None:
    y = x * 2
    side.wait_stream(torch.cuda.current_stream())
    on_side(y, side)
    del y
    side.synchronize()


def recorded(x: Tensor, side: torch.cuda.Stream) -> None:
    y = x * 2
    side.wait_stream(torch.cuda.current_stream())
    on_side(y, side)
    y.record_stream(side)
    del y
    side.synchronize()


def waited_for(x: Tensor, side: torch.cuda.Stream) -> None:
    y = x * 2
    side.wait_stream(torch.cuda.current_stream())
    on_side(y, side)
    torch.cuda.current_stream().wait_stream(side)
    del y


def host_reads(x: Tensor, side: torch.cuda.Stream) -> None:
    host = torch.empty(4, pin_memory=True)
    host.copy_(x, non_blocking=True)
    host.sum()


def host_writes(x: Tensor, side: torch.cuda.Stream) -> None:
    host = torch.ones(4).pin_memory()
    x.copy_(host, non_blocking=True)
    host.zero_()


def host_waits(x: Tensor, side: torch.cuda.Stream) -> None:
    host = torch.empty(4, pin_memory=True)
    host.copy_(x, non_blocking=True)
    torch.cuda.synchronize()
    host.numpy().sum()


@pytest.mark.parametrize(
    ("program", "kinds"),
    [
        (unordered_write, ["race"]),
        (unordered_read, ["race"]),
        (event, []),
        (early_event, ["race"]),
        (parts, []),
        (freed, ["early free"]),
        (recorded, []),
        (waited_for, []),
        (host_reads, ["race"]),
        (host_writes, ["race"]),
        (host_waits, []),
        (lambda x, side: x.sum().item(), ["host sync"]),
        (lambda x, side: bool(x.any()), ["host sync"]),
        (lambda x, side: x.tolist(), ["host sync"]),
        (lambda x, side: x.cpu(), ["host sync"]),
        (lambda x, side: x.nonzero(), ["host sync"]),
        (lambda x, side: x[x > 0], ["host sync"]),
        (lambda x, side: torch.ones(4).cuda(), ["host sync"]),
        (lambda x, side: torch.ones(4).cuda(non_blocking=True), []),
        (lambda x, side: torch.ones(2**15).cuda(non_blocking=True), ["host sync"]),
        (lambda x, side: torch.ones(4).pin_memory().cuda(non_blocking=True), []),
        (lambda x, side: x.mul_(torch.tensor(2.0)), []),
        (lambda x, side: x.__setitem__(0, 5.0), []),
        (lambda x, side: torch.full((2,), 3.0, device="cuda"), []),
    ],
)
def test_what_is_found(program: Callable[[Tensor, torch.cuda.Stream], object], kinds: list[str]) -> None:
    assert found(program) == kinds


def line_of(function: Callable[..., object], text: str) -> int:
    """The line of this file that has the text in a function."""
    import inspect

    source, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(source) if text in line)


def test_a_race_names_both_lines_and_what_would_do() -> None:
    with simulated_cuda(check=False) as gpu:
        x, side = torch.zeros(4, device="cuda"), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        unordered_write(x, side)
        (race,) = gpu.races
    assert race.text == (
        f"add_ on the default stream writes float32[4], which add on stream {side.id} may still read: the default stream must "
        "wait for an event after it, or for its stream"
    )
    assert race.first is not None
    assert race.first.file == race.second.file == __file__
    assert (race.first.line, race.second.line) == (line_of(on_side, "x + 1"), line_of(unordered_write, "add_(1)"))
    assert f"test_findings.py:{race.second.line}" in str(race)


def raced(error: Exception | None = None) -> None:
    """A program with a race, which may end with an error of its own."""
    with simulated_cuda():
        x, side = torch.zeros(4, device="cuda"), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        unordered_write(x, side)
        if error is not None:
            raise error


def test_the_end_of_the_block_raises() -> None:
    with pytest.raises(AssertionError, match=r"(?s)1 findings on the simulated device\nrace: add_ on .*test_findings\.py:\d+"):
        raced()


def test_waits_of_the_host_are_no_fault_unless_asked() -> None:
    def waits() -> SimulatedGpu:
        with simulated_cuda() as gpu:
            torch.ones(2, device="cuda").sum().item()
            torch.cuda.synchronize()
        return gpu

    gpu = waits()
    assert [what for what, _ in gpu.waits] == ["torch.cuda.synchronize"]
    with pytest.raises(AssertionError, match="_local_scalar_dense lets the host wait for the default stream"):
        gpu.check(host_syncs=True)
    gpu.clear()
    gpu.check(host_syncs=True)


def test_an_error_of_the_program_is_not_covered() -> None:
    with pytest.raises(KeyError, match="own"):
        raced(KeyError("own"))
