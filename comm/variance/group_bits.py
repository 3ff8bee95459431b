"""Checksums of values on the ranks of a group."""

from collections.abc import Sequence

from .op_trace import OpTrace
from .programs import TracedProgram


class GroupBits:
    """The checksums of values on the ranks of a group, by key."""

    def __init__(self, ranks: Sequence[int], programs: Sequence[TracedProgram], traces: Sequence[OpTrace]) -> None:
        self.n_ranks = len(ranks)
        self.by_key: dict[int, list[tuple[int, int]]] = {}
        for rank in ranks:
            program, bits = programs[rank], traces[rank].bits
            for key, value in zip(program.keys, bits, strict=True):
                self._add(key, rank, value)
            for event, keys in zip(program.trace.events, program.input_keys, strict=True):
                for place, key in enumerate(keys):
                    self._add(key, rank, bits[event.inputs[place]])

    def _add(self, key: int, rank: int, bits: int | None) -> None:
        if bits is not None:
            self.by_key.setdefault(key, []).append((rank, bits))

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
        return [rank for rank, _ in pairs] if len(pairs) < self.n_ranks else []
