"""Bugs of the command line, planted one at a time: each breaks a law."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from functional_ds.cli.hosts_command import HostSlots, filtered
from tests.cli import test_plan, test_tune
from tests.cli.test_checkpoint_commands import masters_are_converted
from tests.planting import Bug, planted

SHAPE, HALVING = "cli.planning.values_free_step", "cli.tuning.halving"


def peak(model: str, stage: int) -> Callable[[], None]:
    return partial(test_plan.test_the_peak_is_within_ten_percent_of_the_allocators, model, stage, False)


def exclusion() -> None:
    hosts = [HostSlots("a", (0, 1), 2), HostSlots("b", (0, 1), 2)]
    assert [(host.name, host.slots) for host in filtered(hosts, exclude="a:0@b")] == [("a", (1,))]


def conversion() -> None:
    with TemporaryDirectory() as folder:
        masters_are_converted(Path(folder))


BUGS: dict[Callable[[], None], list[Bug]] = {
    peak("attention", 1): [Bug("attention by whole matrices", SHAPE, "if q.dim() != 4 or", "if q.dim() == 4 or")],
    peak("blocks", 3): [
        Bug("results are not seen", SHAPE, "self.live.note(x for x in tree.leaves(found)", "(x for x in tree.leaves(found)"),
    ],
    test_plan.test_activations_are_kept_beside_gathered_units: [
        Bug(
            "storages without values are one",
            "transforms.zero.saved_places",
            "return storage.data_ptr() or -StorageWeakRef(storage).cdata",
            "return storage.data_ptr()",
        ),
    ],
    test_tune.test_the_fastest_wins_and_the_dead_are_last: [
        Bug("the slower half goes on", HALVING, "for run in well[:kept]]", "for run in well[len(well) - kept :]]"),
        Bug("rounds have equal lengths", HALVING, "TrialRun(each, round_, steps << round_,", "TrialRun(each, round_, steps,"),
    ],
    exclusion: [
        Bug("what is excluded stays", "cli.hosts_command", "if s not in named.get(", "if s in named.get("),
    ],
    conversion: [
        Bug("rounded values are converted", "cli.stored.kinds", "in _EXACT_FIRST:", "in _EXACT_FIRST[::-1]:"),
    ],
}
CASES = [pytest.param(law, bug, id=bug.name) for law, bugs in BUGS.items() for bug in bugs]


@pytest.mark.parametrize(("law", "bug"), CASES)
def test_a_law_breaks(law: Callable[[], None], bug: Bug) -> None:
    with planted(bug), pytest.raises(bug.shows):
        law()
