"""Silent bugs of tensor parallelism that users of other systems met, planted here: each breaks a law."""

from collections.abc import Callable
from functools import cache
from typing import Any

import attrs
import pytest
from torch import nn

from tests.parallel.tensor import test_vocabulary
from tests.parallel.tensor.test_first_step_checks import (
    test_leaves_behind_a_layer_of_zeros_are_named_in_the_second_step,
    test_steps_that_a_loss_scale_skips_are_not_compared,
    test_the_groups_of_a_cut_norm_are_cut,
    test_what_to_do_with_a_norm_on_slices,
    whole_leaves_that_are_summed_are_named,
)
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
LOSS = "parallel.tensor.vocabulary"
CUTS = "parallel.tensor.leaf_cuts"
CALLS = "parallel.tensor.module_calls"
DRAWS = "parallel.tensor.slice_draws"
WORDS = "parallel.tensor.words"
CHECKS = "transforms.parallel.slice_checks"
STEP = "transforms.parallel.tensor_parallel"

dense = Block(2)
pieces = Block(2, positions=2, sequence=True, chunks=2, regather=True)
again = attrs.evolve(pieces, again=True)
loss = (test_vocabulary.agrees, 2, 3, (5,), 0.1, 1e-2, 0, 1.0)
lookup = (test_vocabulary.lookups_agree, 2, 3, 4, False)
model = test_tensor_modules.agrees

BUGS: dict[tuple[Any, ...], list[Bug]] = {
    (agrees, dense): [
        Bug("a copy's gradients are not summed", "parallel.tensor.pairs:_Shared.backward", "summed(grad, ctx.group)", "grad"),
        Bug(
            "a sum's gradient is summed again",
            "parallel.tensor.pairs:_Summed.backward",
            "shared(grad, ctx.group)",
            "summed(grad, ctx.group)",
        ),
        Bug(
            "every rank adds the bias",
            "parallel.tensor.linear:row",
            "summed(F.linear(local_x, weight), here)",
            "summed(F.linear(local_x, weight, bias), here)",
        ),
    ],
    (agrees, pieces): [
        Bug(
            "pieces are put together in another order",
            "parallel.tensor.linear:_assembled",
            "torch.stack([piece.unflatten(dim, (n, -1)) for piece in pieces], dim + 1)",
            "torch.stack([piece.unflatten(dim, (n, -1)) for piece in pieces], dim)",
        ),
        Bug(
            "a weight's gradient misses pieces",
            "parallel.tensor.linear:_weight_gradient",
            "functools.reduce(torch.add, products)",
            "products[0]",
        ),
    ],
    (agrees, again): [
        Bug(
            "saved tensors are read twice, which a checkpoint refuses",
            "parallel.tensor.linear:_GatheredProducts.backward",
            "saved[ctx.count:]",
            "ctx.saved_tensors[ctx.count:]",
        ),
    ],
    loss: [
        Bug(
            "each rank has a largest logit of its own",
            "parallel.tensor.vocabulary:_TokenLosses.forward",
            "comm.all_reduce(z.amax(-1), group, op='max')",
            "z.amax(-1)",
        ),
        Bug(
            "smoothing is over the local vocabulary",
            "parallel.tensor.vocabulary:_TokenLosses.forward",
            "smoothing / (rows * group.size)",
            "smoothing / rows",
        ),
        Bug(
            "smoothing's gradient is the local vocabulary's",
            "parallel.tensor.vocabulary:_TokenLosses.backward",
            "smoothing / size",
            "smoothing / logits.shape[-1]",
        ),
        Bug("the z-loss has no gradient", "parallel.tensor.vocabulary:_TokenLosses.backward", "2 * z_loss", "0"),
        Bug(
            "other ranks' labels count",
            "parallel.tensor.vocabulary:_TokenLosses.forward",
            "z.gather(-1, index[..., None])[..., 0].masked_fill(~inside, 0)",
            "z.gather(-1, index[..., None])[..., 0]",
        ),
        Bug(
            "ignored tokens have gradients",
            "parallel.tensor.vocabulary:_TokenLosses.backward",
            "grad = grad.masked_fill(labels < 0, 0.0)",
            "pass",
        ),
    ],
    lookup: [
        Bug(
            "the padding row is every rank's",
            "parallel.tensor.vocabulary:embed",
            "padding - here.rank * weight.shape[0]",
            "padding",
        ),
        Bug(
            "other ranks' ids are looked up, too",
            "parallel.tensor.vocabulary:embed",
            "rows.masked_fill(~inside[..., None], 0)",
            "rows",
        ),
    ],
    (model, Run("qwen3 kv2")): [
        Bug(
            "norms on slices are not summed",
            "transforms.parallel.tensor_parallel:_TensorParallel.reduce",
            "_sum_shards(parts, grads.sum, cuts.summed, group)",
            "pass",
        ),
        Bug(
            "the norm misses other ranks' slices",
            "step.over_ranks.gradient_sums:_total",
            "comm.all_reduce(functools.reduce(operator.add, divided), axis.ranks())",
            "functools.reduce(operator.add, divided)",
        ),
    ],
    (model, Run("qwen3 kv1")): [
        Bug(
            "shared heads are not summed",
            "transforms.parallel.tensor_parallel:_TensorParallel.reduce",
            "len(cut.sharers) > 1",
            "False",
        ),
        Bug(
            "the norm counts shared heads on each rank",
            "step.over_ranks.gradient_sums:_total",
            "part / count if count > 1 else part",
            "part",
        ),
        Bug("an attention has all heads' groups", "parallel.tensor.module_calls:_local", "heads % n == 0", "False"),
    ],
    (model, Run("biased llama")): [
        Bug(
            "a module's bias is added on each rank",
            "parallel.tensor.module_calls:TensorCalls._row",
            "_product(module, forward, x, biased=False)",
            "_product(module, forward, x)",
        ),
    ],
    (model, Run("llama kv2", sequence=True)): [
        Bug(
            "the list's last layer does not gather",
            "parallel.tensor.module_calls:TensorCalls.run",
            "_with_output(output, lambda y: comm.gather_from(y, self.group, dim=self._dim(y))) if way.last else output",
            "_with_output(output, lambda y: comm.gather_from(y, self.group, dim=self._dim(y))) if False else output",
        ),
        Bug(
            "norms on a part of the sequence are replicated",
            "parallel.tensor.leaf_cuts:cuts_of",
            "if _in_cut_sequences(plan, place):\n    ...\nelif _is_summed(plan, place, value):\n    by_word.add(path)",
            "if _is_summed(plan, place, value):\n    by_word.add(path)",
        ),
    ],
    (model, Run("gpt2")): [
        Bug(
            "a tied head is not cut",
            "parallel.tensor.module_calls:TensorCalls.chosen",
            "not way.word.cuts and held[path] & cut",
            "False",
        ),
        Bug(
            "packed projections are split as one",
            "parallel.tensor.leaf_cuts:_slice",
            "LeafSlice.even(dim, sizes, group.size, group.rank)",
            "LeafSlice.even(dim, sum(sizes), group.size, group.rank)",
        ),
    ],
    (model, Run("mixtral")): [
        Bug(
            "the routing's gradients are not summed",
            "parallel.tensor.module_calls:TensorCalls._experts",
            "x, *weights = comm.copy_to((x, *routing[1:]), self.group)",
            "x, weights = (comm.copy_to(x, self.group), routing[1:])",
        ),
    ],
    (sends, "llama kv2", False): [
        Bug(
            "each linear of a block has a copy of its own",
            "parallel.tensor.module_calls:TensorCalls._entered",
            "known.get('x') is not x",
            "True",
        ),
    ],
    (whole_leaves_that_are_summed_are_named,): [
        Bug(
            "equal gradients are summed",
            "transforms.parallel.slice_checks:check_partial_gradients",
            "path in cuts.by_word and equal[path] and rows[0][0]",
            "False",
            shows=BaseException,
        ),
    ],
    (test_leaves_behind_a_layer_of_zeros_are_named_in_the_second_step, None): [
        Bug("zeros are equal", "transforms.parallel.tensor_parallel:_note", "compared.zeros", "False", shows=BaseException),
    ],
    (test_steps_that_a_loss_scale_skips_are_not_compared,): [
        Bug(
            "numbers that have overflown are compared",
            "transforms.parallel.slice_checks:check_whole_gradients",
            "told if compared.finite else ()",
            "told",
            shows=ValueError,
        ),
    ],
    (test_the_groups_of_a_cut_norm_are_cut,): [
        Bug(
            "a rank makes all groups of its features",
            "parallel.tensor.leaf_cuts:cuts_of",
            "_check_groups(plan, [place for path in slices for place in places[path]], group)",
            "pass",
        ),
    ],
    (test_what_to_do_with_a_norm_on_slices, nn.LayerNorm(8), "LayerNorm needs all features"): [
        Bug(
            "a norm over all features is to be cut",
            "transforms.parallel.slice_errors:_advice",
            "hasattr(module, 'normalized_shape')",
            "False",
        ),
    ],
    (draws_are_refused,): [
        Bug(
            "ranks draw masks of their own",
            "transforms.parallel.tensor_parallel:_TensorParallel.guard_forward",
            "pass_.trains and group.size > 1",
            "False",
        ),
    ],
    (draws_for_zeros_are_looked_at_again,): [
        Bug(
            "draws for slices are not compared",
            "transforms.parallel.tensor_parallel:_TensorParallel.guard_forward",
            "draws.known.update(check_draws(keyed or [], group))",
            "pass",
        ),
        Bug(
            "zeros count as compared",
            "transforms.parallel.slice_checks:check_draws",
            "{name for place, (name, _, _) in enumerate(drawn) if any((row[3 * place] for row in rows))}",
            "{name for place, (name, _, _) in enumerate(drawn)}",
        ),
    ],
    (draws_agree, 2, 1, True, 1): [
        Bug(
            "every rank draws the first features' mask",
            "parallel.tensor.slice_draws:places",
            "range(here.rank * size, (here.rank + 1) * size)",
            "range(size)",
        ),
    ],
    (test_a_longer_key_keeps_a_leaf_whole,): [
        Bug(
            "a key that splits counts, not the most exact one",
            "parallel.tensor.words:value_at",
            "not any((_within(other, key) for other in known))",
            "word_of(known[key]).cuts or not any((word_of(each).cuts for each in known.values()))",
        ),
    ],
    (ranks_may_begin_otherwise,): [
        Bug(
            "ranks begin with their own leaves",
            "transforms.parallel.tensor_parallel:_sliced",
            "comm.broadcast(leaf.detach(), 0, group)",
            "leaf.detach().clone()",
        ),
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
