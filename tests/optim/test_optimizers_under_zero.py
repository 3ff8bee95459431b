"""Law 19 for every optimizer, what those that need whole leaves send, and the mean of the params."""

import pickle
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_ds as fds
from functional_ds import comm, transforms
from functional_ds.base.marks import is_trainable
from functional_ds.sharding.layout import Layout
from functional_ds.sharding.leaf_map import LeafMap
from functional_ds.sharding.matrix_owners import MatrixOwners
from tests.transforms.models import CASES, own_rows
from tests.transforms.rules import RULES, assert_close, fresh, linear, trained

STAGES = (0, 1, 2, 3)


@cache
def alone(rule: str, half: bool) -> Any:
    return trained(rule, *([transforms.mixed_precision()] if half else []))


def each_leaf(path: str) -> str:
    return path


def everything(path: str) -> str:
    return "all"


@pytest.mark.law(19)
@given(
    rule=st.sampled_from(sorted(RULES)),
    stage=st.sampled_from(STAGES),
    n=st.integers(1, 4),
    half=st.booleans(),
    unit_of=st.sampled_from((None, each_leaf, everything)),
    seed=st.integers(0, 99),
)
def test_any_optimizer_in_any_stage(rule: str, stage: int, n: int, half: bool, unit_of: Any, seed: int) -> None:
    """Exact gradients: what is left is the order of additions in LAMB's norms, and a kernel's vectors against its tails."""
    strategy = [transforms.mixed_precision()] if half else []
    strategy += [transforms.zero(stage, unit_of=unit_of)]
    for found in comm.simulate(lambda: trained(rule, *strategy), world_size=n, seed=seed):
        assert_close(found, alone(rule, half), 1e-6)


@pytest.mark.sample(14)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("rule", sorted(RULES))
def test_every_optimizer_in_every_stage(rule: str, stage: int) -> None:
    """Law 19 for each of them, whatever Hypothesis drew."""
    for found in comm.simulate(lambda: trained(rule, transforms.zero(stage)), world_size=3, seed=stage):
        assert_close(found, alone(rule, False), 1e-6)


CURVED: dict[str, Any] = {
    "adam": fds.adam(1e-2, eps=1e-4),
    "adamw": fds.adamw(1e-2, eps=1e-4, weight_decay=0.5, decay=lambda path: path.endswith("weight")),
    "adagrad": fds.adagrad(1e-2, initial=1e-4),
    "lamb": fds.lamb(1e-2, eps=1e-4, weight_decay=0.1),
    "muon": fds.muon(1e-2, fds.adamw(1e-2, eps=1e-4), dtype=torch.float32),
}


def learned(rule: str, case: str, *strategy: fds.Transform, k: int = 1) -> tuple[list[float], Any]:
    params, loss = CASES[case].make()
    step = fds.compose(*strategy, transforms.accumulate(k))(fds.train_step(loss, CURVED[rule]))
    state, losses = step.init(params), []
    for _ in range(3):
        state, metrics = step(state, own_rows(CASES[case].batch(12), comm.world()))
        losses.append(metrics["loss"].item())
    return losses, step.params(state)


@cache
def learned_alone(rule: str, case: str) -> tuple[list[float], Any]:
    return learned(rule, case)


@pytest.mark.law(19)
@given(
    rule=st.sampled_from(sorted(CURVED)),
    case=st.sampled_from(("blocks", "lora", "checkpoint", "tied", "weighted", "branching")),
    stage=st.sampled_from(STAGES),
    n=st.sampled_from((1, 2, 3)),
    k=st.sampled_from((1, 2)),
)
def test_models_learn_alike(rule: str, case: str, stage: int, n: int, k: int) -> None:
    """Real models, micro-batches, clipping apart: gradients differ by their roundings."""
    expected = learned_alone(rule, case)
    for losses, params in comm.simulate(lambda: learned(rule, case, transforms.zero(stage), k=k), world_size=n):
        torch.testing.assert_close(losses, expected[0], rtol=1e-4, atol=1e-4)
        assert_close(params, expected[1], 1e-4)


def whole_leaves_on_processes() -> dict[tuple[str, int], Any]:
    return {(rule, stage): trained(rule, transforms.zero(stage)) for rule in ("lamb", "muon") for stage in (0, 1, 3)}


def test_processes_give_the_bits_of_the_simulator() -> None:
    simulated = comm.simulate(whole_leaves_on_processes, world_size=2)
    spawned = comm.spawn(whole_leaves_on_processes, world_size=2)
    for here, there in zip(simulated, spawned, strict=True):
        for key, expected in here.items():
            for leaf, other in zip(fds.tree.leaves(there[key]), fds.tree.leaves(expected), strict=True):
                assert torch.equal(leaf, other), key


# -- what is sent -------------------------------------------------------------------------------------------------------


def update_sends(rule: str, stage: int) -> dict[str, int]:
    """Bytes that this rank sends for the optimizer alone, by collective."""
    sent: dict[str, int] = {}

    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        with comm.ledger() as book:
            result = inner(step, state, grads)
        sent.update({row.collective: row.bytes for row in book.rows})
        return result

    trained(rule, fds.wrap("count", update=update), transforms.zero(stage), steps=1)
    return sent


@pytest.mark.sample(2)
@pytest.mark.law(21)
@pytest.mark.parametrize("rule", ["muon", "lamb", "adamw", "lion", "adamw, matrices decay"])
@given(stage=st.sampled_from(STAGES), n=st.integers(1, 4))
def test_bytes_that_an_optimizer_sends(rule: str, stage: int, n: int) -> None:
    """Muon: 2 · 2 bytes for each element of a matrix that its owner lacks. LAMB: 2 floats a leaf, all-reduced. Others: none."""
    params = fresh()
    sent = comm.simulate(update_sends, rule, stage, world_size=n)
    if stage == 0 or n == 1 or rule not in ("muon", "lamb"):
        assert all(not total for rank in sent for total in rank.values())
        return
    leaves = [leaf for leaf in fds.tree.leaves(params) if is_trainable(leaf)]
    if rule == "lamb":
        total = 2 * len(leaves) * 4 * 2 * (n - 1)  # all ranks together
        assert all(rank.keys() == {"all_reduce"} for rank in sent)
        assert sum(rank["all_reduce"] for rank in sent) == total
        return
    lacks = 0
    for segment in Layout.of(params, n).segments:
        for slot in segment.slots:
            if segment.trainable and len(slot.shape) == 2 and slot.numel:
                shards = [slice_of(slot.offset, slot.numel, rank * segment.shard, segment.shard) for rank in range(n)]
                lacks += slot.numel - max(shards)
    assert sum(rank.get("all_to_all", 0) for rank in sent) == 2 * 2 * lacks
    psi = sum(leaf.numel() for leaf in leaves)
    assert 2 * 2 * lacks <= 4 * psi * (n - 1) / n


def slice_of(offset: int, numel: int, start: int, size: int) -> int:
    """How many of ``numel`` elements from ``offset`` on lie in ``size`` from ``start`` on."""
    return max(0, min(offset + numel, start + size) - max(offset, start))


# -- parts and owners ---------------------------------------------------------------------------------------------------


@given(n=st.integers(1, 5), chosen=st.sets(st.integers(0, 20)), unit_of=st.sampled_from((None, each_leaf, everything)))
def test_parts_say_where_elements_are(n: int, chosen: set[int], unit_of: Any) -> None:
    """All ranks' pieces, put where they say that they belong, are the leaves; so are those of any selection's runs."""
    layout = Layout.of(fresh(), n, unit_of)
    numbered = fds.tree.map(lambda x: x if not is_trainable(x) else torch.randn_like(x), fresh())
    numbered = fds.freeze(numbered, "frozen")
    wanted = dict(fds.tree.named(numbered))

    def program() -> None:
        here = comm.world()
        flats = layout.own(layout.flatten(numbered), here.rank)
        own = [flat for flat, segment in zip(flats, layout.segments, strict=True) if segment.trainable]
        parts = LeafMap.of_layout(layout, here)
        assert {leaf.path for leaf in parts.leaves} == {path for path, x in wanted.items() if is_trainable(x)}
        runs, some = parts.select(i for i in range(len(parts.leaves)) if i in chosen)
        for these, tensors in ((parts, own), (some, [run.view(own) for run in runs])):
            for piece, view in zip(these.shards, these.views(tensors), strict=True):
                leaf = wanted[these.leaves[piece.leaf].path].reshape(-1)
                assert torch.equal(view, leaf[piece.offset : piece.offset + piece.numel])
            everywhere = [shard for shards in these.shards_by_rank for shard in shards]
            counts = [sum(shard.numel for shard in everywhere if shard.leaf == i) for i in range(len(these.leaves))]
            assert counts == [leaf.numel for leaf in these.leaves]

    comm.simulate(program, world_size=n)


@given(n=st.integers(1, 5), unit_of=st.sampled_from((None, each_leaf, everything)), seed=st.integers(0, 99))
def test_owners_get_whole_leaves_and_give_pieces_back(n: int, unit_of: Any, seed: int) -> None:
    params = {path: leaf for path, leaf in fds.tree.named(fresh()) if leaf.dtype == torch.float32}
    layout = Layout.of(params, n, unit_of)

    def program() -> list[str]:
        here = comm.world()
        flats = layout.own(layout.flatten(params), here.rank)
        parts = LeafMap.of_layout(layout, here)
        own = [flat for flat, segment in zip(flats, layout.segments, strict=True) if segment.trainable]
        owners, pieces = MatrixOwners.choose(parts), parts.views(own)
        whole = owners.gather(pieces, torch.float32)
        for leaf, value in whole.items():
            assert torch.equal(value, params[parts.leaves[leaf].path])
        for back, piece in zip(owners.scatter(whole, torch.float32), pieces, strict=True):
            assert torch.equal(back, piece)
        return [parts.leaves[leaf].path for leaf in whole]

    found = comm.simulate(program, world_size=n, seed=seed)
    trained_paths = [path for path, leaf in params.items() if is_trainable(leaf)]
    assert sorted(path for paths in found for path in paths) == sorted(trained_paths)


# -- skipped updates ----------------------------------------------------------------------------------------------------


@pytest.mark.law(25)
@given(rule=st.sampled_from(sorted(RULES)), stage=st.sampled_from(STAGES), skips=st.booleans())
def test_a_skipped_update_moves_nothing(rule: str, stage: int, skips: bool) -> None:
    """Params and optimizer state stay as they are, bit for bit, whatever the gradients; without a skip they do not."""

    def program() -> None:
        def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
            before = fds.tree.map(torch.clone, (state.params, state.optimizer, state.slots["ema"]))
            bad = fds.tree.replace(grads, sum=[grad / (0 if skips else 1) for grad in grads.sum])
            state, metrics = inner(step, fds.tree.replace(state, skip=torch.tensor(skips)), bad)
            after = (state.params, state.optimizer, state.slots["ema"])
            same = [torch.equal(x, y) for x, y in zip(fds.tree.leaves(before), fds.tree.leaves(after), strict=True)]
            assert all(same) if skips else not any(same[:1])
            return fds.tree.replace(state, skip=None), metrics

        trained(rule, transforms.ema(0.9), fds.wrap("skip", update=update), transforms.zero(stage), steps=2)

    comm.simulate(program, world_size=2)


# -- the mean of the params ---------------------------------------------------------------------------------------------


def seen(step: fds.Step, state: fds.State) -> Any:
    return transforms.averaged(step, state)


@cache
def after(steps: int, half: bool) -> Any:
    return trained("adamw", *([transforms.mixed_precision()] if half else []), steps=steps)


def by_hand(decay: float, half: bool) -> Any:
    """mean ← decay · mean + (1 - decay) · params, after each update."""

    def towards(mean: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return decay * mean + (1 - decay) * p if p.is_floating_point() or p.is_complex() else p

    mean = fresh()
    for steps in (1, 2, 3):
        mean = fds.tree.map(towards, mean, after(steps, half))
    return mean


@given(stage=st.sampled_from((None, *STAGES)), n=st.integers(1, 3), half=st.booleans(), decay=st.sampled_from((0.0, 0.5, 0.99)))
def test_the_mean_is_the_single_device_runs(stage: int | None, n: int, half: bool, decay: float) -> None:
    """In every stage, of the masters."""
    precision = [transforms.mixed_precision()] if half else []
    strategy = [transforms.ema(decay), *precision, *([] if stage is None else [transforms.zero(stage)])]
    for found in comm.simulate(lambda: trained("adamw", *strategy, show=seen), world_size=1 if stage is None else n):
        assert_close(found, by_hand(decay, half), 1e-6)


def test_the_mean_changes_no_update_and_lies_in_shards() -> None:
    def program(*strategy: fds.Transform) -> tuple[Any, int]:
        def show(step: fds.Step, state: fds.State) -> tuple[Any, int]:
            slot = state.slots.get("ema")
            return step.params(state), 0 if slot is None else sum(leaf.numel() for leaf in fds.tree.leaves(slot))

        return trained("lamb", *strategy, transforms.zero(3), show=show)  # type: ignore[no-any-return]

    plain, meaned = comm.simulate(program, world_size=2), comm.simulate(program, transforms.ema(0.9), world_size=2)
    for (a, _), (b, held) in zip(plain, meaned, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(fds.tree.leaves(a), fds.tree.leaves(b), strict=True))
        segments = [s for s in Layout.of(fresh(), 2).segments if s.trainable]
        assert held == sum(s.shard for s in segments)


def test_ema_refuses() -> None:
    base = fds.train_step(linear, fds.sgd(0.1))
    with pytest.raises(ValueError, match=r"decay=1.0 must be in \[0, 1\)"):
        transforms.ema(1.0)
    for other in (transforms.zero(1), transforms.mixed_precision(), transforms.ema(0.5)):
        with pytest.raises(ValueError, match="stores params in its own way"):
            transforms.ema(0.9)(other(base))
    with pytest.raises(ValueError, match="keeps no mean"):
        transforms.averaged(base, base.init(fresh()))


# -- records ------------------------------------------------------------------------------------------------------------


@pytest.mark.law(26)
@pytest.mark.parametrize("rule", sorted(RULES))
def test_states_survive_flattening(rule: str) -> None:
    def show(step: fds.Step, state: fds.State) -> None:
        shown = fds.tree.replace(state.slots["ema"], shown=True)
        for record in (state, state.optimizer, state.slots["ema"], shown):
            leaves, spec = fds.tree.flatten(record)
            back = fds.tree.unflatten(spec, leaves)
            again, same = fds.tree.flatten(back)
            assert type(back) is type(record)
            assert same == spec
            assert all(a is b for a, b in zip(again, leaves, strict=True))
        assert fds.tree.unflatten(*reversed(fds.tree.flatten(shown))).shown

    comm.simulate(lambda: trained(rule, transforms.ema(0.9), transforms.zero(1), steps=1, show=show), world_size=2)


@pytest.mark.law(31)
@given(rule=st.sampled_from(sorted(RULES)), stage=st.sampled_from((None, *STAGES)))
def test_donation_changes_nothing_but_memory(rule: str, stage: int | None) -> None:
    def program() -> None:
        strategy = [transforms.ema(0.9), *([] if stage is None else [transforms.zero(stage)])]
        step = fds.compose(*strategy)(fds.train_step(linear, RULES[rule]))
        state, _ = step(step.init(fresh()), torch.arange(4))
        before = fds.tree.map(torch.clone, state)
        kept, _ = step(state, torch.arange(4), donate=False)
        for leaf, old in zip(fds.tree.leaves(state), fds.tree.leaves(before), strict=True):
            assert torch.equal(leaf, old)
        donated, _ = step(state, torch.arange(4))
        for leaf, other in zip(fds.tree.leaves(donated), fds.tree.leaves(kept), strict=True):
            assert torch.equal(leaf, other)

    comm.simulate(program, world_size=2)


@pytest.mark.parametrize("rule", ["muon", "lamb", "adamw, matrices decay"])
def test_what_lies_where_is_worked_out_once(rule: str) -> None:
    """A pair is made at init and not again; a state can be pickled, so that it holds no group."""
    made: list[LeafMap] = []

    def make(parts: LeafMap) -> Any:
        made.append(parts)
        return RULES[rule].make(parts)

    def program(stage: int) -> int:
        made.clear()
        step = transforms.zero(stage)(fds.train_step(linear, fds.PerParameter(make)))
        state = step.init(fresh())
        for _ in range(3):
            state, _ = step(pickle.loads(pickle.dumps(state)), torch.arange(4))
        return len(made)

    for stage in STAGES:
        assert comm.simulate(program, stage, world_size=1) == [1]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_compressed_gathers_leave_the_mean_exact(stage: int) -> None:
    """What is gathered for the loss is rounded; what the optimizer moves, the mean and what LAMB measures are not."""

    def program() -> tuple[Any, Any]:
        gather = comm.codecs.compressed(comm.all_gather, comm.codecs.Blocks(8))
        strategy = (transforms.ema(0.5), transforms.zero(stage, all_gather=gather))
        return trained("lamb", *strategy), trained("lamb", *strategy, show=seen)

    for params, mean in comm.simulate(program, world_size=2):
        assert_close(params, alone("lamb", False), 1e-6)
        assert_close(mean, trained("lamb", transforms.ema(0.5), show=seen), 1e-6)
