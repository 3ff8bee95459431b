"""Bugs planted in the check itself: clean programs are accused, or bugs pass, and a test of the check must say so."""

import pytest
import torch

from functional_ds import comm
from tests.comm.variance import test_declarations, test_follow, test_law_51, test_silent_bugs
from tests.comm.variance.test_silent_bugs import SILENT
from tests.planting import Bug, planted


def clean_programs_pass() -> None:
    """Law 51 on one drawn program, the clean programs, and what is no contradiction."""
    assert test_law_51.passes(2, test_law_51.LAYERS, 3) is True
    for case in SILENT:
        test_silent_bugs.test_the_clean_program_passes(case)
    for name in ("in place", "into a buffer", "foreach", "plus zero", "matmul", "scaled sum"):
        test_follow.test_terms_go_through_what_is_linear_and_nothing_else(name)
    test_follow.test_memory_that_is_used_again_is_something_else()
    test_follow.test_memory_that_is_written_into_is_something_else()
    test_follow.test_a_bias_of_each_row_counts_once_a_row()
    test_follow.test_rows_with_a_bias_may_be_gathered_by_a_sum()
    test_follow.test_all_ranks_may_draw_a_batch_and_cut_it("chunk", "where")
    test_follow.test_an_algorithm_of_messages_sums_terms()
    test_follow.test_a_mean_of_what_all_have_is_not()
    test_follow.test_gradients_that_share_memory_are_what_each_is()
    test_follow.test_what_one_rank_draws_is_nobody_elses()
    test_follow.test_each_rank_may_take_another_part_of_what_all_have()


def bugs_are_named() -> None:
    for case in SILENT:
        test_silent_bugs.test_the_bug_is_named(case)
    for name in ("bias", "addmm of products", "plus one", "foreach norm", "square", "masked by one"):
        test_follow.test_terms_go_through_what_is_linear_and_nothing_else(name)
    test_follow.test_what_the_last_rank_alone_does_is_followed()
    test_follow.test_a_sum_over_two_axes_counts_what_one_axis_shares()
    test_follow.test_terms_along_one_axis_are_summed_along_it_and_stay_along_another()
    test_follow.test_a_sum_of_what_all_have_is_named(comm.all_reduce)


def declarations_hold() -> None:
    test_declarations.test_a_gradient_that_never_comes_is_zero()
    test_declarations.test_different_shapes_are_named()
    test_declarations.test_a_rank_that_never_comes_is_named_and_nobody_waits()
    test_declarations.test_values_that_look_alike_are_shown_by_their_bits()
    test_declarations.test_gradients_of_several_passes()
    test_declarations.untouched(comm.replicated, 2)


BUGS = (
    (
        bugs_are_named,
        Bug("all operations are equal", "comm.variance.op_trace:OpTrace.same_program", "self.events == other.events", "True"),
    ),
    (
        bugs_are_named,
        Bug("all zeros are equal", "comm.variance.follow:_GroupWalk._zero", "number in self.program.zeros_differ", "False"),
    ),
    (
        bugs_are_named,
        Bug(
            "all numbers are equal", "comm.variance.follow:_GroupWalk._scalar", "place in self.program.scalars_differ", "False"
        ),
    ),
    (
        bugs_are_named,
        Bug(
            "gradients have their value's kind",
            "comm.variance.follow:_GroupWalk._gradient",
            "variance.dual",
            "variance",
        ),
    ),
    (
        bugs_are_named,
        Bug(
            "a zero is no exception",
            "comm.variance.follow:_GroupWalk._check_summed",
            "state.claimed and (not self._zero(number)) and (not self.bits.differ(key))",
            "self._zero(number) and (not self.bits.differ(key))",
        ),
    ),
    (
        bugs_are_named,
        Bug(
            "every collective is another axis's",
            "comm.variance.follow:_GroupWalk._call",
            "not self.members <= set(group.ranks)",
            "True",
        ),
    ),
    (
        bugs_are_named,
        Bug("a mask brings what it likes", "comm.variance.follow:_GroupWalk._check_terms", "TERMS.get(event.name, ())", "()"),
    ),
    (
        clean_programs_pass,
        Bug(
            "a scale is a term",
            "comm.variance.follow:_GroupWalk._check_terms",
            "TERMS.get(event.name, ())",
            "range(len(event.operands))",
        ),
    ),
    (
        bugs_are_named,
        Bug(
            "products of what all have",
            "comm.variance.follow:_GroupWalk._check_partial",
            "first if product_is_partial else factors",
            "first",
        ),
    ),
    (
        clean_programs_pass,
        Bug(
            "what only some compute is equal", "comm.variance.follow:_GroupWalk._unless_different", "self.bits.some(key)", "[]"
        ),
    ),
    (
        clean_programs_pass,
        Bug("gradients share memory", "comm.variance.watch:RankWatch._gradient_of.hook", "grad.clone()", "grad"),
    ),
    (
        clean_programs_pass,
        Bug(
            "a write leaves views as they were",
            "comm.variance.op_trace:OpTrace._place",
            "memory.tensors.clear()",
            "pass",
        ),
    ),
    (
        bugs_are_named,
        Bug(
            "a bias in a product is no term",
            "comm.variance.follow:_GroupWalk._by_rows",
            "numbers[:1] if name in SUMS_OF_PRODUCTS else ()",
            "()",
        ),
    ),
    (
        clean_programs_pass,
        Bug(
            "a bias of rows counts after their sum",
            "comm.variance.follow:_GroupWalk._by_rows",
            "before if name in KEEPS or name in SUMS or scaled else ''",
            "before",
        ),
    ),
    (
        clean_programs_pass,
        Bug(
            "a split batch is a draw",
            "comm.variance.follow:_GroupWalk._varying",
            "state.drawn and (not self._taken(number))",
            "state.drawn",
        ),
    ),
    (
        clean_programs_pass,
        Bug("each row's bias is counted", "comm.variance.follow:_GroupWalk._repeated", "len(shapes) == 1", "True"),
    ),
    (
        clean_programs_pass,
        Bug(
            "what is written over counts",
            "comm.variance.follow:_GroupWalk._combined",
            "event.operands[1] if event.name == 'copy' and isinstance(event.operands[1], Values) else event.inputs",
            "event.inputs if event.name == 'copy' and isinstance(event.operands[1], Values) else event.inputs",
        ),
    ),
    (
        clean_programs_pass,
        Bug("a mean is a sum", "comm.api:reducing", "group.world.watch is not None", "False"),
    ),
    (
        clean_programs_pass,
        Bug("an algorithm carries terms", "comm.algorithms.allreduce:_all_reduce", "varying(x, group)", "pass"),
    ),
    (
        declarations_hold,
        Bug(
            "a gradient that never comes is none",
            "comm.variance.declarations:Declarations.all_found",
            "torch.zeros_like(leaf)",
            "leaf",
        ),
    ),
    (
        declarations_hold,
        Bug(
            "any shapes agree",
            "comm.variance.declarations:Claim.agreement",
            "[(leaf.dtype, leaf.shape) for leaf in self.leaves]",
            "[0 for _ in self.names]",
        ),
    ),
    (
        declarations_hold,
        Bug("the first pass is all", "comm.variance.watch:RankWatch._turn", "self.counts[key] += 1", "self.counts[key] = 1"),
    ),
    (
        declarations_hold,
        Bug(
            "someone always checks",
            "comm.declare:_declare",
            "if watch is None or group.size == 1:\n    return",
            "x[0].register_hook(print) if watch is None else 0\nif watch is None or group.size == 1:\n    return",
        ),
    ),
)


@pytest.mark.parametrize("law", [clean_programs_pass, bugs_are_named, declarations_hold])
def test_the_check_is_right(law: object) -> None:
    assert callable(law)
    law()


@pytest.mark.sample(6)
@pytest.mark.parametrize(("law", "bug"), BUGS, ids=[bug.name for _, bug in BUGS])
def test_a_bug_of_the_check_is_found(law: object, bug: Bug) -> None:
    assert callable(law)
    with (
        planted(bug),
        pytest.raises((AssertionError, pytest.fail.Exception, comm.errors.VarianceError, LookupError, RuntimeError, TypeError)),
    ):
        law()
    torch.manual_seed(0)
