"""What zero's arguments send and hold: the ledger shows what the report says, and the report what the formulas say (law 21)."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import functional_ds as fds
from functional_ds import comm, transforms, units
from functional_ds.sharding.leaf_slice import LeafSlice
from functional_ds.sharding.sources import sliced
from functional_ds.transforms.zero.process_groups import ProcessGroups
from tests.transforms.zero.test_config import GRIDS, Grid, arguments, compressed, strategy

WIDTH, LAYERS = 8, 4


def chain_params() -> dict[str, Tensor]:
    """Each unit is used once, by neighbouring operations, and needed again in the backward pass."""
    g = torch.Generator().manual_seed(1)
    params = {"h.0.scale": torch.ones(WIDTH)}
    for i in range(LAYERS):
        params[f"h.{i}.w"] = torch.randn(WIDTH, WIDTH, generator=g) / 3
        params[f"h.{i}.b"] = torch.ones(WIDTH)
    return params


def chain_loss(p: Any, x: Tensor) -> Tensor:
    x = x * p["h.0.scale"]
    for i in range(LAYERS):
        x = torch.tanh((x @ p[f"h.{i}.w"]) * p[f"h.{i}.b"])
    return x.square().mean()


def third_step(*chain: fds.Transform, k: int = 1) -> tuple[fds.State, dict[tuple[str, str], int]]:
    """The state after three steps, and the bytes of params and gradients in the third."""
    step = fds.compose(*chain, transforms.accumulate(k))(fds.train_step(chain_loss, fds.sgd(0.1)))
    state, x = step.init(chain_params()), torch.ones(2 * k, WIDTH) * (comm.world().rank + 1) / 9
    for _ in range(2):  # the order of units is known from here on
        state, _ = step(state, x)
    with comm.ledger() as book:
        state, _ = step(state, x)
    return state, {
        (row.collective, row.group): row.bytes
        for row in book.rows
        if row.bytes and not row.group.endswith("/control") and (row.collective != "all_reduce" or "/" in row.group)
    }


POLICIES = {"f32": (None, None), "bf16": (torch.bfloat16, None), "bf16,reduce=f32": (torch.bfloat16, torch.float32)}


@pytest.mark.law(21)
@given(
    grid=st.sampled_from(GRIDS),
    chosen=arguments(),
    k=st.sampled_from((1, 2)),
    policy=st.sampled_from(sorted(POLICIES)),
    narrow=st.booleans(),
)
def test_the_ledger_shows_what_the_report_says(grid: Grid, chosen: dict[str, Any], k: int, policy: str, narrow: bool) -> None:
    """Bytes by collective and group, and bytes of stored params: predicted from shapes, exactly."""
    chosen = {**chosen, "unit_of": None if chosen["unit_of"] is units.by_leaf else chosen["unit_of"]}
    if chosen["stage"] == 3:
        chosen["reshard_last_units"] = True
    chosen |= compressed(chosen, comm.codecs.Blocks(8, size=16)) if narrow else {}
    stored, reduced = POLICIES[policy]

    def program() -> tuple[dict[tuple[str, str], int], dict[tuple[str, str], int], int, int]:
        zero = strategy(grid, chosen)
        chain = () if policy == "f32" else (transforms.mixed_precision(policy),)
        state, sent = third_step(*chain, zero, k=k)
        groups = ProcessGroups.by(zero)
        replica = 0 if groups.replicas is None else groups.replicas.rank
        report = zero.cost_report(chain_params(), stored_dtype=stored, comm_dtype=reduced)
        held = sum(t.nbytes for t in (*state.params, *fds.tree.leaves(state.slots["zero"].exact)))
        rank = groups.shards.rank
        return sent, report.sent(micro_batches=k, rank=rank, replica=replica), held, report.held(rank)

    for sent, predicted, held, planned in comm.simulate(program, world_size=grid.size):
        assert sent == predicted
        assert held == planned


def elements(**options: Any) -> tuple[dict[tuple[str, str], int], int, int]:
    """What rank 0's report sends in elements, over 2 x 4 ranks or as many replicas of 4; Ψ, and Ψ of the biases."""
    report = transforms.zero(3, reshard_last_units=True, **options).cost_report(chain_params(), n=options.pop("n", 8))
    psi = sum(s.size for s in report.layout.segments)
    return {key: size // 4 for key, size in report.sent().items()}, psi, sum(s.size for s in report.whole)


@pytest.mark.law(21)
@pytest.mark.parametrize("hpz", [False, True])
def test_what_crosses_blocks(hpz: bool) -> None:
    """Of Ψ elements over a blocks of s ranks, (a-1)/a Ψ/s cross for each gather and each reduction; hpZ saves one gather."""
    a, s = 2, 4
    sent, psi, _ = elements(intra_node=s, hpz=hpz)
    across, inside = (a - 1) * psi // (a * s), (s - 1) * psi // s
    assert sent["all_gather", "world:inter_node"] == (1 if hpz else 2) * across
    assert sent["reduce_scatter", "world:inter_node/reduce"] == across
    assert sent["all_gather", "world:intra_node/gather"] == 2 * inside
    assert sent["reduce_scatter", "world:intra_node/reduce"] == inside
    if not hpz:
        assert sum(sent.values()) == 3 * psi * (a * s - 1) // (a * s)  # as over one level


@pytest.mark.law(21)
def test_replicas_share_their_shards() -> None:
    """HSDP and MiCS: 3Ψ(s-1)/s inside a replica, 2(Ψ/s)(r-1)/r between replicas, once a step."""
    s, r = 4, 2
    report = transforms.zero(3, reshard_last_units=True).cost_report(chain_params(), n=s, replicas=r)
    psi = sum(segment.size for segment in report.layout.segments)
    for k in (1, 3):
        sent = {key: size // 4 for key, size in report.sent(micro_batches=k).items()}
        assert sent["all_gather", "world"] + sent["reduce_scatter", "world/reduce"] == 3 * k * psi * (s - 1) // s
        assert sent["all_reduce", "replicas/reduce"] == 2 * (psi // s) * (r - 1) // r


@pytest.mark.law(21)
def test_what_stays_whole_is_gathered_once() -> None:
    """With Ψₚ elements in leaves of at most the threshold: 3(Ψ - Ψₚ)(n-1)/n + 2Ψₚ(n-1)/n, and Ψₚ(n-1)/n more is stored."""
    n = 8
    sent, psi, whole = elements(persistence_threshold=WIDTH)
    assert whole == WIDTH * (LAYERS + 1)
    assert sum(sent.values()) == (3 * (psi - whole) + 2 * whole) * (n - 1) // n
    sent, psi, whole = elements(persistence_threshold=10**6)
    assert (whole, sum(sent.values())) == (psi, 2 * psi * (n - 1) // n)


@pytest.mark.law(21)
def test_owners_send_and_get_whole_units() -> None:
    """All ranks together: (n-1)Ψ for a reduction to owners and for each broadcast; each unit has one owner."""
    n = 4
    report = transforms.zero(2, aggregate="owner").cost_report(chain_params(), n=n)
    psi = sum(segment.size for segment in report.layout.segments)
    sent = [report.sent(rank=rank) for rank in range(n)]
    assert sum(s.get(("reduce", "world/reduce"), 0) for s in sent) == 4 * (n - 1) * psi
    assert sum(s.get(("broadcast", "world"), 0) for s in sent) == 4 * (n - 1) * psi
    assert sorted(s.owner for s in report.layout.segments) == [0, 1, 2, 3]
    assert "rank 3: 1 units" in str(report)


class Watch:
    """An all_gather that knows how many bytes of its results are there, those under way included."""

    def __init__(self) -> None:
        self.under_way = self.most = 0
        self.alive: dict[StorageWeakRef, int] = {}

    def __call__(self, shards: list[Tensor], group: comm.Group) -> list[Tensor]:
        return self.request(shards, group).run()

    def request(self, shards: list[Tensor], group: comm.Group) -> comm.table.Request[list[Tensor]]:
        size = sum(shard.nbytes for shard in shards) * group.size
        self.count(size)

        def arrived(found: list[Tensor]) -> list[Tensor]:
            self.alive |= {StorageWeakRef(flat.untyped_storage()): flat.nbytes for flat in found}
            self.count(-size)
            return found

        return comm.table.prepare(comm.all_gather, shards, group).then(arrived)

    def count(self, size: int) -> None:
        self.under_way += size
        self.alive = {ref: nbytes for ref, nbytes in self.alive.items() if not ref.expired()}
        self.most = max(self.most, self.under_way + sum(self.alive.values()))


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("live", [1, 2])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_units_that_are_there_at_once(prefetch: int, live: int, reshard: bool) -> None:
    """Never more than ``max_live_units + prefetch`` units, as reported, and exactly that many in a chain of equal ones."""

    def program() -> tuple[int, int]:
        watch = Watch()
        zero = transforms.zero(3, prefetch=prefetch, max_live_units=live, reshard_last_units=reshard, all_gather=watch)
        third_step(zero)
        return watch.most, zero.cost_report(chain_params()).fetched()

    for most, planned in comm.simulate(program, world_size=2):
        assert planned == min(live + prefetch, LAYERS) * 4 * WIDTH * (WIDTH + 1) + 4 * WIDTH  # h.0 has the scale, too
        assert planned - 4 * WIDTH <= most <= planned


def test_the_report_says_it_all() -> None:
    """In a few lines."""
    zero = transforms.zero(3, intra_node=4, hpz=True, persistence_threshold=8, gradient_predivide_factor=2.0, prefetch=2)
    shown = str(zero.cost_report(chain_params(), n=8, stored_dtype=torch.bfloat16, comm_dtype=torch.float32))
    assert shown.startswith(
        "zero(3, world, intra_node=4, prefetch=2, persistence_threshold=8, hpz=True, gradient_predivide_factor=2.0)\n"
    )
    for said in ("8 shards", "4: h.0 (", "in shards", "2 whole and 2 ahead", "reduce_scatter of float32, divided by 2 before"):
        assert said in shown
    assert len(shown.splitlines()) == 7


@given(stage=st.integers(0, 3), tp=st.sampled_from((1, 2)))
@settings(max_examples=settings.default.max_examples // 3)
def test_a_report_of_slices_is_a_ranks(stage: Any, tp: int) -> None:
    """What it stores and sends, and how much of the leaves that is."""

    def program() -> None:
        mesh = comm.mesh(dp=2, tp=tp)
        cuts = {name: LeafSlice.even(dim, 4, tp, mesh["tp"].rank) for name, dim in (("rows", 0), ("columns", 1))}
        params = {name: sliced(torch.ones(4, 4), cut) for name, cut in cuts.items()} | {"all": torch.ones(3)}
        zero = transforms.zero(stage, mesh["dp"], reshard_last_units=True)
        report = zero.cost_report(params)
        step = zero(fds.train_step(lambda p, x: sum(leaf.square().sum() for leaf in p.values()) * x, fds.sgd(0.1)))
        state = step.init(params)
        assert report.held() == sum(flat.nbytes for flat in state.params)
        with comm.ledger() as book:
            step(state, torch.ones(()))
        sent = Counter[tuple[str, str]]()
        for row in book.rows:
            if (row.collective, row.group) in report.sent():
                sent[row.collective, row.group] += row.bytes
        assert sent == report.sent()
        shown = [line for line in str(report).splitlines() if line.startswith("slices")]
        assert shown == (["slices     2 of 3 leaves: 16 elements of 32"] if tp > 1 else [])

    comm.simulate(program, world_size=2 * tp)
