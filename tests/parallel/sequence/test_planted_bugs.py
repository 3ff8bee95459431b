"""Bugs of attention over cut sequences, each planted alone: a law must break."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from functional_ds import comm, seq
from functional_ds.parallel.sequence.blockwise import merge
from tests.parallel.sequence import test_hugging_face
from tests.parallel.sequence.attention_cases import Case, run
from tests.parallel.sequence.test_ring import test_half_precision_is_summed_in_single as half_precision
from tests.planting import Bug, planted

pytestmark = pytest.mark.timeout(60)

Layout = seq.SequenceLayout
ZIGZAG = Case(3, Layout("zigzag"), 12, heads=(3, 1))
STRIPED = Case(3, Layout("striped"), 12)
PADDED = Case(2, Layout("zigzag"), 8, documents=((0, 0, -1, -1, -1, 1, 1, 1), (-1, -1, 0, 0, 0, 0, 0, 1)))
WINDOW = Case(2, Layout("contiguous"), 8, window=3)
DOCUMENTS = Case(2, Layout.per_document([5, 3, 4]), 12)


def ring(case: Case, save: bool = False) -> None:
    """A ring is the attention to the whole sequence, and sends what it must."""
    hops = case.ranks - 1
    for forward, backward in run(case, lambda group: seq.ring(group, layout=case.layout, save_blocks=save)):
        assert (forward.calls, backward.calls) == (hops, hops if save else 2 * hops)


def ulysses(case: Case) -> None:
    """Ulysses is the attention of whole heads, in two exchanges of the papers' size."""
    books = run(case, lambda group: seq.ulysses(None, group, layout=case.layout))
    assert all(book.calls == 2 for pair in books for book in pair)
    keys = sum(map(len, seq.head_shares(*case.heads, ranks=case.ranks).keys))
    sent = case.rows * case.length // case.ranks * (case.ranks - 1) * (case.heads[0] + keys) * sum(case.sizes)
    assert [sum(book.elements for book in books) for books in zip(*books, strict=True)] == [sent, sent]


def gathered(case: Case) -> None:
    """So is attention to gathered keys."""
    run(case, lambda group: seq.gathered(group, layout=case.layout))


def balance() -> None:
    """Zigzag is equal on all ranks in every step."""
    assert all(len(set(step)) == 1 for step in seq.ring_pairs("zigzag", 24, ranks=3))


def identity() -> None:
    """Attention to no key is the identity of merging."""
    none = torch.zeros(1), torch.tensor(-torch.inf)
    assert merge(*none, none[0], other_lse=none[1])[0].item() == 0
    assert merge(*none, torch.ones(1), other_lse=torch.tensor(1.0))[0].item() == 1


def hugging_face(kind: str) -> None:
    """An unmodified model over cut sequences is the model."""
    seq.register_attention()
    test_hugging_face.test_a_model_is_the_model_on_one_device("windows", kind, "fds_ring", Layout("zigzag"))


def refusals() -> None:
    """What a model asks for beyond its positions is refused."""
    seq.register_attention()
    test_hugging_face.test_a_mask_that_the_step_does_not_know_is_refused()
    test_hugging_face.test_positions_that_are_not_the_ranks_are_refused()
    test_hugging_face.test_other_masks_are_refused()


RING, EXCHANGE, BLOCKS = "parallel.sequence.ring", "parallel.sequence.ulysses", "parallel.sequence.blockwise"
PRODUCTS, LAYOUT, MODELS = (
    "parallel.sequence.block_products",
    "parallel.sequence.sequence_layout",
    "parallel.sequence.hugging_face",
)

GATHERED = "parallel.sequence.gathered_keys"

BUGS: dict[tuple[Callable[..., None], *tuple[Any, ...]], list[Bug]] = {
    (ring, ZIGZAG): [
        Bug(
            "gradients go on with the keys",
            "parallel.sequence.ring:_RingAttention.backward.step",
            "here.pass_on(d_flat, -1)",
            "here.pass_on(d_flat, 1)",
            shows=Exception,
        ),
        Bug(
            "a rank forgets its own part",
            "parallel.sequence.ring:_RingAttention.backward",
            "d_own += d_coming.pop().wait()",
            "d_own = d_coming.pop().wait()",
        ),
        Bug(
            "what comes is not added",
            "parallel.sequence.ring:_RingAttention.backward.step",
            "d_flat += d_coming.pop().wait()",
            "d_coming.pop().wait()",
        ),
        Bug(
            "keys go around once too often",
            "parallel.sequence.ring:_RingAttention.backward.step",
            "last or saved",
            "saved",
            shows=Exception,
        ),
        Bug(
            "keys are taken for the next rank's",
            "parallel.sequence.ring:_Ring.keys",
            "self.whole.runs(-step)",
            "self.whole.runs(step)",
        ),
        Bug(
            "the last block is left out",
            "parallel.sequence.ring:_RingAttention.forward",
            "here.keys(blocks[-1], here.group.size - 1)",
            "here.keys(blocks[-1], 0)",
        ),
        Bug(
            "parts are added up",
            "parallel.sequence.blockwise:merge_into",
            "o.lerp_(other.to(o.dtype), weight.unsqueeze(-1))",
            "o.add_(other) if o.dim() else o.lerp_(other.to(o.dtype), weight.unsqueeze(-1))",
        ),
    ],
    (ring, ZIGZAG, True): [
        Bug(
            "saved blocks in another order",
            "parallel.sequence.ring:_RingAttention.backward.step",
            "min(place, len(saved)) - 1",
            "number",
        )
    ],
    (ring, STRIPED): [
        Bug(
            "the diagonal ignores the stride",
            "parallel.sequence.block_products:_pair",
            "(q[0] - k[0]) // step",
            "q[0] - k[0]",
            shows=Exception,
        ),
        Bug("later keys are seen", "parallel.sequence.block_products:_pair", "k[-1] <= q[0]", "k[0] <= q[0]"),
    ],
    (ring, PADDED): [
        Bug("padding is a document", "parallel.sequence.blockwise:AttentionMask.allowed", "others >= 0", "others >= -1"),
        Bug(
            "documents see each other",
            "parallel.sequence.blockwise:AttentionMask.allowed",
            "numbers.unsqueeze(2) == others.unsqueeze(1)",
            "others.unsqueeze(1) >= 0",
        ),
        Bug(
            "rows without keys have no gradient",
            "parallel.sequence.blockwise:empty_to_infinite",
            "lse.masked_fill(lse == -torch.inf, torch.inf)",
            "lse",
        ),
    ],
    (ring, WINDOW): [
        Bug(
            "a window is one longer",
            "parallel.sequence.blockwise:AttentionMask.allowed",
            "q - k < self.window",
            "q - k <= self.window",
        )
    ],
    (ring, DOCUMENTS): [
        Bug("the layout's documents are no mask", "parallel.sequence.blockwise:mask_of", "lengths or of_layout", "lengths"),
    ],
    (ulysses, ZIGZAG): [
        Bug(
            "of a shared head one gradient counts",
            "parallel.sequence.ulysses:HeadExchange.run",
            "not to_heads and _shared(self.shares[place])",
            "False",
        ),
        Bug(
            "positions are the ranks' order",
            "parallel.sequence.ulysses:HeadExchange._views",
            "x[:, :, run.start:run.stop:run.step]",
            "x[:, :, start:start + len(run)]",
        ),
    ],
    (ulysses, Case(3, Layout(), 6, heads=(12, 4))): [
        Bug(
            "uneven heads meet other keys",
            "parallel.sequence.ulysses:_expanded",
            "used == [place // repeats for place in range(len(queries))]",
            "True",
        ),
    ],
    (gathered, ZIGZAG): [
        Bug(
            "gathered keys in the ranks' order",
            "parallel.sequence.gathered_keys:gathered.compute",
            "how != SequenceLayout('contiguous')",
            "False",
        ),
    ],
    (balance,): [
        Bug("the second chunk is not mirrored", "parallel.sequence.sequence_layout:_zigzag", "2 * n - 1 - rank", "n + rank")
    ],
    (identity,): [
        Bug(
            "minus infinity is not guarded",
            "parallel.sequence.blockwise:merge_into",
            "torch.exp(other_lse - total).masked_fill_(total == -torch.inf, 0)",
            "torch.exp(other_lse - total)",
        )
    ],
    (half_precision, "zigzag", torch.bfloat16): [
        Bug(
            "parts are merged in half precision",
            "parallel.sequence.blockwise:Queries.add",
            "torch.promote_types(self.q.dtype, torch.float32)",
            "self.q.dtype",
            shows=Exception,
        ),
    ],
    (hugging_face, "padded"): [
        Bug(
            "a model's padding is ignored",
            "parallel.sequence.axis:resolve_axis",
            "(group, steps, theirs)",
            "(group, steps, None)",
        ),
    ],
    (hugging_face, "plain"): [
        Bug(
            "a model's window is ignored",
            "parallel.sequence.hugging_face:_mask.make",
            "[free['sliding_window']]",
            "[] and [free['sliding_window']]",
        ),
        Bug(
            "a model's scale is ignored",
            "parallel.sequence.hugging_face:_attention.forward",
            "way(axis)(query, key, value, scale=scaling, causal=mask.causal, window=window)",
            "way(axis)(query, key, value, scale=1.0, causal=mask.causal, window=window)",
        ),
    ],
    (refusals,): [
        Bug(
            "another mask is ignored",
            "parallel.sequence.hugging_face:_mask.make",
            "_check_padding(name, attention_mask, axis)",
            "pass",
            shows=BaseException,
        ),
        Bug(
            "positions are not looked at",
            "parallel.sequence.hugging_face:_attention.forward",
            "if first:\n    ...",
            "if False:\n    ...",
            shows=BaseException,
        ),
    ],
}


@cache
def holds(law: Callable[..., None], *case: Any) -> bool:
    """Checks a law in the library as it is, once."""
    law(*case)
    return True


@pytest.mark.sample(9)
@pytest.mark.parametrize(("case", "bug"), [pytest.param(c, b, id=b.name) for c, bugs in BUGS.items() for b in bugs])
def test_a_bug_breaks_its_law(case: tuple[Any, ...], bug: Bug) -> None:
    law, *rest = case
    assert holds(*case)
    with planted(bug), pytest.raises(bug.shows):
        law(*rest)


def test_planting_is_undone() -> None:
    assert comm.simulate(lambda: 1, world_size=2) == [1, 1]
    ring(ZIGZAG)
