"""Bugs of the comparison of steps and of calls, each planted alone: a test must break."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from functional_ds import comm
from tests.comm import test_alike
from tests.planting import Bug, planted
from tests.step import test_agreement

pytestmark = pytest.mark.timeout(60)

STEPS, RANKS, TEXTS = "step.guards", "comm.agreement.agree", "comm.agreement.description"


def first(case: str) -> None:
    for odd in (0, 2):
        usual, other, _ = test_agreement.OTHERS[case]
        for said in comm.simulate(test_agreement.begun, usual, other, odd, world_size=3):
            assert f"rank {odd} has " in said


@pytest.mark.parametrize(
    ("law", "bug"),
    [
        (
            partial(first, "rate"),
            Bug(
                "smaller numbers win",
                "comm.agreement.agree:differences",
                "low == -high",
                "low == number",
                shows=comm.errors.CommError,
            ),
        ),
        (
            partial(first, "own schedule"),
            Bug("options are not compared", "step.guards:entries", "' '.join((layer.exact for layer in layers))", "''"),
        ),
        (
            partial(first, "closure"),
            Bug("closures are not read", "comm.agreement.description:_function", "used[name] = _content(cell)", "pass"),
        ),
        (partial(first, "closure"), Bug("optimizers are their names", "step.guards:entries", "described(value)", "''")),
        (
            partial(test_agreement.test_a_whole_mesh_compares, 3),
            Bug(
                "one axis is enough",
                f"{RANKS}:differences",
                'for channel in channels:\n    channel.world.agreed(f"{what} ({number:x})", channel)\n'
                '    least = all_reduce(least, channel, op="min")',
                'for channel in channels[:1]:\n    channel.world.agreed(f"{what} ({number:x})", channel)\n'
                '    least = all_reduce(least, channel, op="min")',
                shows=comm.errors.CommError,
            ),
        ),
        (
            partial(test_agreement.test_what_is_a_ranks_own_is_no_difference, Path("out")),
            Bug(
                "groups have names",
                "step.guards:_without_names",
                "text = re.sub(f'{re.escape(repr(group.name))} of (?=\\\\d)', '', text)",
                "re.sub(f'{re.escape(repr(group.name))} of (?=\\\\d)', '', text)",
                shows=ValueError,
            ),
        ),
        (
            partial(test_alike.test_it_is_named, test_alike.other_causality, None),
            Bug(
                "masks are not compared",
                "parallel.sequence.cut_attention:cut_attention.attend",
                "alike(what, ranks, **same, layout=how)",
                "alike(what, ranks, layout=how)",
                shows=pytest.fail.Exception,
            ),
        ),
        (
            partial(test_alike.test_it_is_named, test_alike.other_labels, None),
            Bug(
                "labels are not compared",
                "parallel.tensor.vocabulary:cross_entropy",
                "alike('tp.cross_entropy', here, labels=labels, label_smoothing=label_smoothing, z_loss=z_loss)",
                "alike('tp.cross_entropy', here, label_smoothing=label_smoothing, z_loss=z_loss)",
                shows=pytest.fail.Exception,
            ),
        ),
        (
            test_alike.test_it_ends_with_the_block,
            Bug(
                "it never ends",
                "comm.agreement.alike:alike",
                "world.made_for[key] = before",
                "pass",
                shows=comm.errors.MismatchError,
            ),
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Bug) else "",
)
def test_a_bug_breaks_a_test(law: Callable[[], Any], bug: Bug, tmp_path: Path) -> None:
    law = partial(law.func, tmp_path) if isinstance(law, partial) and law.args == (Path("out"),) else law
    law()
    with planted(bug), pytest.raises(bug.shows):
        law()
