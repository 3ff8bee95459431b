"""The silent bugs of mixtures of experts, planted alone: each must break a law."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch

from tests.parallel.experts import test_balance_loss, test_capacity, test_experts_registry, test_grouped, test_routing
from tests.parallel.experts import test_token_exchange as laws
from tests.planting import Bug, planted

pytestmark = pytest.mark.timeout(60)


def case(test: Any, **arguments: Any) -> Callable[[], None]:
    """A law for one case."""
    return partial(getattr(test, "hypothesis", None).inner_test if hasattr(test, "hypothesis") else test, **arguments)


ON_RANKS = case(laws.test_experts_on_ranks_are_one_device, ranks=2, k=2, spread="any", way="all_to_all", shared=True)
GATHERED = case(laws.test_experts_on_ranks_are_one_device, ranks=2, k=2, spread="any", way="gather", shared=False)
BY_RANK = case(laws.test_experts_on_ranks_are_one_device, ranks=2, k=4, spread="any", way="by_rank", shared=False)
KEPT = case(laws.test_combining_what_was_dispatched_sums_the_kept_weights, k=2, ranks=2, way="all_to_all")
NO_TOKENS = laws.test_a_rank_without_tokens_may_have_a_constant_loss
OVERFLOW = case(laws.test_an_overflow_is_named_on_all_ranks, way="all_to_all")
SENT = case(laws.test_what_is_sent_is_the_formula, ranks=4, k=2, way="all_to_all")
HALF = case(laws.test_half_precision_sums_in_fp32, dtype=torch.bfloat16, router=torch.bfloat16)
MIXTRAL = case(test_routing.test_published_routers, router=test_routing._mixtral, k=2, scale=1.0, seed=0)
DEEPSEEK = case(test_routing.test_published_routers, router=test_routing._deepseek_v3, k=4, scale=2.5, seed=0)
BIAS = test_routing.test_a_bias_chooses_and_has_no_gradient
NOISE = case(test_routing.test_noise_depends_on_the_position_alone, cut=2, seed=0)
DROPPED = case(
    test_capacity.test_dropping_is_by_groups_whatever_the_partition, k=2, factor=1.0, drop="probability", parts=3, seed=0
)
GLOBAL = case(test_balance_loss.test_over_the_global_batch_it_is_one_device_s, parts=(5, 19), k=2, masked=True, seed=0)
SEQUENCE = case(test_balance_loss.test_by_sequence_no_partition_of_the_batch_matters, k=2, parts=2, seed=0)
IN_A_STEP = case(test_balance_loss.test_in_a_step_it_shares_the_weight_of_the_loss, stage=0, ranks=2)
OVER_TP = case(test_grouped.test_experts_cut_over_ep_and_tp_are_one_device, ep=2, tp=2)
HUGGING_FACE = case(test_experts_registry.test_a_model_on_ranks_is_one_device, model="gpt_oss", ep=2, tp=2)

EXCHANGE, ORDER, ROUTING = "parallel.experts.token_exchange", "parallel.experts.token_order", "parallel.experts.routing"
BALANCE = "parallel.experts.balance_loss"
RESULT = "combine(f(spread(arrived, by_expert), groups), None, by_expert)"
GATES = "weights = scores.gather(1, chosen)"

BUGS: dict[Callable[[], None], list[Bug]] = {
    ON_RANKS: [
        Bug(
            "expert gradients are ep times too large",
            "parallel.experts.grouped:_GroupedProduct.backward",
            "_GroupedOuterProduct.apply(rows, grad, ctx.groups)",
            "_GroupedOuterProduct.apply(rows, 2 * grad, ctx.groups)",
        ),
        Bug("rows are not sorted by expert", "parallel.experts.token_exchange:_by_expert", "blocks == sorted(blocks)", "True"),
        Bug(
            "results are not put back in the order of their sources",
            "parallel.experts.token_exchange:_ExchangeByAllToAll.start.rest",
            "combine(f(spread(arrived, by_expert), groups), None, by_expert)",
            "f(spread(arrived, by_expert), groups)",
        ),
        Bug(
            "weights get no gradient",
            "parallel.experts.token_exchange:_ExchangeByAllToAll.start.rest",
            "self.routing.weights",
            "self.routing.weights.detach()",
            shows=Exception,
        ),
        Bug(
            "shared experts are left out",
            "parallel.experts.token_exchange:exchange",
            "out if beside is None else out + beside",
            "out",
        ),
        Bug(
            "weights go with the rows of other choices",
            "parallel.experts.token_order:_CombineRows.backward",
            "weights.flatten().index_select(0, order.pairs)[:, None]",
            "weights.flatten()[:len(rows), None]",
        ),
        Bug(
            "a token's rows are not summed in the backward pass",
            "parallel.experts.token_order:_SpreadTokens.backward",
            "combine(grad, None, ctx.order)",
            "grad[:len(grad) // 2]",
            shows=Exception,
        ),
    ],
    GATHERED: [
        Bug(
            "every rank has the first experts",
            "parallel.experts.token_exchange:_Exchange._of_local_experts",
            "self.group.rank * len(counts)",
            "0",
        ),
        Bug(
            "others' choices are computed",
            "parallel.experts.token_exchange:_Exchange._of_local_experts",
            "(local >= 0) & (local < len(counts))",
            "local < len(counts)",
            shows=Exception,
        ),
    ],
    BY_RANK: [
        Bug(
            "a rank's part of a token counts once for each choice",
            "parallel.experts.token_exchange:_first_choices",
            "~same.tril(-1).any(-1)",
            "same.any(-1)",
        ),
    ],
    KEPT: [
        Bug(
            "dropped choices are combined",
            "parallel.experts.token_order:_CombineRows.forward",
            "picked.masked_fill_(~order.kept[:, j, None], 0)",
            "pass",
        ),
        Bug(
            "dropped choices are sent",
            "parallel.experts.token_exchange:_ExchangeByAllToAll.start",
            "order = order.cut(sum(sent))",
            "pass",
            shows=Exception,
        ),
    ],
    NO_TOKENS: [
        Bug(
            "a rank without tokens leaves the others alone",
            "parallel.experts.token_exchange:exchange",
            "if not len(rows):\n    ...",
            "if False:\n    ...",
            shows=Exception,
        )
    ],
    OVERFLOW: [
        Bug(
            "an overflow is known where it is",
            "parallel.experts.token_exchange:_ExchangeByAllToAll._counts",
            "[by_rank[-3:] for by_rank in counts]",
            "[routing.overflow.tolist()]",
            shows=Exception,
        )
    ],
    SENT: [
        Bug(
            "rows are sent twice",
            "parallel.experts.token_exchange:_ExchangeByAllToAll.start",
            "spread(rows, order)",
            "spread(rows, order).repeat(1, 2)",
            shows=Exception,
        )
    ],
    HALF: [
        Bug(
            "results are summed in bf16",
            "parallel.experts.token_order:_CombineRows.forward",
            "torch.promote_types(wide, torch.float32)",
            "rows.dtype",
        )
    ],
    MIXTRAL: [
        Bug("two softmaxes", "parallel.experts.routing:route", "scores.gather", "scores.softmax(1).gather"),
        Bug("not renormalised", "parallel.experts.routing:route", "normalise", "False"),
    ],
    DEEPSEEK: [
        Bug("groups that are not chosen score zero", "parallel.experts.routing:route", "float('-inf')", "0.0"),
        Bug(
            "a group's score is its best expert's",
            "parallel.experts.routing:route",
            "choice.view(-1, groups, experts // groups).topk(group_top)",
            "choice.view(-1, groups, experts // groups).topk(1)",
        ),
        Bug(
            "the factor is left out", "parallel.experts.routing:route", "weights * scale if scale != 1 else weights", "weights"
        ),
        Bug("the bias does not choose", "parallel.experts.routing:route", "choice = choice + bias", "pass"),
    ],
    BIAS: [
        Bug("the bias weighs, and has a gradient", "parallel.experts.routing:route", "scores.gather", "(scores + bias).gather")
    ],
    NOISE: [
        Bug("noise weighs", "parallel.experts.routing:route", "scores.gather", "choice.gather"),
        Bug(
            "layers draw the same noise",
            "parallel.experts.routing:route",
            "key.uniform(wide, name)",
            "key.uniform(wide, 'route')",
        ),
    ],
    DROPPED: [
        Bug(
            "capacity is of local counts",
            "parallel.experts.routing:Capacity.apply",
            "self.limit(k, experts)",
            "math.ceil(self.factor * tokens * k / experts)",
        ),
        Bug(
            "the smallest weights are kept",
            "parallel.experts.routing:Capacity.apply",
            "weights.detach().flatten().argsort(descending=True, stable=True)",
            "weights.detach().flatten().argsort(stable=True)",
        ),
    ],
    GLOBAL: [
        Bug("counts are each rank's", "parallel.experts.balance_loss:balance_loss", "group is not None", "False"),
        Bug(
            "the loss is scaled by the ranks",
            "parallel.experts.balance_loss:balance_loss",
            "routing.count * (part * mass).sum()",
            "2 * routing.count * (part * mass).sum()",
        ),
        Bug(
            "padding counts",
            "parallel.experts.balance_loss:balance_loss",
            "counts.repeat_interleave",
            "torch.ones_like(counts).repeat_interleave",
        ),
    ],
    SEQUENCE: [
        Bug(
            "sequences are mixed",
            "parallel.experts.balance_loss:balance_loss",
            "torch.arange(parts, device=counts.device)",
            "torch.zeros(parts, dtype=torch.int64)",
        )
    ],
    test_balance_loss.test_by_sequence_beside_a_cut_sequence: [
        Bug(
            "the length of whole sequences is taken for that of their parts",
            "parallel.experts.balance_loss:balance_loss",
            "sequence > length // cut.group.size",
            "sequence > length",
            shows=pytest.fail.Exception,
        )
    ],
    IN_A_STEP: [
        Bug(
            "the loss is a mean, with a weight of its own",
            "parallel.experts.balance_loss:balance_loss",
            "routing.count * (part * mass).sum()",
            "routing.count * (part * mass).sum() / tokens",
        ),
        Bug(
            "the load is a mean of ranks",
            "parallel.experts.balance_loss:load_metrics",
            "Weighted(load, choices / routing.count)",
            "Weighted(load / choices, 1 / routing.count)",
        ),
    ],
    OVER_TP: [
        Bug(
            "gradients by rows are partial over tp",
            "parallel.experts.mlp:mlp.run",
            "rows if tp is None else comm.copy_to(rows, tp)",
            "rows",
        )
    ],
    HUGGING_FACE: [
        Bug(
            "each tensor-parallel rank adds the bias",
            "parallel.experts.experts_registry:experts_forward.f",
            "comm.reduce_from(out, tp)",
            "comm.reduce_from(out + 0.5 * bias_of('down_proj_bias', groups, len(rows)), tp)",
        )
    ],
}


@cache
def holds(law: Callable[[], None]) -> bool:
    """Checks a law in the library as it is, once."""
    law()
    return True


@pytest.mark.sample(12)
@pytest.mark.parametrize(("law", "bug"), [pytest.param(law, bug, id=bug.name) for law, bugs in BUGS.items() for bug in bugs])
def test_a_bug_breaks_its_law(law: Callable[[], None], bug: Bug) -> None:
    assert holds(law)
    with planted(bug), pytest.raises(bug.shows):
        law()
