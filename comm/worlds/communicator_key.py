"""The key of the NCCL communicator for a call."""

import hashlib
from typing import cast

import attrs

from functional_ds.comm.record.group import Group
from functional_ds.comm.table.collective import Call


@attrs.frozen(order=True)
class CommunicatorKey:
    """Identifies a communicator on all its ranks, independent of the other communicators of each rank.

    A group has one communicator for its collectives, and one for each pair of ranks, direction and tag of its messages: NCCL
    has no tags and a communicator runs its work in order, so opposing messages on one would deadlock. Ranks create
    communicators in the order of their keys, so that they cannot wait for each other in a cycle.

    Attributes:
        ends: its ranks in ascending order.
        group: the ranks of the group, in the group's order.
        name: the group's name.
        tag: the tag of the messages; -1 for collectives.
        messages: whether it is for messages.
        ranks: its ranks, as ranks of the world, in order; for messages (source, destination).
    """

    ends: tuple[int, ...]
    group: tuple[int, ...]
    name: str
    messages: bool
    tag: int
    ranks: tuple[int, ...]

    @staticmethod
    def of(call: Call, group: Group) -> "CommunicatorKey":
        """The communicator of a call on a group."""
        if not call.collective.is_message:
            return CommunicatorKey(tuple(sorted(group.ranks)), group.ranks, group.name, False, -1, group.ranks)
        src, dst, tag = cast(tuple[int, int, int], call.collective.order(call.options))
        return CommunicatorKey.between(group, src, dst, tag)

    @staticmethod
    def between(group: Group, src: int, dst: int, tag: int) -> "CommunicatorKey":
        """The communicator of messages from one rank of a group to another with a tag."""
        ranks = group.ranks[src], group.ranks[dst]
        return CommunicatorKey(tuple(sorted(ranks)), group.ranks, group.name, True, tag, ranks)

    def connected_together(self) -> "list[CommunicatorKey]":
        """The communicators to create when this one is first used: for messages both directions, as either may come first."""
        if not self.messages:
            return [self]
        return sorted([self, attrs.evolve(self, ranks=self.ranks[::-1])])

    def digest(self) -> str:
        """A hash, equal on all ranks."""
        return hashlib.sha1(repr(attrs.astuple(self)).encode(), usedforsecurity=False).hexdigest()
