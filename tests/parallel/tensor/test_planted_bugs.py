"""Silent bugs of tensor parallelism that users of other systems met, planted here: each breaks a law."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.parallel.tensor import test_vocabulary
from tests.parallel.tensor.test_linear import Block, agrees
from tests.parallel.tensor.test_plans import draws_are_refused
from tests.parallel.tensor.test_slice_draws import draws_for_zeros_are_looked_at_again
from tests.parallel.tensor.test_words import test_a_longer_key_keeps_a_leaf_whole
from tests.planting import Bug, planted
from tests.transforms.parallel import test_tensor_modules
from tests.transforms.parallel.test_tensor_modules import Run, sends
from tests.transforms.parallel.test_tensor_parallel import draws_agree, ranks_may_begin_otherwise

pytestmark = pytest.mark.timeout(60)

LINEAR = "parallel.tensor.linear"
PAIRS = "parallel.tensor.pairs"
PIECES = "parallel.tensor.sequence_products"
LOSS = "parallel.tensor.vocabulary"
CUTS = "parallel.tensor.leaf_cuts"
CALLS = "parallel.tensor.module_calls"
DRAWS = "parallel.tensor.slice_draws"
WORDS = "parallel.tensor.words"
CHECKS = "transforms.parallel.slice_checks"
STEP = "transforms.parallel.tensor_parallel"

dense = Block(2)
pieces = Block(2, positions=2, sequence=True, chunks=2, regather=True)
loss = (test_vocabulary.agrees, 2, 3, (5,), 0.1, 1e-2, 0, 1.0)
lookup = (test_vocabulary.lookups_agree, 2, 3, 4, False)
model = test_tensor_modules.agrees

BUGS: dict[tuple[Any, ...], list[Bug]] = {
    (agrees, dense): [
        Bug("a copy's gradients are not summed", PAIRS, "return summed(grad, ctx.group), None", "return grad, None"),
        Bug(
            "a sum's gradient is summed again",
            PAIRS,
            "return shared(grad, ctx.group), None",
            "return summed(grad, ctx.group), None",
        ),
        Bug(
            "every rank adds the bias",
            LINEAR,
            "summed(F.linear(own, weight), here)",
            "summed(F.linear(own, weight, bias), here)",
        ),
    ],
    (agrees, pieces): [
        Bug("pieces are put together in another order", PIECES, "pieces], dim + 1).flatten", "pieces], dim).flatten"),
        Bug("a weight's gradient misses pieces", PIECES, "functools.reduce(torch.add, products)", "products[0]"),
    ],
    loss: [
        Bug("each rank has a largest logit of its own", LOSS, 'comm.all_reduce(z.amax(-1), group, op="max")', "z.amax(-1)"),
        Bug("smoothing is over the local vocabulary", LOSS, "smoothing / (rows * group.size)", "smoothing / rows"),
        Bug(
            "smoothing's gradient is the local vocabulary's",
            LOSS,
            "found -= smoothing / size",
            "found -= smoothing / logits.shape[-1]",
        ),
        Bug("the z-loss has no gradient", LOSS, "(1 + 2 * z_loss * partition)", "(1 + 0 * partition)"),
        Bug("other ranks' labels count", LOSS, "[..., 0].masked_fill(~inside, 0)]", "[..., 0]]"),
        Bug("ignored tokens have gradients", LOSS, "grad = grad.masked_fill(labels < 0, 0.0)", "pass"),
    ],
    lookup: [
        Bug("the padding row is every rank's", LOSS, "padding - here.rank * weight.shape[0]", "padding"),
        Bug("other ranks' ids are looked up, too", LOSS, "found.masked_fill(~inside[..., None], 0)", "found"),
    ],
    (model, Run("qwen3 kv2")): [
        Bug("norms on slices are not summed", STEP, "_sum_shards(parts, grads.sum, cuts.summed, group)", "pass"),
        Bug(
            "the norm misses other ranks' slices",
            STEP,
            "comm.all_reduce(torch.stack(own).sum(), self.ranks())",
            "torch.stack(own).sum()",
        ),
    ],
    (model, Run("qwen3 kv1")): [
        Bug("shared heads are not summed", STEP, "if len(cut.sharers) > 1:\n", "if False:\n"),
        Bug("the norm counts shared heads on each rank", STEP, "** 2 / n for n in", "** 2 for n in"),
        Bug("an attention has all heads' groups", CALLS, "heads % n == 0 and kv % n", "False and kv % n"),
    ],
    (model, Run("biased llama")): [
        Bug(
            "a module's bias is added on each rank",
            CALLS,
            "_product(module, forward, x, biased=False)",
            "_product(module, forward, x)",
        ),
    ],
    (model, Run("llama kv2", sequence=True)): [
        Bug("the list's last layer does not gather", CALLS, "if way.last else found", "if False else found"),
        Bug("norms on a part of the sequence are replicated", CUTS, 'if "sequence_parallel" in above:', "if False:"),
    ],
    (model, Run("gpt2")): [
        Bug("a tied head is not cut", CALLS, "if not way.word.cuts and held[path] & cut:", "if False:"),
        Bug(
            "packed projections are cut as one",
            CUTS,
            "return LeafSlice.even(dim, sizes, group.size",
            "return LeafSlice.even(dim, sum(sizes), group.size",
        ),
    ],
    (model, Run("mixtral")): [
        Bug(
            "the routing's gradients are not summed",
            CALLS,
            "x, *weights = comm.copy_to((x, *routing[1:]), group)",
            "x, weights = comm.copy_to(x, group), routing[1:]",
        ),
    ],
    (sends, "llama kv2", False): [
        Bug("each linear of a block has a copy of its own", CALLS, 'if known.get("x") is not x or', "if True or"),
    ],
    (draws_are_refused,): [
        Bug("ranks draw masks of their own", STEP, "if tape.records and group.size > 1 else []", "if False else []"),
    ],
    (draws_for_zeros_are_looked_at_again,): [
        Bug("draws for slices are not compared", STEP, "draws.known.update(check_draws(drawn_for or [], group))", "pass"),
        Bug("zeros count as compared", CHECKS, "enumerate(drawn) if any(row[3 * place] for row in rows)", "enumerate(drawn)"),
    ],
    (draws_agree, 2, 1, True, 1): [
        Bug(
            "every rank draws the first features' mask", DRAWS, "range(here.rank * size, (here.rank + 1) * size)", "range(size)"
        ),
    ],
    (test_a_longer_key_keeps_a_leaf_whole,): [
        Bug(
            "a key that cuts counts, not the most exact one",
            WORDS,
            "if not any(_within(other, key) for other in known)",
            "if word_of(known[key]).cuts or not any(word_of(each).cuts for each in known.values())",
        ),
    ],
    (ranks_may_begin_otherwise,): [
        Bug("ranks begin with their own leaves", STEP, "comm.broadcast(leaf.detach(), 0, group)", "leaf.detach().clone()"),
    ],
}


@cache
def holds(law: Callable[..., None], *case: Any) -> bool:
    """Checks a law in the unchanged library, once."""
    law(*case)
    return True


@pytest.mark.sample(9)
@pytest.mark.parametrize(("case", "bug"), [pytest.param(c, b, id=b.name) for c, bugs in BUGS.items() for b in bugs])
def test_a_bug_breaks_its_law(case: tuple[Any, ...], bug: Bug) -> None:
    """The law holds, and does not with the bug."""
    law, *rest = case
    assert holds(*case)
    with planted(bug), pytest.raises((AssertionError, RuntimeError, ValueError, IndexError, pytest.fail.Exception)):
        law(*rest)
