"""Compares the declared values of all ranks bitwise."""

from collections.abc import Hashable, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from functional_ds.base.tree import summary
from functional_ds.comm.record.group import Group
from functional_ds.comm.table.collective import Variance

_ADVICE = {
    Variance.INVARIANT: "each rank has gradients of its own use alone: put comm.copy_to before that use, which sums them, or "
    "declare it replicated and sum its gradient yourself",
    Variance.PARTIAL: "the terms of one sum have one gradient: use the sum, as comm.reduce_from returns it",
}


@attrs.frozen(eq=False)
class Claim:
    """A rank's declaration of leaves.

    Attributes:
        variance: their declared variance along the group.
        group: the ranks.
        names: the leaves' paths.
        leaves: copies of them, or of their gradients.
        site: the file and line of the declaration.
        index: the number of events that the rank had traced before.
        distinct: whether the bits must differ between any two ranks.
        gradient: whether ``leaves`` are gradients.
    """

    variance: Variance
    group: Group
    names: Sequence[str]
    leaves: Sequence[Tensor]
    site: str
    index: int
    distinct: bool = False
    gradient: bool = False

    @property
    def equal(self) -> bool:
        """Whether the ranks' leaves must have equal bits."""
        return (self.variance.dual if self.gradient else self.variance).equal

    def __str__(self) -> str:
        return f"comm.{self.variance.value} of [{', '.join(map(summary, self.leaves))}] at {self.site}"

    def agreement(self) -> tuple[object, ...]:
        """The properties that must be equal on all ranks."""
        return (self.variance, self.distinct, [(leaf.dtype, leaf.shape) for leaf in self.leaves])


@attrs.frozen
class Contradiction:
    """A place where a program contradicts its declarations.

    Attributes:
        index: the event's index in its rank's trace.
        rank: the rank of the world.
        text: the error message; empty if only ``since`` is known.
        since: for a declaration that does not hold, where the values began to differ.
    """

    index: int
    rank: int
    text: str
    since: str = ""


@attrs.define(eq=False)
class Declarations:
    """The declarations of all ranks. Ranks do not wait: the last one to reach a declaration compares.

    Attributes:
        open: declarations that some ranks have not reached: the claims so far, by rank of the world.
        contradictions: the contradictions of the others.
    """

    open: dict[Hashable, dict[int, Claim]] = attrs.field(factory=dict)
    contradictions: list[Contradiction] = attrs.field(factory=list)

    def reach(self, key: Hashable, rank: int, claim: Claim) -> None:
        """Adds the claim of a rank that has reached a declaration."""
        claims = self.open.setdefault(key, {})
        claims[rank] = claim
        if len(claims) == claim.group.size:
            del self.open[key]
            self._note(_what_is_wrong([claims[r] for r in claim.group.ranks]), claims)

    def all_found(self, *, ended: bool) -> list[Contradiction]:
        """All contradictions; with ``ended``, unreached declarations are contradictions and missing gradients are zero."""
        for claims in self.open.values() if ended else ():
            claim = claims[min(claims)]
            missing = [rank for rank in claim.group.ranks if rank not in claims]
            if claim.gradient:
                zeros = attrs.evolve(claim, leaves=[torch.zeros_like(leaf) for leaf in claim.leaves])
                self._note(_what_is_wrong([claims.get(rank, zeros) for rank in claim.group.ranks]), claims)
            else:
                self._note(
                    f"ranks {missing} never came to {claim} on group {claim.group.name!r}, and ranks {sorted(claims)} did; "
                    "all ranks of a group come to its declarations",
                    claims,
                )
        return self.contradictions

    def _note(self, text: str | None, claims: Mapping[int, Claim]) -> None:
        if text is not None:
            self.contradictions.append(Contradiction(claims[min(claims)].index, min(claims), text))


def _what_is_wrong(claims: Sequence[Claim]) -> str | None:
    first = claims[0]
    for other, claim in zip(first.group.ranks, claims, strict=True):
        if claim.agreement() != first.agreement():
            return (
                f"the ranks of group {first.group.name!r} {list(first.group.ranks)} came to different declarations: "
                f"rank {first.group.ranks[0]} to {first}, rank {other} to {claim}"
            )
    for place in range(len(first.leaves)):
        table = [raw_bytes(claim.leaves[place]) for claim in claims]  # [numel, itemsize] each
        if first.distinct and (text := _same_on_two(claims, place, table)):
            return text
        for member in range(1, len(claims)) if first.equal else ():
            unequal = (table[member] != table[0]).any(-1).nonzero().flatten()
            if len(unequal):
                return _unequal(claims, member, place, unequal)
    return None


def _same_on_two(claims: Sequence[Claim], place: int, table: Sequence[Tensor]) -> str:
    ranks, group = claims[0].group.ranks, claims[0].group
    for b in range(len(table)):
        for a in range(b):
            if table[a].numel() and torch.equal(table[a], table[b]):
                return (
                    f"{_value(claims[0], place)} is the same on ranks {ranks[a]} and {ranks[b]} of group {group.name!r}, bit "
                    f"for bit; comm.varying(..., distinct=True) at {claims[0].site} says that no two ranks have the same"
                )
    return ""


def _unequal(claims: Sequence[Claim], member: int, place: int, unequal: Tensor) -> str:
    one, other, group = claims[0], claims[member], claims[0].group
    a, b = one.leaves[place], other.leaves[place]
    index, x, y = values_at(int(unequal[0]), a, b)
    subject = f"{_value(one, place)}, {one.variance.value} along group {group.name!r} {list(group.ranks)}"
    subject = f"the gradient of {subject}," if one.gradient else f"{subject},"
    lines = one.site if one.site == other.site else f"{one.site} and {other.site}"
    advice = f"; {_ADVICE[one.variance]}" if one.gradient else ""
    return (
        f"{subject} by comm.{one.variance.value} at {lines}, differs between its ranks: element {index} is {x} on rank "
        f"{group.ranks[0]} and {y} on rank {group.ranks[member]}, as do {len(unequal)} of {a.numel()} elements{advice}"
    )


def _value(claim: Claim, place: int) -> str:
    described, name = summary(claim.leaves[place]), claim.names[place]
    return f"{name!r} ({described})" if name else described


def raw_bytes(x: Tensor) -> Tensor:
    """The bytes of each element on the host, ``[numel, itemsize]``."""
    plain = x.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return plain.view(-1, 1).view(torch.uint8)


def values_at(element: int, a: Tensor, b: Tensor) -> tuple[list[int], str, str]:
    """The index of an element, and its values in two tensors as text, with their bytes if they read alike, as NaNs do."""
    index = [int(i) for i in torch.unravel_index(torch.tensor(element), a.shape)]
    x, y = (str(leaf.reshape(-1)[element].item()) for leaf in (a, b))
    if x == y:
        x, y = (f"{text} ({bytes(raw_bytes(leaf)[element].tolist()).hex()})" for text, leaf in ((x, a), (y, b)))
    return index, x, y
