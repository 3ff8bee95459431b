"""What ranks declare of their values, compared bit by bit."""

from collections.abc import Hashable, Sequence

import attrs
import torch
from torch import Tensor

from functional_ds.comm.record.errors import VarianceError
from functional_ds.comm.record.group import Group
from functional_ds.comm.record.variance import Variance

__all__ = ["Claim", "Declarations", "raw_bytes"]

_ADVICE = {
    Variance.INVARIANT: "each rank has gradients of its own use alone: put comm.copy_to before that use, which sums them, or "
    "declare it replicated and sum its gradient yourself",
    Variance.PARTIAL: "the terms of one sum have one gradient: use the sum, as comm.reduce_from returns it",
}


@attrs.frozen(eq=False)
class Claim:
    """What one rank declares of its leaves.

    Attributes:
        kind: what they are declared to be along the group.
        group: the ranks.
        names: the leaves' paths.
        leaves: copies of them, or of their gradients.
        site: the file and line of the declaration.
        distinct: no two ranks may have equal bits.
        gradient: whether ``leaves`` are gradients.
    """

    kind: Variance
    group: Group
    names: Sequence[str]
    leaves: Sequence[Tensor]
    site: str
    distinct: bool = False
    gradient: bool = False

    @property
    def equal(self) -> bool:
        """Whether the ranks' leaves must have equal bits."""
        return (self.kind.dual if self.gradient else self.kind).equal

    def __str__(self) -> str:
        shapes = ", ".join(f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" for leaf in self.leaves)
        return f"comm.{self.kind.value} of [{shapes}] at {self.site}"

    def agreement(self) -> tuple[object, ...]:
        """What must be the same on every rank."""
        return (self.kind, self.distinct, [(leaf.dtype, leaf.shape) for leaf in self.leaves])


@attrs.define(eq=False)
class Declarations:
    """The declarations that some ranks have yet to come to. Nobody waits: the last rank to come compares.

    Attributes:
        open: for each declaration, the claims so far, by rank of the world.
    """

    open: dict[Hashable, dict[int, Claim]] = attrs.field(factory=dict)

    def reach(self, key: Hashable, rank: int, claim: Claim) -> None:
        """A rank comes to a declaration.

        Raises:
            VarianceError: the ranks came to different declarations, or the values are not what they are declared to be.
        """
        claims = self.open.setdefault(key, {})
        claims[rank] = claim
        other = min(claims)
        if claims[other].agreement() != claim.agreement():
            raise VarianceError(
                f"the ranks of group {claim.group.name!r} {list(claim.group.ranks)} came to different declarations: "
                + ", ".join(f"rank {r} to {claims[r]}" for r in sorted((other, rank)))
            )
        if len(claims) == claim.group.size:
            del self.open[key]
            _compare([claims[r] for r in claim.group.ranks])

    def finish(self) -> None:
        """Compares what is left when all ranks have finished. A gradient that never came is zero.

        Raises:
            VarianceError: a rank never came to what others declared, or as ``reach`` does.
        """
        for claims in self.open.values():
            claim = claims[min(claims)]
            missing = [rank for rank in claim.group.ranks if rank not in claims]
            if not claim.gradient:
                raise VarianceError(
                    f"ranks {missing} never came to {claim} on group {claim.group.name!r}, and ranks {sorted(claims)} did; "
                    "all ranks of a group come to its declarations"
                )
            zeros = attrs.evolve(claim, leaves=[torch.zeros_like(leaf) for leaf in claim.leaves])
            _compare([claims.get(rank, zeros) for rank in claim.group.ranks])


def _compare(claims: Sequence[Claim]) -> None:
    first = claims[0]
    for place in range(len(first.leaves)):
        table = [raw_bytes(claim.leaves[place]) for claim in claims]  # [numel, itemsize] each
        if first.distinct:
            _check_distinct(claims, place, table)
        for member in range(1, len(claims)) if first.equal else ():
            unequal = (table[member] != table[0]).any(-1).nonzero().flatten()
            if len(unequal):
                raise _unequal(claims, member, place, unequal)


def _check_distinct(claims: Sequence[Claim], place: int, table: Sequence[Tensor]) -> None:
    ranks, group = claims[0].group.ranks, claims[0].group
    for b in range(len(table)):
        for a in range(b):
            if table[a].numel() and torch.equal(table[a], table[b]):
                raise VarianceError(
                    f"{_value(claims[0], place)} is the same on ranks {ranks[a]} and {ranks[b]} of group {group.name!r}, bit "
                    f"for bit; comm.varying(..., distinct=True) at {claims[0].site} says that no two ranks have the same"
                )


def _unequal(claims: Sequence[Claim], member: int, place: int, unequal: Tensor) -> VarianceError:
    one, other, group = claims[0], claims[member], claims[0].group
    a, b, element = one.leaves[place], other.leaves[place], int(unequal[0])
    index = [int(i) for i in torch.unravel_index(torch.tensor(element), a.shape)]
    x, y = (str(leaf.reshape(-1)[element].item()) for leaf in (a, b))
    if x == y:  # such as two NaNs
        x, y = (f"{text} ({bytes(raw_bytes(leaf)[element].tolist()).hex()})" for text, leaf in ((x, a), (y, b)))
    subject = f"{_value(one, place)}, {one.kind.value} along group {group.name!r} {list(group.ranks)}"
    subject = f"the gradient of {subject}," if one.gradient else f"{subject},"
    lines = one.site if one.site == other.site else f"{one.site} and {other.site}"
    advice = f"; {_ADVICE[one.kind]}" if one.gradient else ""
    return VarianceError(
        f"{subject} by comm.{one.kind.value} at {lines}, differs between its ranks: element {index} is {x} on rank "
        f"{group.ranks[0]} and {y} on rank {group.ranks[member]}, as do {len(unequal)} of {a.numel()} elements{advice}"
    )


def _value(claim: Claim, place: int) -> str:
    leaf, name = claim.leaves[place], claim.names[place]
    kind = f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    return f"{name!r} ({kind})" if name else kind


def raw_bytes(x: Tensor) -> Tensor:
    """The bytes of each element on the host, ``[numel, itemsize]``."""
    plain = x.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return plain.view(-1, 1).view(torch.uint8)
