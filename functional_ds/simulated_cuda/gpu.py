"""A simulated device: its memory, its launched work, and its findings."""

import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from functional_ds.base.torch_private import disable_torch_function, storage_id
from functional_ds.base.tree import setting, summary

from .findings import Findings, Site, here, is_programs
from .streams import Clock, SimulatedStream

DEVICE, HOST = torch.device("cuda", 0), torch.device("cpu")
_TIMES = itertools.count(1)  # of all devices: a thread's streams may outlive one
_MARK = "_fds_simulated_gpu"  # the attribute of a tensor without memory that says it is on the device


@attrs.frozen
class Access:
    """A read or a write of memory by work on a stream; ``time`` numbers the stream's work."""

    stream: SimulatedStream
    time: int
    what: str
    site: Site

    def over(self, *clocks: Clock) -> bool:
        """Whether one of the clocks knows that it is over."""
        return any(clock.get(self.stream.id, 0) >= self.time for clock in clocks)


@attrs.frozen(eq=False)
class Touch:
    """An access to the bytes ``start`` to ``stop`` of a storage."""

    access: Access
    start: int
    stop: int
    write: bool

    def covers(self, other: "Touch") -> bool:
        """Whether waiting for this implies waiting for the other: it follows the other, with no fewer bytes."""
        inside = self.start <= other.start and other.stop <= self.stop
        return inside and (self.write or (not other.write and self.access.stream is other.access.stream))

    def conflicts(self, other: "Touch") -> bool:
        """Whether it must follow the other."""
        return (self.write or other.write) and self.start < other.stop and other.start < self.stop


@attrs.define(eq=False)
class SimulatedMemory:
    """A storage on the device, or a pinned one on the host.

    Attributes:
        text: dtype and shape, for messages.
        nbytes: its size on the device.
        device: whether it is on the device.
        home: the stream that it was allocated for.
        touches: the accesses that later ones may have to follow.
        uses: for each stream, the last access.
        recorded: streams for which the allocator keeps it, by ``record_stream``.
    """

    text: str
    nbytes: int
    device: bool
    home: SimulatedStream
    touches: list[Touch] = attrs.field(factory=list)
    uses: dict[int, Access] = attrs.field(factory=dict)
    recorded: set[int] = attrs.field(factory=set)
    ref: Any = None

    def touch(self, touch: Touch) -> list[Touch]:
        """Records an access; returns the earlier ones that it must follow and does not."""
        clock = touch.access.stream.clock
        conflicts = [earlier for earlier in self.touches if touch.conflicts(earlier) and not earlier.access.over(clock)]
        self.touches = [earlier for earlier in self.touches if not touch.covers(earlier)]
        self.touches.append(touch)
        self.uses[touch.access.stream.id] = touch.access
        return conflicts

    @property
    def written(self) -> Access | None:
        """The last write."""
        return next((touch.access for touch in reversed(self.touches) if touch.write), None)


@attrs.define(eq=False, repr=False)
class SimulatedGpu(Findings):
    """The simulated device of one thread, which is one rank.

    Attributes:
        stream: the current stream.
        default: the default stream.
        host: the host, as a stream whose work is done immediately.
        streams: all others.
        random: the state of the device's random generator.
        moves_to_host: whether modules are being moved to the host, with their tensors.
        intent: whether the memory that a torch function allocates is on the device; None outside of one.
        function: the frame that called this torch function.
        assigns: whether it runs within ``x[i] = value``.
        allocated: bytes on the device.
        peak: the most so far.
    """

    stream: SimulatedStream = attrs.field(init=False)
    default: SimulatedStream = attrs.field(factory=lambda: SimulatedStream(name="the default stream"))
    host: SimulatedStream = attrs.field(factory=lambda: SimulatedStream(name="the host"))
    streams: "weakref.WeakSet[SimulatedStream]" = attrs.field(factory=weakref.WeakSet)
    random: Tensor = attrs.field(factory=lambda: torch.Generator().manual_seed(0).get_state())
    moves_to_host: bool = False
    intent: bool | None = None
    function: FrameType | None = None
    assigns: bool = False
    allocated: int = 0
    peak: int = 0
    _memory: dict[int, SimulatedMemory] = attrs.field(factory=dict)
    _messages: dict[Access, tuple[Sequence[Tensor], Callable[[], Any]]] = attrs.field(factory=dict)
    _communicators: dict[Any, SimulatedStream] = attrs.field(factory=dict)
    _paused: bool = False

    def __attrs_post_init__(self) -> None:
        self.stream = self.default

    # -- memory ----------------------------------------------------------------------------------------------------------

    def memory_of(self, tensor: Tensor) -> SimulatedMemory | None:
        """The record of a tensor's memory; None for plain host memory, and for a tensor that has none."""
        if has_own_dispatch(tensor):
            return None
        with disable_torch_function():
            return self._memory.get(storage_id(tensor)) if tensor.layout is torch.strided else None

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the device."""
        if self._paused:
            return False
        if has_own_dispatch(tensor):
            return _MARK in tensor.__dict__
        memory = self.memory_of(tensor)
        return memory is not None and memory.device

    def put(self, tensor: Tensor, *, device: bool = True) -> SimulatedMemory | None:
        """Registers a tensor's new memory: on the device, else as pinned."""
        if has_own_dispatch(tensor):
            tensor.__dict__[_MARK] = True
            return None
        if tensor.layout is not torch.strided:
            raise NotImplementedError(f"the simulated device has dense tensors only, not {tensor.layout}")
        with disable_torch_function():
            key, storage = storage_id(tensor), tensor.untyped_storage()
        home = self.stream if device else self.host
        text, nbytes = summary(tensor), storage.nbytes() if device else 0
        memory = self._memory[key] = SimulatedMemory(text, nbytes, device, home)
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)
        gpu_ref = weakref.ref(self)

        def freed(_: Any) -> None:
            if (gpu := gpu_ref()) is not None and gpu._memory.get(key) is memory:
                gpu._freed(gpu._memory.pop(key))

        memory.ref = weakref.ref(storage, freed)
        return memory

    def _freed(self, memory: SimulatedMemory) -> None:
        self.allocated -= memory.nbytes
        for use in memory.uses.values():
            safe = use.stream is memory.home or use.stream.id in memory.recorded or not memory.device
            if not safe and not use.over(memory.home.clock, self.host.clock):
                self.report(
                    "early free",
                    f"{memory.text} of {memory.home.name} is freed while {use.what} on {use.stream.name} may still use it: "
                    f"call record_stream(that stream), or let {memory.home.name} wait for it first",
                    use.site,
                )

    # -- work ------------------------------------------------------------------------------------------------------------

    def launch(
        self, what: str, reads: Iterable[Tensor], writes: Iterable[Tensor], stream: SimulatedStream | None = None
    ) -> Access:
        """Work on a stream, by default the current one, that reads and writes these tensors' memory."""
        access = self.begin(what, stream or self.stream)
        seen: set[tuple[int, int, int]] = set()
        for write, tensors in ((True, writes), (False, reads)):
            for tensor in tensors:
                if (memory := self.memory_of(tensor)) is not None:
                    start, stop = _extent(tensor)
                    if (id(memory), start, stop) not in seen:
                        self.note(memory, Touch(access, start, stop, write))
                        seen.add((id(memory), start, stop))
        return access

    def begin(self, what: str, stream: SimulatedStream) -> Access:
        """New work on a stream."""
        self.streams.add(stream)
        stream.clock.join(self.host.clock)  # work is launched after what the host has done and waited for
        stream.clock[stream.id] = time = next(_TIMES)
        return Access(stream, time, what, here())

    def note(self, memory: SimulatedMemory, touch: Touch) -> None:
        """An access by work that has begun; reports a race with any earlier one."""
        access = touch.access
        for earlier in memory.touch(touch):
            one = earlier.access
            self.report(
                "race",
                f"{access.what} on {access.stream.name} {'writes' if touch.write else 'reads'} {memory.text}, which {one.what} "
                f"on {one.stream.name} may still {'write' if earlier.write else 'read'}: {access.stream.name} must wait for an "
                "event after it, or for its stream",
                one.site,
                access.site,
            )
            access.stream.clock.join(Clock({one.stream.id: one.time}))  # a missing wait is one finding

    # -- waits of the host -----------------------------------------------------------------------------------------------

    def wait_for(self, clock: Clock, what: str) -> None:
        """The program makes the host wait."""
        self.waits.append((what, here()))
        self._reach(clock)

    def _reach(self, clock: Clock) -> None:
        """The host has waited."""
        self.host.clock.join(clock)
        for access in [access for access in self._messages if access.over(self.host.clock)]:
            self.finish(access)

    def keep(self, access: Access, tensors: Sequence[Tensor], wait: Callable[[], Any]) -> None:
        """Holds the tensors of a collective until it is waited for."""
        self._messages[access] = (tensors, wait)

    def finish(self, access: Access) -> None:
        """Waits until a collective has finished."""
        _, wait = self._messages.pop(access, ((), lambda: None))
        with self.paused():
            wait()

    def communicator(self, key: Any, name: str) -> SimulatedStream:
        """The stream of a communicator, made when it is first used."""
        if key not in self._communicators:
            self._communicators[key] = SimulatedStream(name=f"NCCL's stream of {name!r}")
        return self._communicators[key]

    def synchronize(self, _: Any = None) -> None:
        """Replaces ``torch.cuda.synchronize``."""
        everything = Clock()
        for stream in self.streams:
            everything.join(stream.clock)
        self.wait_for(everything, "torch.cuda.synchronize")

    def block(self, what: str, tensor: Tensor | None) -> None:
        """An operation makes the host wait for the current stream, which the program did not request."""
        memory = None if tensor is None else self.memory_of(tensor)
        made = None if memory is None else memory.written
        source = f", computed by {made.what} on {made.stream.name}" if made else ""
        self.report("host sync", f"{what} lets the host wait for {self.stream.name}{source}", made.site if made else None)
        self._reach(self.stream.clock)

    def paused(self) -> AbstractContextManager[None]:
        """A context in which nothing is recorded, and all tensors are the host's."""
        return setting(self, _paused=True)

    def reset_peak(self, _: Any = None) -> None:
        """Replaces ``torch.cuda.reset_peak_memory_stats``."""
        self.peak = self.allocated

    @property
    def active(self) -> bool:
        """Whether this thread's work is recorded."""
        return not self._paused

    @contextmanager
    def intending(self, device: bool | None, *, assigns: bool = False) -> Iterator[None]:
        """A context in which new memory is on the device, or on the host."""
        before = self.intent, self.function, self.assigns
        self.intent, self.function, self.assigns = device, sys._getframe(2), assigns
        try:
            yield
        finally:
            self.intent, self.function, self.assigns = before

    @property
    def intended(self) -> bool | None:
        """The intent of the torch function that is computing; None in a hook or mode that runs within it."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self.function:
            if is_programs(frame):
                return None
            frame = frame.f_back
        return self.intent

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """A context in which torch's default generator is the device's."""
        before = torch.default_generator.get_state()
        torch.default_generator.set_state(self.random)
        try:
            yield
        finally:
            self.random = torch.default_generator.get_state()
            torch.default_generator.set_state(before)

    def __repr__(self) -> str:
        return f"SimulatedGpu({len(self._memory)} storages, {len(self.findings)} findings)"


def has_own_dispatch(tensor: Tensor) -> bool:
    """Whether a tensor's type executes operators itself, and may have no memory."""
    cls = type(tensor)
    return cls is not Tensor and cls is not nn.Parameter and cls.__torch_dispatch__ is not Tensor.__torch_dispatch__


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor spans, including gaps between its rows."""
    if not tensor.numel():
        return 0, 0
    with disable_torch_function():
        start, size = int(tensor.storage_offset()), tensor.element_size()
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start * size, (start + last + 1) * size


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
