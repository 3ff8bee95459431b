"""Checksums of values on the ranks of a group."""

from collections.abc import Sequence

from functional_ds.comm.record.group import Group

from .op_trace import OpTrace, TracedEvent


def input_key(event: TracedEvent, place: int) -> int:
    """A key that identifies an input of an event on all ranks."""
    return hash((event.key, "input", place))


class GroupBits:
    """The checksums of values on the ranks of a group, by key."""

    def __init__(self, group: Group, traces: Sequence[OpTrace]) -> None:
        self.group = group
        self.by_key: dict[int, list[tuple[int, int]]] = {}
        for rank in group.ranks:
            for value in traces[rank].values:
                if value.bits is not None:
                    self.by_key.setdefault(value.key, []).append((rank, value.bits))
            for event in traces[rank].events:
                for place, number in enumerate(event.inputs if event.key else ()):
                    bits = traces[rank].values[number].bits
                    if bits is not None:
                        self.by_key.setdefault(input_key(event, place), []).append((rank, bits))

    def differ(self, key: int) -> str:
        """Two ranks with different bits, as text; empty if there are none."""
        pairs = self.by_key.get(key, [])
        for rank, bits in pairs:
            if bits != pairs[0][1]:
                return f"ranks {pairs[0][0]} and {rank}"
        return ""

    def some(self, key: int) -> list[int]:
        """The ranks that have bits for the key, if not all have."""
        pairs = self.by_key.get(key, [])
        return [rank for rank, _ in pairs] if len(pairs) < self.group.size else []
