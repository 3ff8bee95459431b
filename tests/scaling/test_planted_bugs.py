"""Bugs of predictions, planted one at a time: each breaks a count that a run executes."""

from collections.abc import Callable
from functools import partial

import attrs
import pytest

from functional_ds.scaling import MeshPlan
from tests.planting import Bug, planted
from tests.scaling import test_predict_run, test_rank_share
from tests.scaling.test_rank_share import GPT, LLAMA

SHARE, SIZES, RUN = "scaling.mesh_plan", "scaling.transformer", "scaling.predict_run"

sliced = partial(test_rank_share.test_a_run_sends_holds_and_computes_what_is_counted, GPT, MeshPlan(dp=2, tp=2, stage=1))
again = partial(
    test_rank_share.test_a_run_sends_holds_and_computes_what_is_counted, LLAMA, MeshPlan(dp=1, tp=2, recompute="needed")
)
layer = partial(test_rank_share.test_a_layer_keeps_what_is_counted, attrs.evolve(GPT, dropout=True), 1)
bubble = partial(test_predict_run.test_bubble_and_memory_are_the_schedules, 2, 2, 4)

BUGS: dict[Callable[[], None], list[Bug]] = {
    sliced: [
        Bug(
            "the embedding sends nothing",
            "scaling.mesh_plan:stage_passes",
            "2 * layers + first",
            "2 * layers",
        ),
        Bug("a tied head is another table", "scaling.mesh_plan:rank_share", "table * (not again)", "table"),
        Bug("norms are cut", "scaling.mesh_plan:rank_share", "model.layer_whole", "model.layer_whole // tp"),
        Bug("attention is half", "scaling.transformer:Transformer.layer_flops", "4 * self.length", "2 * self.length"),
    ],
    again: [
        Bug(
            "what runs again sends nothing",
            "scaling.mesh_plan:stage_passes",
            "_AGAIN[plan.recompute]",
            "_AGAIN['none']",
        ),
        Bug(
            "the last product runs again",
            "scaling.mesh_plan:stage_passes",
            "layer.flops - spared",
            "layer.flops",
        ),
    ],
    layer: [
        Bug(
            "masks take no memory",
            "scaling.transformer:Transformer.layer_kept",
            "4 * 2 * h + 2 * h * self.dropout",
            "4 * 2 * h",
        )
    ],
    test_rank_share.test_a_pipeline_passes_what_is_counted: [
        Bug(
            "gradients do not come back",
            "scaling.mesh_plan:rank_share",
            "(stage % plan.pp == place) * (stage + 1 < plan.stages) + ((stage + 1) % plan.pp == place) * (stage "
            "+ 1 < plan.stages)",
            "(stage % plan.pp == place) * (stage + 1 < plan.stages)",
        ),
    ],
    bubble: [
        Bug(
            "a micro-batch more",
            "scaling.mesh_plan:MeshPlan.schedule",
            "interleaved_one_f_one_b(self.pp, self.micro_batches, v=self.chunks)",
            "interleaved_one_f_one_b(self.pp, self.micro_batches + 2, v=self.chunks)",
        )
    ],
    test_predict_run.test_a_step_takes_its_operations: [
        Bug(
            "a stage has one layer",
            "scaling.mesh_plan:stage_passes",
            "{layer: layers, moved: layers, head: last}",
            "{layer: 1, moved: layers, head: last}",
        ),
    ],
}
CASES = [pytest.param(law, bug, id=bug.name) for law, bugs in BUGS.items() for bug in bugs]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("law", "bug"), CASES)
def test_a_law_breaks(law: Callable[[], None], bug: Bug) -> None:
    with planted(bug), pytest.raises(bug.shows):
        law()
