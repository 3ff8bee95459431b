"""Records the operations that build a module, on tensors without values, and replays them for one tensor at a time.

The record is of operations below autograd, by storage: views need no entry, since a tensor is a storage and a layout in it. A
random operation runs once for its draws, and the generator's state before it is kept, so it draws the same again in any replay.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.torch_private import FakeTensor, TorchDispatchMode, schema_of, storage_id, unset_fake_temporarily
from functional_ds.remat.operator_arguments import tensors_written

_OVERWRITES = frozenset(
    {"normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "exponential_", "bernoulli_", "log_normal_"}
)
_LOOKS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


@attrs.frozen
class Place:
    """A tensor without values: a storage, by number, and the tensor's layout in it."""

    storage: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def within(self, storages: Mapping[int, torch.UntypedStorage]) -> Tensor:
        """The tensor, in a storage with values."""
        return torch.empty(0, dtype=self.dtype).set_(storages[self.storage], self.offset, self.shape, self.stride)

    @property
    def fills(self) -> int:
        """Bytes of its elements, if no two of them share memory."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@attrs.frozen(eq=False)
class _RecordedOp:
    """One operation: its arguments with places for tensors, and the generator's state if it draws.

    Attributes:
        function: the operator.
        arguments: with places for tensors.
        reads: the storages of its arguments.
        writes: those that it changes.
        makes: its outputs in new storages, None for others.
        whole: storages that it overwrites completely.
    """

    function: Any
    arguments: Any
    reads: frozenset[int]
    writes: frozenset[int]
    makes: tuple[Place | None, ...]
    whole: frozenset[int]
    state: Tensor | None


class Initialisation(TorchDispatchMode):
    """Records everything done to fake tensors (torch's own, which report the CPU as their device) while this mode is on.

    Law: ``compute(place)`` is bitwise what the tensor would be if everything had been done for real.

    Random numbers come from CPU generators, which end in the same state: random operations run on scratch memory of the size of
    their tensors. If the program reads a value, as in rejection sampling, that value is computed immediately.

    Raises:
        RuntimeError: an operation names another device than the CPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self._entries: list[_RecordedOp] = []
        self._numbers: dict[int, int] = {}  # a storage's address -> its number
        self._kept: list[torch.UntypedStorage] = []  # so that no address is used twice
        self._touched: dict[int, list[int]] = defaultdict(list)  # a storage -> the entries that make or change it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        _refuse_devices(func, (args, kwargs))
        if _LOOKS & set(func.tags):
            return self._look(func, args, kwargs)
        state = self._draw(func, args, kwargs) if torch.Tag.nondeterministic_seeded in func.tags else None
        reads = [self.place(x) for x in tree.leaves((args, kwargs)) if isinstance(x, FakeTensor)]
        if "generator" in kwargs:
            kwargs["generator"] = None  # it draws by the default one, in this one's state
        arguments = tree.map(self._noted, (args, kwargs))
        changed = [self.place(x) for x in tensors_written(func, args, kwargs) if isinstance(x, FakeTensor)]
        known = len(self._kept)
        output = func(*args, **kwargs)
        outputs = [self.place(x) if isinstance(x, FakeTensor) else None for x in tree.leaves(output)]
        makes = tuple(place if place is not None and place.storage >= known else None for place in outputs)
        self._note(func, arguments, reads, changed, makes, state)
        return output

    def place(self, tensor: Tensor) -> Place:
        """The place of a fake tensor."""
        storage = tensor.untyped_storage()
        if storage_id(storage) not in self._numbers:
            self._numbers[storage_id(storage)] = len(self._kept)
            self._kept.append(storage)
        number = self._numbers[storage_id(storage)]
        return Place(number, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    def compute(self, place: Place) -> Tensor:
        """The values of one tensor; needs memory for it and for what it is made of.

        Raises:
            RuntimeError: the tensor was not made while this mode was on.
        """
        storages: dict[int, torch.UntypedStorage] = {}
        with torch.no_grad():
            for index in self._needed(place.storage):
                self._again(self._entries[index], storages)
        if place.storage not in storages:
            raise RuntimeError(
                f"a tensor of shape {list(place.shape)} was not made by torch's operations while they were recorded"
            )
        return place.within(storages)

    def operations(self, place: Place) -> Iterator[tuple[Any, Any, Tensor | None]]:
        """The operations that make a tensor: operators, their arguments with places for tensors, and generator states."""
        for index in self._needed(place.storage):
            entry = self._entries[index]
            yield entry.function, entry.arguments, entry.state

    # -- recording -----------------------------------------------------------------------------------------------------

    def _noted(self, value: Any) -> Any:
        """An argument as it is recorded: places for fake tensors, copies of others."""
        if not isinstance(value, Tensor):
            return value
        with unset_fake_temporarily():
            return self.place(value) if isinstance(value, FakeTensor) else value.detach().clone()

    def _note(
        self, func: Any, arguments: Any, reads: list[Place], changed: list[Place], makes: tuple[Any, ...], state: Tensor | None
    ) -> None:
        if not changed and not any(makes):
            return  # a view, or a question about shapes
        whole = {place.storage for place in makes if place is not None}
        if schema_of(func).name.rpartition("::")[2] in _OVERWRITES:
            filled = [p for p in changed if p.offset == 0 and p.fills >= self._kept[p.storage].nbytes()]
            whole |= {p.storage for p in filled if [x.storage for x in reads].count(p.storage) == 1}  # w.copy_(w) reads w
        writes = frozenset(place.storage for place in changed)
        entry = _RecordedOp(func, arguments, frozenset(p.storage for p in reads), writes, makes, frozenset(whole), state)
        for storage in entry.writes | whole:
            self._touched[storage].append(len(self._entries))
        self._entries.append(entry)

    def _draw(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """Runs a random operation on scratch memory, which advances the generator. Returns its state before."""
        generator = kwargs.get("generator") or torch.default_generator
        places = [self.place(x) for x in tree.leaves((args, kwargs)) if isinstance(x, FakeTensor)]
        sizes = {place.storage: self._kept[place.storage].nbytes() for place in places}
        with unset_fake_temporarily(), torch.no_grad():
            state: Tensor = generator.get_state()
            zeros = {key: torch.zeros(size, dtype=torch.uint8).untyped_storage() for key, size in sizes.items()}
            args, kwargs = tree.map(lambda x: self._in(x, zeros), (args, kwargs))
            func(*args, **kwargs)
        return state

    def _look(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation whose result the program, or a shape, depends on, for real."""
        with unset_fake_temporarily(), torch.no_grad():
            places = [self.place(x) for x in tree.leaves((args, kwargs)) if isinstance(x, FakeTensor)]
            storages = {place.storage: self.compute(place).untyped_storage() for place in places}
            args, kwargs = tree.map(lambda x: self._in(x, storages), (args, kwargs))
            output = func(*args, **kwargs)
        with self:  # what comes of it has values: it is taken in as those
            return tree.map(lambda x: torch.ops.aten.lift_fresh(x) if isinstance(x, Tensor) else x, output)

    def _in(self, value: Any, storages: Mapping[int, torch.UntypedStorage]) -> Any:
        return self.place(value).within(storages) if isinstance(value, FakeTensor) else value

    # -- computing -----------------------------------------------------------------------------------------------------

    def _needed(self, storage: int) -> list[int]:
        """The entries that the storage's values depend on, in order."""
        needed: set[int] = set()
        asked: set[tuple[int, int]] = set()
        todo = [(storage, len(self._entries))]
        while todo:
            wanted, end = todo.pop()
            if (wanted, end) in asked:
                continue
            asked.add((wanted, end))
            for index in reversed([i for i in self._touched[wanted] if i < end]):
                entry = self._entries[index]
                needed.add(index)
                todo += [(other, index) for other in entry.reads if other not in entry.whole]
                if wanted in entry.whole:
                    maker = self._touched[wanted][0]  # what is overwritten must be there to be written to
                    needed.add(maker)
                    todo += [(other, maker) for other in self._entries[maker].reads]
                    break
        return sorted(needed)

    def _again(self, entry: _RecordedOp, storages: dict[int, torch.UntypedStorage]) -> None:
        args, kwargs = tree.map(lambda x: x.within(storages) if isinstance(x, Place) else x, entry.arguments)
        if entry.state is None:
            outputs = entry.function(*args, **kwargs)
        else:
            now = torch.default_generator.get_state()
            torch.default_generator.set_state(entry.state)
            try:
                outputs = entry.function(*args, **kwargs)
            finally:
                torch.default_generator.set_state(now)
        for place, result in zip(entry.makes, tree.leaves(outputs), strict=True):
            if place is not None:
                _check(place, result, entry.function)
                storages[place.storage] = result.untyped_storage()


def _refuse_devices(function: Any, arguments: Any) -> None:
    for value in tree.leaves(arguments):
        device = value.device if isinstance(value, Tensor) else value
        if isinstance(device, torch.device) and device.type != "cpu":
            raise RuntimeError(f"{function} on {device}: only what is done on the CPU can be recorded; leave the device out")


def _check(place: Place, result: Tensor, function: Any) -> None:
    if (result.storage_offset(), tuple(result.shape), result.stride()) != (place.offset, place.shape, place.stride):
        raise RuntimeError(
            f"{function} lays a tensor of shape {list(place.shape)} out in another way than it does without values"
        )
