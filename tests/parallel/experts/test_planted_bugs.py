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
            "parallel.experts.grouped",
            "_GroupedOuterProduct.apply(rows, grad, ctx.groups)",
            "_GroupedOuterProduct.apply(rows, 2 * grad, ctx.groups)",
        ),
        Bug("rows are not sorted by expert", EXCHANGE, "if blocks == sorted(blocks):", "if True:"),
        Bug(
            "results are not put back in the order of their sources", EXCHANGE, RESULT, "f(spread(arrived, by_expert), groups)"
        ),
        Bug(
            "weights get no gradient",
            EXCHANGE,
            "return combine(back, self.routing.weights, order)",
            "return combine(back, self.routing.weights.detach(), order)",
            shows=Exception,
        ),
        Bug("shared experts are left out", EXCHANGE, "return out if beside is None else out + beside", "return out"),
        Bug(
            "weights go with the rows of other choices", ORDER, ".index_select(0, order.pairs)[:, None]", "[: len(rows), None]"
        ),
        Bug(
            "a token's rows are not summed in the backward pass",
            ORDER,
            "combine(grad, None, ctx.order)",
            "grad[: len(grad) // 2]",
            shows=Exception,
        ),
    ],
    GATHERED: [
        Bug(
            "every rank has the first experts", EXCHANGE, 'everyones["ids"] - group.rank * len(counts)', 'everyones["ids"] - 0'
        ),
        Bug(
            "others' choices are computed",
            EXCHANGE,
            "kept = (local >= 0) & (local < len(counts))",
            "kept = local < len(counts)",
            shows=Exception,
        ),
    ],
    BY_RANK: [
        Bug("a rank's part of a token counts once for each choice", EXCHANGE, "~same.tril(-1).any(-1)", "same.any(-1)"),
    ],
    KEPT: [
        Bug("dropped choices are combined", ORDER, "picked.masked_fill_(~order.kept[:, j, None], 0)", "pass"),
        Bug("dropped choices are sent", EXCHANGE, "order = order.cut(sum(sent))", "pass", shows=Exception),
    ],
    NO_TOKENS: [
        Bug("a rank without tokens leaves the others alone", EXCHANGE, "if not len(rows):", "if False:", shows=Exception)
    ],
    OVERFLOW: [
        Bug(
            "an overflow is known where it is",
            EXCHANGE,
            "overflow_error(routing, [by_rank[-3:] for by_rank in counts])",
            "overflow_error(routing, [routing.overflow.tolist()])",
            shows=Exception,
        )
    ],
    SENT: [
        Bug(
            "rows are sent twice",
            EXCHANGE,
            "rows = spread(rows, order)",
            "rows = spread(rows, order).repeat(1, 2)",
            shows=Exception,
        )
    ],
    HALF: [Bug("results are summed in bf16", ORDER, "wide = torch.promote_types(wide, torch.float32)", "wide = rows.dtype")],
    MIXTRAL: [
        Bug("two softmaxes", ROUTING, GATES, "weights = scores.softmax(1).gather(1, chosen)"),
        Bug("not renormalised", ROUTING, "    if normalise:\n", "    if False:\n"),
    ],
    DEEPSEEK: [
        Bug("groups that are not chosen score zero", ROUTING, 'float("-inf")', "0.0"),
        Bug("a group's score is its best expert's", ROUTING, ".topk(group_top).values", ".topk(1).values"),
        Bug("the factor is left out", ROUTING, "weights * scale if scale != 1 else weights", "weights"),
        Bug("the bias does not choose", ROUTING, "choice = choice + bias", "pass"),
    ],
    BIAS: [Bug("the bias weighs, and has a gradient", ROUTING, GATES, "weights = (scores + bias).gather(1, chosen)")],
    NOISE: [
        Bug("noise weighs", ROUTING, GATES, "weights = choice.gather(1, chosen)"),
        Bug("layers draw the same noise", ROUTING, "key.uniform(wide, name)", "key.uniform(wide, 'route')"),
    ],
    DROPPED: [
        Bug(
            "capacity is of local counts",
            "parallel.experts.capacity",
            "groups, limit = tokens // self.rows, self.limit(k, experts)",
            "groups, limit = tokens // self.rows, math.ceil(self.factor * tokens * k / experts)",
        ),
        Bug(
            "the smallest weights are kept",
            "parallel.experts.capacity",
            "argsort(descending=True, stable=True)",
            "argsort(stable=True)",
        ),
    ],
    GLOBAL: [
        Bug("counts are each rank's", BALANCE, "    if group is not None:\n", "    if False:\n"),
        Bug(
            "the loss is scaled by the ranks",
            BALANCE,
            "return routing.count * (part * mass)",
            "return 2 * routing.count * (part * mass)",
        ),
        Bug("padding counts", BALANCE, "counts.repeat_interleave(k)", "torch.ones_like(counts).repeat_interleave(k)"),
    ],
    SEQUENCE: [
        Bug(
            "sequences are mixed", BALANCE, "torch.arange(parts, device=counts.device)", "torch.zeros(parts, dtype=torch.int64)"
        )
    ],
    IN_A_STEP: [
        Bug("the loss is a mean, with a weight of its own", BALANCE, "(part * mass).sum()", "(part * mass).sum() / tokens"),
        Bug(
            "the load is a mean of ranks",
            BALANCE,
            "Weighted(load, choices / routing.count)",
            "Weighted(load / choices, 1 / routing.count)",
        ),
    ],
    OVER_TP: [
        Bug(
            "gradients by rows are partial over tp",
            "parallel.experts.mlp",
            "grouped_linear(rows if tp is None else comm.copy_to(rows, tp), gate_up, groups)",
            "grouped_linear(rows, gate_up, groups)",
        )
    ],
    HUGGING_FACE: [
        Bug(
            "each tensor-parallel rank adds the bias",
            "parallel.experts.experts_registry",
            "out = out if tp is None else comm.reduce_from(out, tp)",
            "out = out if tp is None else comm.reduce_from(out + 0.5 * bias_of('down_proj_bias', groups, len(rows)), tp)",
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
