"""What is counted, as what, and where it lies."""

from typing import Any

import attrs
import pytest
import torch

import functional_ds as fds
from functional_ds import comm, memory
from functional_ds import transforms as T


@attrs.frozen
class OnDisk:
    """What an offloaded leaf may look like."""

    nbytes: int


@attrs.frozen
class Elsewhere:
    """What another kind of offloaded leaf may look like."""

    nbytes: int
    place: str


def started(*chain: fds.Transform) -> tuple[fds.Step, fds.State]:
    step = fds.compose(*chain)(fds.train_step(lambda p, x: (p["w"] * x).sum(), fds.adam(0.1)))
    return step, step.init({"w": torch.ones(100)})


def test_kinds() -> None:
    """Each piece of memory is of one kind, the first that it fits; the total is their sum."""
    _, state = started(T.ema(0.5), T.mixed_precision("bf16"))
    found = memory.measured(state, gradients=200)
    assert (found.params, found.masters, found.optimizer, found.gradients) == (200, 400, 804, 200)
    assert found.buffers == 400 + 8 + memory.stored(state.key)  # the mean, the count, the key
    assert found.state == memory.stored(state) == sum(found.places.values())
    assert found.total == found.state + 200


def test_what_is_shared_counts_once() -> None:
    """A state whose slot refers to the params, whole or as a view, holds nothing more."""
    _, state = started()
    again = state.put(copy=state.params["w"][3:], other=torch.ones(5))
    assert memory.measured(again).buffers == memory.measured(state).buffers + 20
    assert memory.measured(again).params == 400


def test_what_is_elsewhere() -> None:
    """A leaf with ``nbytes`` counts where its ``place`` says; without one, on a disk."""
    _, state = started()
    moved = fds.tree.replace(state, optimizer=[OnDisk(1000), Elsewhere(24, "host"), OnDisk(8)])
    found = memory.measured(moved)
    assert found.optimizer == 1032
    assert found.places == {"cpu": 400 + found.buffers, "disk": 1008, "host": 24}
    assert memory.places([torch.ones(2), torch.empty(3, device="meta")]) == {"cpu": 8, "meta": 12}


def test_the_exact_shards_of_compressed_gathers_are_masters() -> None:
    """They are params as the optimizer has them."""

    def program() -> memory.Memory:
        gather = comm.codecs.compressed(comm.all_gather, comm.codecs.Blocks(8))
        return memory.measured(started(T.zero(1, all_gather=gather))[1])

    for found in comm.simulate(program, world_size=2):
        assert (found.params, found.masters) == (400, 200)


def test_all_ranks() -> None:
    """Everybody gets everybody's."""

    def program() -> tuple[Any, list[Any]]:
        found = memory.measured(started(T.zero(3))[1], gradients=comm.world().rank).plus(peak=7, activations=5)
        return found, found.of_all_ranks()

    results = comm.simulate(program, world_size=3)
    for _, everybody in results:
        assert everybody == [own for own, _ in results]
        assert [other.gradients for other in everybody] == [0, 1, 2]
        assert everybody[0].peak == 7


def test_text_and_bad_input() -> None:
    """A line a kind; a donated state says so, and anything else is refused."""
    step, state = started()
    assert str(memory.measured(state)).splitlines()[0].split() == ["params", "400"]
    with pytest.raises(TypeError, match="is not a State"):
        memory.measured(state.params)
    step(state, torch.ones(100))
    with pytest.raises(fds.DonatedStateError):
        memory.measured(state)
