"""Bugs of the command line, planted one at a time: each breaks a law."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from functional_ds.cli.hosts_command import HostSlots, filtered
from functional_ds.cli.words.errors_in_one_line import CommandError
from functional_ds.dry_run.operations import SizedOperation
from functional_ds.state_dict.errors import StructureError
from tests.cli import test_axes, test_calibration, test_forecast, test_hosts, test_peaks, test_plan, test_tune
from tests.cli.test_checkpoint_commands import averages_are_converted, masters_are_converted
from tests.dry_run import test_events, test_operations
from tests.dry_run.test_operations import X
from tests.planting import Bug, planted

SHAPE, COST = "cli.planning.values_free_step", "dry_run.operations"
FIT, HALVING = "cli.tuning.calibration", "cli.tuning.trial"


def peak(model: str, stage: int) -> Callable[[], None]:
    return partial(test_plan.test_the_peak_is_within_ten_percent_of_the_allocators, model, stage, False)


def costs(run: Callable[[], object], expected: SizedOperation) -> Callable[[], None]:
    return partial(test_operations.test_an_operation_is_its_kind_and_sizes, run, expected)


def exclusion() -> None:
    hosts = [HostSlots("a", (0, 1), 2), HostSlots("b", (0, 1), 2)]
    assert [(host.name, host.slots) for host in filtered(hosts, exclude="a:0@b")] == [("a", (1,))]


def conversion() -> None:
    with TemporaryDirectory() as folder:
        masters_are_converted(Path(folder))


def conversion_of_states() -> None:
    with TemporaryDirectory() as folder:
        averages_are_converted(Path(folder))


BUGS: dict[Callable[[], None], list[Bug]] = {
    peak("attention", 1): [
        Bug("attention by whole matrices", "dry_run.dry_run:_KernelsOf._attention", "q.dim() != 4", "q.dim() == 4")
    ],
    peak("blocks", 3): [
        Bug(
            "results are not seen",
            "dry_run.events:EventRecorder.add",
            "self.note(result)",
            "...",
        ),
    ],
    partial(test_plan.test_the_peak_is_within_ten_percent_of_the_allocators, "attending", 0, True): [
        Bug(
            "what is recomputed has other kernels",
            "dry_run.dry_run:kernels_of",
            "with mode, instead_of_engine(within):\n    ...",
            "with mode:\n    ...",
            CommandError,
        ),
    ],
    partial(test_peaks.test_a_collective_takes_memory_as_over_gloo, 3): [
        Bug(
            "collectives take no memory but results",
            "comm.worlds.gloo_shapes:GlooShapesWorld.carried",
            "ProcessHandle.begin(call, tensors, group, begin)",
            "ShapesWorld.carried(self, call, tensors, group)",
        ),
    ],
    test_plan.test_activations_are_kept_beside_gathered_units: [
        Bug(
            "storages without values are one",
            "transforms.zero.units.saved_places:_place",
            "(storage.device.type != 'meta' and storage.data_ptr()) or -StorageWeakRef(storage).cdata",
            "storage.data_ptr()",
        ),
    ],
    costs(lambda: X.view(-1), SizedOperation("copies")): [
        Bug("views move bytes", "dry_run.operations:operation_of", "func.is_view or name in _FREE", "name in _FREE"),
    ],
    costs(lambda: torch.zeros(8, 4).mul_(X), SizedOperation("elementwise", bytes=3 * 128)): [
        Bug(
            "what is changed in place is not written",
            "dry_run.operations:operation_of",
            "_bytes(changed) + _bytes(fresh)",
            "_bytes(fresh)",
        ),
    ],
    test_calibration.test_no_factor_is_negative: [
        Bug(
            "factors are any numbers",
            "cli.tuning.calibration:non_negative_least_squares",
            "best <= 0",
            "best != best",
            ValueError,
        ),
    ],
    test_calibration.test_on_a_gpu_what_is_hidden_is_not_fitted_to: [
        Bug(
            "what is hidden counts",
            "cli.tuning.calibration:_counting",
            "0.0 if name in hidden else perfect[name]",
            "perfect[name]",
        ),
    ],
    partial(test_calibration.test_a_few_wrong_times_move_the_fit_little, 0): [
        Bug(
            "every run counts in full",
            "cli.tuning.calibration:fitted",
            "(_USUAL / errors.clamp(min=_USUAL)).sqrt()",
            "torch.ones_like(errors)",
        ),
    ],
    test_events.test_what_is_repeated_is_computed_as_often: [
        Bug(
            "a loop's rounds are computed once",
            "dry_run.events:_CallEvents.multiply",
            "body * (times - 1)",
            "[event for event in body if not hasattr(event, 'flops')] * (times - 1)",
        ),
    ],
    test_events.test_memory_that_is_gone_is_given_back: [
        Bug("what is freed stays", "dry_run.events:EventRecorder._freed", "-made.bytes", "0"),
        Bug(
            "what was given back counts",
            "dry_run.events:EventRecorder.resized",
            "storage.nbytes() != made.bytes",
            "storage.nbytes() > made.bytes",
        ),
    ],
    test_operations.test_recomputed_operations_are_known: [
        Bug(
            "backward passes are recomputation",
            "dry_run.operations:operation_of",
            "torch.is_grad_enabled() and backward_pass() != -1",
            "backward_pass() != -1",
        ),
    ],
    test_tune.test_the_fastest_wins_and_the_dead_are_last: [
        Bug("the slower half goes on", "cli.tuning.trial:halve", "well[:kept]", "well[len(well) - kept:]"),
        Bug(
            "rounds have equal lengths",
            "cli.tuning.trial:halve",
            "TrialRun(candidate, round_, steps << round_, measure(candidate, steps << round_))",
            "TrialRun(candidate, round_, steps, measure(candidate, steps << round_))",
        ),
    ],
    test_hosts.test_whatever_ssh_gets_is_a_host_and_a_quoted_command: [
        Bug(
            "ssh may take a host for an option",
            "cli.hosts_command:ssh_commands",
            "['ssh', '--', host.name, line]",
            "['ssh', host.name, line]",
        ),
    ],
    exclusion: [
        Bug(
            "what is excluded stays",
            "cli.hosts_command:filtered",
            "s not in named.get(host.name, ())",
            "s in named.get(host.name, ())",
        ),
    ],
    conversion_of_states: [
        Bug(
            "params alone", "cli.stored.writing:state_names", "checkpoint.tensors", "checkpoint.params.values()", StructureError
        ),
    ],
    test_tune.test_a_trial_of_tensor_parallel_ranks_has_the_predicted_state: [
        Bug(
            "groups are the whole world",
            "jobs.resolve:_group",
            "around.mesh is None",
            "True",
            CommandError,
        ),
    ],
    test_axes.test_every_mesh_is_enumerated: [
        Bug("a pipeline's ranks are of dp, too", "cli.tune_command:candidates_of", "tp * sp * pp", "tp * sp"),
    ],
    test_axes.test_a_mesh_is_a_line: [
        Bug("neighbours are a pipeline's", "cli.planning.candidate:first_ranks", "place * stride", "place"),
    ],
    partial(test_axes.test_a_bubble_of_equal_ranks, 2, 4): [
        Bug(
            "once a step is once a micro-batch",
            "cli.planning.forecast:bubble_seconds",
            "timed.makespan + max(beside)",
            "timed.makespan",
        ),
    ],
    partial(test_forecast.test_bounds_of_what_communication_takes, machine=test_forecast.HOSTS): [
        Bug(
            "a step ends before its collectives",
            "cli.planning.forecast:communicating_seconds",
            "(*events, end)",
            "events",
        ),
        Bug(
            "hosts have a link for each collective",
            "cli.planning.forecast:communicating_seconds",
            "max(now, link_free)",
            "now",
        ),
    ],
    partial(test_forecast.test_more_hosts_never_send_fewer_bytes_to_each_other, "all_reduce"): [
        Bug(
            "a host's own ranks are on others",
            "comm.record.ledger:Row.leaving",
            "rank // ranks_per_node != self.rank // ranks_per_node",
            "rank != self.rank",
        ),
        Bug(
            "all receivers get as much",
            "comm.record.ledger:Row.leaving",
            "sum(self.sent_to.values())",
            "0",
        ),
    ],
    conversion: [
        Bug("rounded values are converted", "checkpointing.dcp:CheckpointReader.params", "reversed(FORMS)", "FORMS"),
    ],
}
CASES = [pytest.param(law, bug, id=bug.name) for law, bugs in BUGS.items() for bug in bugs]


@pytest.mark.sample(7)
@pytest.mark.parametrize(("law", "bug"), CASES)
def test_a_law_breaks(law: Callable[[], None], bug: Bug) -> None:
    with planted(bug), pytest.raises(bug.shows):
        law()
