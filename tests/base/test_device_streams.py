"""Copies between a device and the host: the same values, in memory of their own."""

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given

from functional_ds.base.device_streams import CopyStream
from functional_ds.testing import DTYPES, Leaf, assert_same, leaves, seeds

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.mark.parametrize("device", DEVICES)
@given(leaf=leaves(DTYPES), seed=seeds())
def test_to_the_host_and_back_is_the_tensor(device: str, leaf: Leaf, seed: int) -> None:
    """``to_device(to_host(x)).wait() = x``, bitwise; the host's copy is not the tensor's memory."""
    tensor = leaf.fill(seed).to(device)
    stream = CopyStream(tensor.device)
    host = stream.to_host(tensor)
    stream.hold_device()
    tensor.zero_()
    again = stream.to_device(host).wait()
    assert (host.device.type, again.device) == ("cpu", tensor.device)
    assert_same(again.cpu(), leaf.fill(seed))


@pytest.mark.parametrize("device", DEVICES)
def test_copies_are_ordered(device: str) -> None:
    """Copies follow the device's work before ``wait_for_device``, each other, and precede its work after ``hold_device``."""
    first, second = CopyStream(torch.device(device)), CopyStream(torch.device(device))
    value = torch.zeros(1000, device=device)
    host, back = torch.empty(1000, pin_memory=first.overlaps), torch.empty(1000, device=device)
    for _ in range(3):
        value += 1
        first.wait_for_device()
        copied = first.copy([(host, value)])
        second.copy([(back, host)], after=copied)
        second.hold_device()
        value += back  # doubles
    assert first.overlaps == (device == "cuda")
    assert (value == 14).all()


def test_cuda_streams_wait_for_each_other() -> None:
    """Which stream waits for what, told by stand-ins for CUDA's streams; the values are copied in the order of the pairs."""
    events: list[str] = []

    class Stream:
        def __init__(self, name: Any) -> None:
            self.name = "copies" if isinstance(name, torch.device) else name

        def wait_stream(self, other: "Stream") -> None:
            events.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event: str) -> None:
            events.append(f"{self.name} waits for {event}")

        def record_event(self) -> str:
            events.append(f"{self.name} records")
            return "the copies"

    value, first, second = torch.ones(2), torch.zeros(2), torch.zeros(2)
    fakes = {"Stream": Stream, "current_stream": lambda device: Stream("the device"), "stream": nullcontext}
    with mock.patch.multiple(torch.cuda, **fakes):
        stream = CopyStream(torch.device("cuda"))
        stream.wait_for_device()
        assert stream.copy([(first, value), (second, first)], after="an event") == "the copies"
        stream.hold_device()
    assert_same([first, second], [value, value])
    expected = ["copies waits for the device", "copies waits for an event", "copies records", "the device waits for copies"]
    assert events == expected
