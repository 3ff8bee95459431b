"""``all_gather(out=...)``: the gather, in memory that is given."""

from typing import Any

import pytest
import torch
from hypothesis import given

import functional_ds as fds
from functional_ds import comm, tree
from functional_ds.testing import Inputs, assert_same, inputs
from functional_ds.transforms import mixed_precision, zero


@pytest.mark.law(31)
@given(inputs())
def test_it_is_the_gather(case: Inputs) -> None:
    """The tensors of ``out`` themselves, with the bits of the gather; also where a value lies in its own place of one."""

    def program(x: Any) -> None:
        here = comm.world()
        with comm.ledger() as plain:
            whole = comm.all_gather(x, tiled=False)
        new, own = (tree.map(torch.zeros_like, whole) for _ in range(2))
        with comm.ledger() as into:
            found = comm.all_gather(x, tiled=False, out=new)
        assert [row.elements for row in into.rows] == [row.elements for row in plain.rows]
        tree.map(lambda leaf, value: leaf[here.rank].copy_(value), own, x)
        again = comm.start(comm.all_gather, tree.map(lambda leaf: leaf[here.rank], own), tiled=False, out=own).wait()
        for result, room in ((found, new), (again, own)):
            assert all(a is b for a, b in zip(tree.leaves(result), tree.leaves(room), strict=True))
            assert_same(result, whole)

    case.simulate(program)


def into_itself(count: int) -> tuple[bool, list[float]]:
    here = comm.world()
    whole = torch.full((here.size * count,), -1.0)
    own = whole.view(here.size, count)[here.rank].fill_(float(here.rank))
    found = comm.all_gather(own, out=whole)
    return found is whole and found.data_ptr() == whole.data_ptr(), found[:: max(1, count - 1)].unique().tolist()


def params_stay(stage: Any, more: Any) -> list[bool]:
    """Whether the stored params lie where they lay, step by step."""
    step = fds.compose(*more, zero(stage))(fds.train_step(lambda p, x: (p["w"] @ x).square().sum(), fds.adamw(1e-2)))
    state, found = step.init({"w": torch.ones(6, 5)}), []
    for _ in range(2):
        before = [leaf.data_ptr() for leaf in state.params]
        state, _ = step(state, torch.ones(5) + comm.world().rank)
        found.append([leaf.data_ptr() for leaf in state.params] == before)
    return found


def on_ranks(count: int) -> Any:
    return into_itself(count), params_stay(1, ()), params_stay(2, (mixed_precision("bf16"),))


@pytest.mark.parametrize("count", [3, 200_000])
def test_processes_write_it_in_place(count: int) -> None:
    """Messages arrive where they are wanted; so the params of stages 1 and 2 never move."""
    wanted = (True, [0.0, 1.0]), [True, True], [True, True]
    assert comm.spawn(on_ranks, count, world_size=2) == [wanted, wanted]
    assert comm.simulate(on_ranks, count, world_size=2) == [wanted, wanted]


@pytest.mark.parametrize(
    ("out", "options", "says"),
    [
        (torch.zeros(4), {}, r"out= is torch.float32 \[4\], and the result torch.float32 \[6\]"),
        (torch.zeros(6, dtype=torch.int32), {}, r"out= is torch.int32 \[6\]"),
        (torch.zeros(6, 2)[:, 0], {}, "pass a contiguous tensor like the result"),
        ([torch.zeros(6)] * 2, {}, "out= has 2 tensors for 1 values"),
        (torch.zeros(6), {"uneven": True}, "uneven=True"),
        (torch.zeros(6, requires_grad=True), {}, "would detach its values from the autograd graph"),
    ],
)
def test_what_cannot_be_written_into(out: Any, options: dict[str, Any], says: str) -> None:
    def program() -> None:
        with pytest.raises(ValueError, match=says):
            comm.all_gather(torch.zeros(3), out=out, **options)

    comm.simulate(program, world_size=2)
