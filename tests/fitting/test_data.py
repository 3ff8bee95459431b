"""Batches that go on from where they were."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from functional_ds import comm
from functional_ds.fitting import BatchSource, Epochs, Indexed, Replayed, Stateful
from functional_ds.fitting.data import as_source
from functional_ds.fitting.positions import as_json, from_json, gathered, local_position
from functional_ds.testing import assert_same

COUNT = 9


class Loader:
    """A stateful loader as torchdata has them, with a position that is more than a number."""

    def __init__(self) -> None:
        self.drawn = 0
        self.order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(1))

    def __iter__(self) -> Iterator[int]:
        while self.drawn < COUNT:
            self.drawn += 1
            yield int(self.order[self.drawn - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn, self.order = state["drawn"], state["order"]


KINDS = {
    "function": lambda: Indexed(lambda index: index, COUNT),
    "sequence": lambda: as_source([10 * i for i in range(COUNT)]),
    "loader": lambda: as_source(Loader()),
    "iterator": lambda: as_source(iter(range(COUNT))),
    "iterable": lambda: as_source({str(i): None for i in range(COUNT)}.keys()),
}


@pytest.mark.law(37)
@pytest.mark.parametrize("kind", KINDS)
@given(behind=st.integers(0, COUNT))
def test_a_source_goes_on_where_it_was(kind: str, behind: int) -> None:
    """at(position after k batches) = drop k ∘ at(beginning), through JSON."""
    whole = KINDS[kind]().at(None)
    drawn = [next(whole) for _ in range(behind)]
    position = from_json(as_json(whole.position))
    rest = list(_all(whole))
    assert list(_all(KINDS[kind]().at(position))) == rest
    assert len(drawn) + len(rest) == COUNT


def _all(reader: Any) -> Iterator[Any]:
    while True:
        try:
            yield next(reader)
        except StopIteration:
            return


def test_a_function_is_not_called_for_what_lies_behind() -> None:
    called: list[int] = []
    reader = Indexed(called.append).at(1000)
    next(reader)
    assert called == [1000]
    assert reader.position == 1001


def test_an_iterator_that_is_too_short_to_replay_is_refused() -> None:
    with pytest.raises(ValueError, match="had consumed 5 batches, and this iterable yields 3"):
        Replayed(iter(range(3))).at(5)


def test_what_counts_as_which_source() -> None:
    own_source = Indexed(abs)
    assert as_source(own_source) is own_source
    assert isinstance(as_source(Loader()), Stateful)
    assert isinstance(as_source(range(3)), Indexed)
    assert isinstance(as_source(itertools.count()), Replayed)
    assert isinstance(as_source(lambda index: index), BatchSource)
    with pytest.raises(TypeError, match="batches=3: pass a function"):
        as_source(3)


positions = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=3)
    | st.binary(max_size=4)
    | st.builds(
        lambda rows, dtype: torch.tensor(rows).to(dtype),
        st.lists(st.integers(0, 9)),
        st.sampled_from((torch.int64, torch.bfloat16)),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3),
    max_leaves=6,
)


@given(positions)
def test_positions_survive_json(position: Any) -> None:
    """from_json ∘ as_json = id."""
    import json

    assert_same_position(from_json(json.loads(json.dumps(as_json(position)))), position)


def assert_same_position(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert_same(found, expected)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same_position(one, other)
    elif isinstance(expected, dict):
        assert_same_position([*found], [*expected])
        assert_same_position([*found.values()], [*expected.values()])
    else:
        assert found == expected


def test_what_json_cannot_hold_is_refused() -> None:
    with pytest.raises(TypeError, match="position holds set"):
        as_json({"seen": {1, 2}})


@given(st.lists(st.integers(0, 1), min_size=1, max_size=4))
def test_each_rank_gets_its_own_position_back(numbers: list[int]) -> None:
    """own ∘ gathered = id; a position that all share serves any number of ranks."""

    def program() -> tuple[Any, Any]:
        mine = {"drawn": numbers[comm.world().rank]}
        stored = gathered(mine)
        assert local_position(stored) == mine
        return stored

    stored = comm.simulate(program, world_size=len(numbers))[0]
    if len(set(numbers)) == 1:
        assert comm.simulate(local_position, stored, world_size=3) == [{"drawn": numbers[0]}] * 3
    else:
        with pytest.raises(ValueError, match=f"a position for each of {len(numbers)} ranks, and this run has 5"):
            comm.simulate(local_position, stored, world_size=5)


@given(st.integers(1, 4), st.integers(0, 12), st.booleans())
def test_epochs_go_on_where_they_were(length: int, behind: int, replayed: bool) -> None:
    """law: ``at(position)`` gives what the reader gave from there on, over the end of an epoch, too."""
    data = list(range(length))
    source = Epochs(dict.fromkeys(data).keys() if replayed else data)
    reader = source.at(None)
    assert [next(reader) for _ in range(behind)] == [index % length for index in range(behind)]
    again = source.at(reader.position)
    assert [next(again) for _ in range(5)] == [next(reader) for _ in range(5)]


def test_epochs_end_and_begin() -> None:
    class Sampled:
        def __init__(self) -> None:
            self.sampler, self.seen = self, list[int]()

        def set_epoch(self, epoch: int) -> None:
            self.seen.append(epoch)

        def __iter__(self) -> Iterator[int]:
            return iter([10 * self.seen[-1], 1])

    batches = Sampled()
    reader = Epochs(batches, count=2).at(None)
    assert list(iter(lambda: next(reader, None), None)) == [0, 1, 10, 1]
    with pytest.raises(TypeError, match="is an iterator, which cannot begin again"):
        Epochs(iter([1]))
    with pytest.raises(ValueError, match="count=0"):
        Epochs([1], count=0)
    with pytest.raises(ValueError, match=r"epoch 1 of .* has no batch"):
        next(Epochs([]).at(None))


def test_a_shuffle_goes_on_in_any_epoch() -> None:
    """Whatever else draws from torch's generator meanwhile, and in a process that begins with another seed."""
    loader = torch.utils.data.DataLoader(torch.arange(7), batch_size=2, shuffle=True)
    torch.manual_seed(1)
    reader, whole, places = Epochs(loader, seed=5).at(None), [], []
    for _ in range(13):
        places.append(reader.position)
        whole.append(next(reader).tolist())
        torch.rand(3)
    assert [sorted(itertools.chain(*whole[i : i + 4])) for i in (0, 4, 8)] == [[*range(7)]] * 3
    assert len({str(whole[i : i + 4]) for i in (0, 4, 8)}) == 3
    for behind, place in enumerate(places):
        torch.manual_seed(2 + behind)
        again = Epochs(loader, seed=5).at(place)
        assert [next(again).tolist() for _ in range(13 - behind)] == whole[behind:]
    other = Epochs(loader).at(None)
    assert [next(other).tolist() for _ in range(4)] != whole[:4]


class Shards(torch.utils.data.IterableDataset[Tensor]):
    """Draws an order for each of two shards, when it comes to it."""

    def __iter__(self) -> Iterator[Tensor]:
        for shard in (0, 4):
            yield from shard + torch.randperm(4)


@pytest.mark.parametrize("kind", ["generator", "sampler", "shards", "augmented"])
def test_whatever_an_epoch_draws_goes_on(kind: str) -> None:
    """Generators of the loader's own, orders that are drawn late in an epoch, and noise on rows."""
    data = torch.arange(7)

    def noisy(rows: Any) -> Tensor:
        return torch.stack([torch.as_tensor(row) for row in rows]) + torch.rand(())

    def make() -> Any:
        made = torch.Generator().manual_seed(3)
        return {
            "generator": lambda: torch.utils.data.DataLoader(data, 2, shuffle=True, generator=made),  # type: ignore[arg-type]
            "sampler": lambda: torch.utils.data.DataLoader(
                data,
                2,
                sampler=torch.utils.data.RandomSampler(data, generator=made),  # type: ignore[arg-type]
            ),
            "shards": lambda: torch.utils.data.DataLoader(Shards(), 2),
            "augmented": lambda: torch.utils.data.DataLoader(data, 2, shuffle=True, collate_fn=noisy),  # type: ignore[arg-type]
        }[kind]()

    torch.manual_seed(1)
    reader, whole, places = Epochs(make()).at(None), [], []
    for _ in range(11):
        places.append(reader.position)
        whole.append(next(reader).tolist())
        torch.rand(3)
    assert whole[:4] != whole[4:8]
    for behind, place in enumerate(places):
        torch.manual_seed(1)
        again = Epochs(make()).at(place)
        assert [next(again).tolist() for _ in range(11 - behind)] == whole[behind:]


class Wrapping:
    """A loader with a state that takes the end of an epoch for the beginning of another, as torchdata's does."""

    def __init__(self) -> None:
        self.dataset, self.epoch, self.done = self, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        self.done %= 3
        while self.done < 3:
            self.done += 1
            yield 10 * self.epoch + self.done


def test_epochs_of_a_loader_with_a_state() -> None:
    reader, whole, places = Epochs(Wrapping()).at(None), [], []
    for _ in range(9):
        places.append(reader.position)
        whole.append(next(reader))
    assert whole == [1, 2, 3, 11, 12, 13, 21, 22, 23]
    for behind, place in enumerate(places):
        again = Epochs(Wrapping()).at(place)
        assert [next(again) for _ in range(9 - behind)] == whole[behind:]


@pytest.mark.parametrize("batches", [[1, 2, 3], Wrapping()])
def test_what_has_ended_stays_so(batches: Any) -> None:
    """Whoever asks again where it ended gets nothing, however often."""
    source = Epochs(batches, count=2)
    reader = source.at(None)
    for behind in range(7):
        place = reader.position
        assert (next(reader, None) is None) == (behind == 6)
    for ended in (place, reader.position, source.at(reader.position).position):
        assert next(source.at(ended), None) is None
        assert next(Epochs(batches, count=1).at(ended), None) is None


def test_set_epoch_reaches_the_sampler_of_a_batch_sampler() -> None:
    data = torch.arange(8)
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=2, rank=0)  # type: ignore[arg-type]
    batches = torch.utils.data.DataLoader(data, batch_sampler=torch.utils.data.BatchSampler(sampler, 2, drop_last=False))  # type: ignore[arg-type]
    reader = Epochs(batches).at(None)
    epochs = [[next(reader).tolist() for _ in range(2)] for _ in range(3)]
    assert epochs[0] != epochs[1] or epochs[1] != epochs[2]
    assert sampler.epoch == 2
