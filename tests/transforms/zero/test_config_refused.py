"""What zero refuses, before anything is allocated."""

from typing import Any

import pytest
import torch

import functional_ds as fds
from functional_ds import comm, transforms, units

SCATTER = comm.codecs.compressed(comm.reduce_scatter, comm.codecs.Blocks(8))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stage": 1, "aggregate": "reduce-scatter"}, "aggregate='reduce-scatter' is unknown.*nearest is 'reduce_scatter'"),
        ({"stage": 3, "prefetch": -1}, "prefetch=-1 must be a whole number, at least 0"),
        ({"stage": 3, "prefetch": 1.5}, "prefetch=1.5 must be a whole number"),
        ({"stage": 3, "max_live_units": 0}, "max_live_units=0 must be a whole number, at least 1"),
        ({"stage": 3, "persistence_threshold": -5}, "persistence_threshold=-5 must be"),
        ({"stage": 2, "persistence_threshold": 5}, "persistence_threshold=5: stage 2 keeps all params whole"),
        ({"stage": 1, "prefetch": 0}, "prefetch=0: stage 1 keeps all params whole"),
        ({"stage": 2, "hpz": True}, "hpz=True: stage 2"),
        ({"stage": 3, "hpz": True}, "pass the ranks that share a node"),
        ({"stage": 0, "intra_node": 2}, "intra_node=2: stage 0 has no shards"),
        ({"stage": 0, "aggregate": "owner"}, "aggregate='owner': stage 0"),
        ({"stage": 2, "aggregate": "owner", "intra_node": 2}, "one owner and one level of groups"),
        ({"stage": 2, "aggregate": "owner", "reduce_scatter": SCATTER}, "uses broadcast and reduce"),
        ({"stage": 2, "aggregate": "all_reduce", "reduce_scatter": SCATTER}, "uses all_gather and all_reduce"),
        ({"stage": 2, "gradient_predivide_factor": 0.0}, "gradient_predivide_factor=0.0"),
        ({"stage": 2, "gradient_predivide_factor": float("nan")}, "gradient_predivide_factor=nan"),
        ({"stage": 2, "gradient_predivide_factor": "2"}, "gradient_predivide_factor='2'"),
        ({"stage": True}, "stage=True: ZeRO has the stages"),
        ({"stage": 3, "all_gather": comm.reduce_scatter}, "all_gather=comm.reduce_scatter: it does something else"),
    ],
)
def test_what_makes_no_sense(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        transforms.zero(**options)


@pytest.mark.parametrize("options", [{"intra_node": "intra"}, {"intra_node": True}, {"replicate": "replica"}, {"group": 3}])
def test_what_is_no_group(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"{next(iter(options))}="):
        transforms.zero(3, **options)


def test_what_is_no_collective() -> None:
    with pytest.raises(TypeError, match="all_gather=None is not a collective"):
        transforms.zero(3, all_gather=None)  # type: ignore[arg-type]


def test_groups_that_do_not_factor() -> None:
    def program() -> list[str]:
        mesh = comm.mesh(inter=3, intra=2)
        said = []
        for options in ({"intra_node": 4}, {"intra_node": mesh["inter"]}, {"replicate": mesh["intra"]}):
            with pytest.raises(ValueError, match="group") as error:
                transforms.zero(3, mesh["inter", "intra"], **options)
            said.append(str(error.value))
        return said

    number, block, replicas = comm.simulate(program, world_size=6)[0]
    assert number == "intra_node=4: group 'inter,intra' of 6 does not factor into blocks of that; use 1, 2, 3, 6"
    assert "name both axes, the outer one first" in block
    assert "may have this rank alone in common" in replicas


def test_patterns_are_refused_with_the_nearest_path() -> None:
    step = transforms.zero(2, unit_of=units.by_path({"lyers": "x"}))(fds.train_step(lambda p, x: x, fds.sgd(0.1)))
    with pytest.raises(ValueError, match=r"'lyers' matches no path; the nearest is 'layers.w'"):
        step.init({"layers.w": torch.ones(3)})


def test_reports_that_do_not_factor() -> None:
    with pytest.raises(ValueError, match="n=6: it does not factor into blocks of intra_node=4"):
        transforms.zero(3, intra_node=4).cost_report({"w": torch.ones(3)}, n=6)
