"""Law 37: what was saved on any number of ranks is what is loaded on any other, bit for bit."""

import importlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_ds as fds
from functional_ds import checkpointing, comm, pipelining, transforms
from functional_ds.state_dict import describe
from functional_ds.testing import assert_same
from tests.checkpointing.states import (
    POLICIES,
    RULES,
    UNITS,
    assert_same_contents,
    contents,
    each_leaf,
    fresh,
    make,
    precision,
    run,
    saved,
    stage_of,
    trained,
)

STAGES = (None, 0, 1, 2, 3)


@pytest.mark.law(37)
@pytest.mark.parametrize("donate", [False, True])
def test_tensors_in_any_order_of_memory(tmp_path: Path, donate: bool) -> None:
    """Whoever makes a state may transpose what it keeps."""

    def init(inner: Any, step: fds.Step, params: Any) -> fds.State:
        state: fds.State = inner(step, params)
        return state.put(kept=torch.zeros(4, 3).t())

    step = fds.wrap("keeping", slot="kept", init=init)(fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(0.1)))
    state = step.init({"w": torch.ones(2)}).put(kept=torch.arange(12.0).view(4, 3).t())
    fds.save(state, tmp_path)
    found = fds.load(tmp_path, like=step.init({"w": torch.ones(2)}), donate=donate)
    assert_same(found.slots["kept"], state.slots["kept"])


@pytest.mark.law(37)
@pytest.mark.parametrize(("before", "after"), [(1, 0), (0, 1)])
def test_an_axis_of_one_rank_is_no_axis(tmp_path: Path, before: int, after: int) -> None:
    """A step with tensor parallelism over one rank saves what one without does."""

    def program(parallel: int, use: Any) -> Any:
        mesh = comm.mesh(dp=comm.world().size, tp=1)

        def loss(params: Any, x: Tensor) -> Tensor:
            return (torch.tanh(x @ params["columns"]) @ params["rows"]).square().sum()

        slicing = [transforms.tensor_parallel({"columns": 1, "rows": 0}, mesh["tp"])] if parallel else []
        step = fds.compose(transforms.zero(2, mesh["dp"]), *slicing)(fds.train_step(loss, fds.adamw(0.1)))
        state, _ = step(step.init({"columns": torch.arange(8.0).view(2, 4), "rows": torch.ones(4, 1)}), torch.ones(1, 2))
        return use(step, state)

    def save(step: fds.Step, state: fds.State) -> Any:
        fds.save(state, tmp_path)
        return step.params(state)

    want = comm.simulate(program, before, save, world_size=2)[0]
    found = comm.simulate(program, after, lambda step, state: step.params(fds.load(tmp_path, like=state)), world_size=3)[0]
    assert_same(found, want)


@pytest.mark.law(37)
def test_ranks_that_differ_in_few_elements_keep_their_own(tmp_path: Path) -> None:
    """Between two meetings of 0/1 Adam a rank may have moved one row of a long table."""

    def program(until: int, resumes: bool) -> Tensor:
        loss = lambda params, rows: (params["table"][rows] - 1).square().sum()  # noqa: E731
        rule = fds.zero_one_adam(0.01, freeze=2, each=1, local=2, longest=2, codec=None)
        step = transforms.local_gradients()(fds.train_step(loss, rule))
        state = step.init({"table": torch.zeros(600, 8)})
        if resumes:
            state = fds.load(tmp_path, like=state)
        for index in range(int(state.step), until):
            state, _ = step(state, torch.arange(600) if index < 2 else torch.tensor([3 + 5 * comm.world().rank]))
            if index == 4:
                fds.save(state, tmp_path)
        return step.params(state)["table"]

    want = comm.simulate(program, 8, False, world_size=2)
    assert_same(comm.simulate(program, 8, True, world_size=2), want)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One for all examples: each save replaces the one before. In memory if possible, as a save waits for the disk often."""
    memory = Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK):
        with tempfile.TemporaryDirectory(dir=memory) as name:
            yield Path(name)
    else:
        yield tmp_path_factory.mktemp("checkpoints")


def ranks(stage: int | None, n: int) -> int:
    """Without zero nothing keeps several ranks alike."""
    return 1 if stage is None else n


@pytest.mark.law(37)
@given(
    rule=st.sampled_from(sorted(RULES)),
    policy=st.sampled_from(POLICIES),
    mean=st.booleans(),
    stages=st.tuples(st.sampled_from(STAGES), st.sampled_from(STAGES)),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    units=st.tuples(st.sampled_from(sorted(UNITS)), st.sampled_from(sorted(UNITS))),
    donate=st.booleans(),
)
def test_what_is_loaded_is_what_was_saved(
    folder: Path, rule: str, policy: str, mean: bool, stages: Any, sizes: Any, units: Any, donate: bool
) -> None:
    """load_M ∘ save_N = id, bitwise, for any optimizer, precision, ranks, stages and units; like stays as it is."""
    strategy = [*([transforms.ema(0.5)] if mean else []), *precision(policy)]
    if policy == "bf16 states":  # which keep scalars wide where they lie alone
        stages = tuple(stage or 0 for stage in stages)
    (n, m), (before, after) = map(ranks, stages, sizes), stages

    def load() -> tuple[dict[str, Tensor], Any]:
        step = make(rule, *strategy, *stage_of(after, units[1]))
        like = step.init(fresh())
        kept = like.clone()
        state = fds.load(folder, like=like, tag="t", donate=donate)
        if not donate:
            assert_same(fds.tree.leaves(like), fds.tree.leaves(kept))
        assert [leaf.shape for leaf in fds.tree.leaves(state)] == [leaf.shape for leaf in fds.tree.leaves(kept)]
        return contents(state), step.params(state)

    expected = comm.simulate(lambda: saved(folder, make(rule, *strategy, *stage_of(before, units[0])), tag="t"), world_size=n)[
        0
    ]
    for found, params in comm.simulate(load, world_size=m):
        assert_same_contents(found, expected[0])
        assert_same(params, expected[1])


def noisy(params: Any, batch: Tensor, key: fds.Key | None) -> Tensor:
    hidden = torch.tanh(batch @ params["w"] + params["b"])
    hidden = hidden if key is None else key.dropout(hidden, 0.25, "hidden")
    return (hidden @ params["head"]).square().mean()


def weights() -> Any:
    g = torch.Generator().manual_seed(1)
    return {name: torch.randn(*shape, generator=g) for name, shape in {"w": (4, 6), "b": (6,), "head": (6, 3)}.items()}


def loop(step: fds.Step, state: fds.State, start: int, stop: int) -> tuple[fds.State, list[float]]:
    losses = []
    for count in range(start, stop):
        rows = torch.randn(12, 4, generator=torch.Generator().manual_seed(count))
        state, metrics = step(state, rows.tensor_split(comm.world().size)[comm.world().rank])
        losses.append(metrics["loss"].item())
    return state, losses


STRATEGIES: dict[str, Any] = {
    "plain": list,
    "fp16, schedule, clip": lambda: [
        transforms.ema(0.9),
        transforms.mixed_precision("fp16"),
        transforms.zero(2),
        transforms.clip(1.0),
        transforms.schedule(transforms.warmup_cosine(2, 9)),
    ],
    "bf16, accumulated": lambda: [transforms.mixed_precision("bf16"), transforms.zero(3), transforms.accumulate(2)],
    "stochastic": lambda: [*precision("bf16 alone"), transforms.zero(1)],
    "quantised": lambda: [
        transforms.zero(1, all_gather=comm.codecs.compressed(comm.all_gather, comm.codecs.Blocks(8))),
    ],
}


@pytest.mark.law(37)
@given(
    strategy=st.sampled_from(sorted(STRATEGIES)),
    rule=st.sampled_from(("adamw", "muon", "one for each")),
    n=st.integers(1, 3),
    k=st.integers(1, 2),
    j=st.integers(1, 2),
)
def test_a_run_that_is_resumed_is_the_run(folder: Path, strategy: str, rule: str, n: int, k: int, j: int) -> None:
    """run(k + j) = run(j) ∘ load ∘ save ∘ run(k), bitwise at equal n: losses, params and all of the state, dropout included."""
    optimizer = {"adamw": fds.adamw(0.1), "muon": fds.muon(0.1, fds.adamw(0.1))}.get(rule, fds.lamb(0.1))

    def program() -> None:
        step = fds.compose(*STRATEGIES[strategy]())(fds.train_step(noisy, optimizer, seed=3))
        whole, losses = loop(step, step.init(weights()), 0, k + j)
        state, before = loop(step, step.init(weights()), 0, k)
        fds.save(state, folder, tag="run", extra={"rows": 12 * k})
        state, extra = fds.load(folder, like=step.init(weights()), tag="run", with_extra=True)
        assert extra == {"rows": 12 * k}
        state, after = loop(step, state, k, k + j)
        assert before + after == losses
        assert_same(fds.tree.leaves(state), fds.tree.leaves(whole))

    comm.simulate(program, world_size=ranks(None if strategy == "plain" else 1, n))


@pytest.mark.law(37)
@given(
    shape=st.sampled_from(((1, 2), (2, 1), (2, 2), (3, 1))),
    stages=st.tuples(st.sampled_from((0, 1, 2, 3)), st.sampled_from(STAGES)),
    m=st.integers(1, 3),
    back=st.booleans(),
)
def test_stages_of_a_pipeline_come_and_go(folder: Path, shape: tuple[int, int], stages: Any, m: int, back: bool) -> None:
    """Ranks that hold some leaves each, by global paths and in shards along another axis, write and read what one has."""
    pp, dp = shape

    def flat() -> dict[str, Tensor]:
        return dict(fds.tree.named({k: v for k, v in fresh().items() if k != "which"}))

    def split() -> tuple[fds.Step, fds.State]:
        mesh = comm.mesh(pp=pp, dp=dp)
        place = mesh.coordinates["pp"]
        own = {path: leaf for i, (path, leaf) in enumerate(flat().items()) if i % pp == place or path == "embed.w"}  # tied
        step = make("one for each, anywhere", transforms.mixed_precision(), *stage_of(stages[0], "blocks", mesh["dp"]))
        return step, step.init(own)

    def whole() -> tuple[fds.Step, fds.State]:
        step = make("one for each, anywhere", transforms.mixed_precision(), *stage_of(stages[1], "leaves"))
        return step, step.init(flat())

    def moved(state: fds.State) -> fds.State:
        """Every element of every leaf other than at the start, and alike wherever it is."""
        for name, view in ((h.name, h) for h in describe.describe(state)):
            salt = sum(name.encode()) % 89
            count = torch.arange(view.offset, view.offset + view.view.numel()) if not view.shared else torch.zeros(1)
            view.view.copy_(((count * 7 + (0 if view.shared else salt)) % 113).to(view.view.dtype))
        return state

    def first(start: Any) -> dict[str, Tensor]:
        state = moved(start()[1])
        fds.save(state, folder, tag="pipe")
        return contents(state)

    def second(start: Any) -> dict[str, Tensor]:
        return contents(fds.load(folder, like=start()[1], tag="pipe"))

    one, other = (split, pp * dp), (whole, ranks(stages[1], m))
    (save, n), (load, m) = (other, one) if back else (one, other)
    expected = comm.simulate(lambda: first(save), world_size=n)[0]
    for found in comm.simulate(lambda: second(load), world_size=m):
        assert_same_contents(found, expected)


def layer(params: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ params["w"])


@pytest.mark.parametrize("shapes", [((2, 2), (1, 1)), ((1, 3), (2, 1)), ((2, 1), (4, 1))])
def test_a_pipeline_goes_on_as_another(tmp_path: Path, shapes: Any) -> None:
    """A run on some stages and data-parallel ranks goes on with others, and its losses are the whole run's."""
    params = [{"w": torch.linspace(-1, 1, 16).view(4, 4) + i / 8} for i in range(4)]
    stages = pipelining.stages([layer] * 4, params, loss=lambda y, batch: (y - batch[1]).square().mean())
    batch = torch.linspace(-1, 1, 96).view(24, 4), torch.linspace(1, -1, 96).view(24, 4)

    def losses(shape: tuple[int, int], start: int, stop: int) -> list[float]:
        pp, dp = shape
        mesh = comm.mesh(pp=pp, dp=dp)
        schedule = pipelining.interleaved_one_f_one_b(pp, 4, v=4 // pp) if 1 < pp < 4 else pipelining.one_f_one_b(pp, 4)
        piped = [transforms.pipeline(schedule, stages, mesh["pp"])] if pp > 1 else []
        step = fds.compose(transforms.zero(2, mesh["dp"]), *piped)(fds.train_step(stages, fds.adamw(0.1)))
        state, found = step.init(params), []
        if start:
            state = fds.load(tmp_path, like=state, donate=True)
        for _ in range(start, stop):
            state, metrics = step(state, fds.tree.map(lambda x: x.tensor_split(dp)[mesh["dp"].rank], batch))
            found.append(metrics["loss"].item())
        fds.save(state, tmp_path)
        return found

    before = comm.simulate(losses, shapes[0], 0, 2, world_size=shapes[0][0] * shapes[0][1])[0]
    after = comm.simulate(losses, shapes[1], 2, 4, world_size=shapes[1][0] * shapes[1][1])[0]
    assert before + after == pytest.approx(comm.simulate(losses, (1, 1), 0, 4, world_size=1)[0], rel=1e-5)


RULES.setdefault("one for each, anywhere", fds.param_groups({lambda path: path.endswith("w"): fds.lion(0.1)}, fds.adamw(0.1)))


def test_processes_read_what_the_simulator_wrote(tmp_path: Path) -> None:
    """One capability, two worlds: two Gloo processes load what three simulated ranks saved, and the other way round.

    The processes save in the background, writers' threads beside the ranks' collectives.
    """
    expected = comm.simulate(lambda: saved(tmp_path, make("muon", transforms.zero(3)), tag="sim"), world_size=3)[0]
    first, second = comm.spawn(read_and_write, tmp_path, world_size=2)
    assert_same_contents(first[0], expected[0])
    assert_same(second, first)
    assert_same(first[1], expected[1])
    assert checkpointing.tags(tmp_path) == ["sim", "4", "5"]
    for found, params, _ in comm.simulate(lambda: read(tmp_path, "5"), world_size=3):
        assert_same_contents(found, first[2])
        assert_same(params, first[3])


def read(folder: Path, tag: str, rule: str = "muon") -> tuple[dict[str, Tensor], Any, fds.State]:
    step = make(rule, transforms.zero(2))
    state = fds.load(folder, like=step.init(fresh()), tag=tag)
    return contents(state), step.params(state), state


def read_and_write(folder: Path) -> Any:
    found, params, state = read(folder, "sim")
    step = make("muon", transforms.zero(2))
    with checkpointing.Saver(folder, keep_last=2) as saver:
        for count in (2, 3, 4):
            state = run(step, state, count, count + 1)
            saver.save(state)
    return found, params, contents(state), step.params(state)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_copies_are_written_in_parts(folder: Path, monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    """What several ranks have, each writes a part of; the parts meet in the leaf."""
    monkeypatch.setattr(checkpointing.shard_plan, "_SPLIT", 8)
    expected = comm.simulate(lambda: saved(folder, make("adamw", transforms.zero(stage)), tag="parts"), world_size=3)[0]
    for found, params, _ in comm.simulate(lambda: read(folder, "parts", "adamw"), world_size=2):
        assert_same_contents(found, expected[0])
        assert_same(params, expected[1])


def test_padding_is_likes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a loaded state is whatever was in memory: at equal n it is the saved one to the last bit."""
    module = importlib.import_module("functional_ds.checkpointing.load")  # the package's own ``load`` is the function
    room = module._empty_like
    monkeypatch.setattr(module, "_empty_like", lambda state: fds.tree.map(lambda leaf: leaf.fill_(7), room(state)))

    def program() -> None:
        step = make("adagrad", transforms.zero(2))
        state = trained(step)
        fds.save(state, folder, tag="padded")
        assert_same(fds.tree.leaves(fds.load(folder, like=step.init(fresh()), tag="padded")), fds.tree.leaves(state))

    comm.simulate(program, world_size=4)


# -- other precision, other structure ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_another_precision_takes_what_is_most_exact(tmp_path: Path, stage: int) -> None:
    """Masters become params and params masters, with no bit lost where the new form can hold it; loss scales come and go."""

    def program() -> None:
        wide, half, fp16 = (make("adamw", *precision(policy), transforms.zero(stage)) for policy in ("none", "bf16", "fp16"))
        state = trained(half)
        fds.save(state, tmp_path, tag="half")
        found = fds.load(tmp_path, like=wide.init(fresh()), tag="half")
        assert_same(wide.params(found), half.params(state))
        assert_same(fds.tree.leaves(found.optimizer), fds.tree.leaves(state.optimizer))
        fds.save(found, tmp_path, tag="wide")
        for step in (half, fp16):
            back = fds.load(tmp_path, like=step.init(fresh()), tag="wide")
            assert_same(step.params(back), half.params(state))
            assert {leaf.dtype for leaf in fds.tree.leaves(back.params)} & {torch.bfloat16, torch.float16}
        assert_same(fds.load(tmp_path, like=half.init(fresh()), tag="wide").params, state.params)

    comm.simulate(program, world_size=1 if stage == 0 else 2)


@pytest.mark.parametrize("stage", [0, 3])
def test_another_half_precision_is_rounded_once(tmp_path: Path, stage: int) -> None:
    """From bf16 with masters to fp16 with masters: fp16 params are the masters', not the bf16 ones'."""

    def program() -> None:
        half, fp16 = (make("adamw", *precision(policy), transforms.zero(stage)) for policy in ("bf16", "fp16"))
        state = trained(half)
        fds.save(state, tmp_path)
        found = fds.load(tmp_path, like=fp16.init(fresh()))
        assert_same(found.params, fp16.init(half.params(state)).params)

    comm.simulate(program, world_size=1 if stage == 0 else 2)


def test_a_leaf_that_is_called_like_a_ranks_own(tmp_path: Path) -> None:
    step = fds.train_step(lambda p, x: p["w@0"].sum() * x, fds.sgd(0.1))
    fds.save(step.init({"w@0": torch.ones(2)}), tmp_path)
    assert torch.equal(fds.load(tmp_path, like=step.init({"w@0": torch.zeros(2)})).params["w@0"], torch.ones(2))


def test_quantised_gathers_load_into_exact_ones(tmp_path: Path) -> None:
    """The optimizer's own params count, not what was gathered for the loss."""
    gather = comm.codecs.compressed(comm.all_gather, comm.codecs.Blocks(8))

    def program() -> None:
        lossy, exact = make("adamw", transforms.zero(1, all_gather=gather)), make("adamw", transforms.zero(2))
        state = trained(lossy)
        fds.save(state, tmp_path)
        found = fds.load(tmp_path, like=exact.init(fresh()))
        assert_same(exact.params(found), lossy.params(state))
        fds.save(found, tmp_path, tag="exact")
        back = fds.load(tmp_path, like=lossy.init(fresh()), tag="exact")
        assert_same(lossy.params(back), lossy.params(state))

    comm.simulate(program, world_size=2)


def test_differences_are_listed(tmp_path: Path) -> None:
    adam, sgd = (fds.train_step(lambda p, x: p["a"].sum() + p["b"].sum(), rule) for rule in (fds.adamw(0.1), fds.sgd(0.1)))
    fds.save(adam.init({"a": torch.ones(2), "b": torch.ones(3, 2)}), tmp_path)
    with pytest.raises(fds.checkpointing.StructureError) as caught:
        fds.load(tmp_path, like=adam.init({"c": torch.ones(2), "b": torch.ones(2, 3)}))
    for part in ("missing", "params/c", "optimizer.exp_avg/c", "not in like", "params/a", "[3, 2] there, [2, 3] here"):
        assert part in str(caught.value)
    with pytest.raises(fds.checkpointing.StructureError, match=r"optimizer.exp_avg/a, .*optimizer.steps/b"):
        fds.load(tmp_path, like=sgd.init({"a": torch.ones(2), "b": torch.ones(3, 2)}))
    fds.save(sgd.init({"which": torch.arange(3)}), tmp_path, tag="int")
    with pytest.raises(fds.checkpointing.StructureError, match=r"params/which \(torch.int64 there, torch.float32 here\)"):
        fds.load(tmp_path, like=sgd.init({"which": torch.ones(3)}), tag="int")


@pytest.mark.parametrize("stage", [None, 3])
def test_partial_loads_are_asked_for_by_name(tmp_path: Path, stage: int | None) -> None:
    def tree(*names: str) -> dict[str, Tensor]:
        return {name: torch.full((3,), float(len(name))) for name in names}

    def program() -> None:
        adam, sgd = (
            fds.compose(*stage_of(stage, "one"))(fds.train_step(lambda p, x: p["a"].sum() * x, rule))
            for rule in (fds.adamw(0.1), fds.sgd(0.1))
        )
        state, _ = adam(adam.init(tree("a", "bb")), torch.ones(()))
        fds.save(state, tmp_path)
        params = adam.params(state)
        found = fds.load(tmp_path, like=sgd.init(tree("a", "bb")), only="params")
        assert_same(sgd.params(found), params)
        assert found.step.item() == 0
        found = fds.load(tmp_path, like=sgd.init(tree("a", "bb")), allow_extra="optimizer*")
        assert found.step.item() == 1
        found = fds.load(
            tmp_path, like=sgd.init(tree("a", "ccc")), only="params", allow_missing="params/ccc", allow_extra="*/bb"
        )
        assert_same(sgd.params(found), {"a": params["a"], "ccc": torch.full((3,), 3.0)})
        found = fds.load(tmp_path, like=adam.init(tree("a", "ccc")), only=("params/a", "step"))
        assert_same(adam.params(found), {"a": params["a"], "ccc": torch.full((3,), 3.0)})
        with pytest.raises(ValueError, match=r"only='parms' matches nothing in like, which has .*params/bb"):
            fds.load(tmp_path, like=sgd.init(tree("a", "bb")), only=("step", "parms"))

    comm.simulate(program, world_size=1 if stage is None else 2)


def test_counts_that_differ_do_not_become_one(tmp_path: Path) -> None:
    """Leaves whose optimizers were started at different times cannot share a segment's one count."""

    def program() -> None:
        apart, one = (make("adamw", transforms.zero(1, unit_of=unit)) for unit in (each_leaf, lambda path: "all"))
        state = trained(apart)
        next(iter(state.optimizer.steps)).fill_(7)
        fds.save(state, tmp_path)
        with pytest.raises(fds.checkpointing.StructureError, match="like has one number for both"):
            fds.load(tmp_path, like=one.init(fresh()))

    comm.simulate(program, world_size=2)


def test_numbers_in_a_state_stay_numbers(tmp_path: Path) -> None:
    class Counting:
        def init(self, params: list[Tensor]) -> dict[str, Any]:
            return {"count": 0, "rate": 0.5, "on": True}

        def update(self, grads: list[Tensor], state: Any, params: Any) -> Any:
            return [-grad * state["rate"] for grad in grads], {**state, "count": state["count"] + 1}

    step = fds.train_step(lambda p, x: p["w"].sum() * x, Counting())
    state, _ = step(step.init({"w": torch.ones(2)}), torch.ones(()))
    fds.save(state, tmp_path)
    assert fds.load(tmp_path, like=step.init({"w": torch.ones(2)})).optimizer == {"count": 1, "rate": 0.5, "on": True}
    with pytest.raises(TypeError, match=r"slots.note.*only tensors and numbers"):
        fds.save(state.put(note="text"), tmp_path)


def test_a_state_of_complex_and_odd_tensors(tmp_path: Path) -> None:
    dtypes = [*(d for d in checkpointing.manifest.DTYPES.values() if d.itemsize == 1 or d.is_floating_point), torch.complex64]
    slots = {str(d): torch.arange(5).to(torch.float32).to(d) for d in dtypes}
    step = fds.train_step(lambda p, x: p["w"].sum() * x, fds.sgd(0.1))
    fds.save(step.init({"w": torch.ones(2)}).put(odd=slots, turned=torch.ones(3, 4).T), tmp_path)
    like = step.init({"w": torch.ones(2)}).put(odd={k: torch.zeros_like(v) for k, v in slots.items()}, turned=torch.zeros(4, 3))
    found = fds.load(tmp_path, like=like)
    assert_same(found.slots["odd"], slots)
    assert torch.equal(found.slots["turned"], torch.ones(4, 3))


def test_ranks_that_differ_keep_their_own(tmp_path: Path) -> None:
    """What is not alike on all ranks is each rank's own, and goes back to as many ranks only."""

    def program(n: int) -> None:
        slots = fds.compose(fds.wrap("mine", slot="mine"), fds.wrap("owed", slot="owed"))
        step = fds.compose(transforms.zero(0), slots)(fds.train_step(lambda p, x: p["w"].sum() * x, fds.sgd(0.1)))
        mine = torch.full((3,), float(comm.world().rank))
        owed = comm.codecs.ErrorFeedback(comm.codecs.TopK(0.5)).init([mine])
        state = step.init({"w": torch.ones(4)}).put(mine=mine, owed=owed)
        if n == 3:
            state.slots["owed"].own[0].fill_(comm.world().rank)
            fds.save(state, tmp_path)
        like = step.init({"w": torch.zeros(4)}).put(
            mine=torch.zeros(3), owed=comm.codecs.ErrorFeedback(comm.codecs.TopK(0.5)).init([mine])
        )
        if n == 3:
            found = fds.load(tmp_path, like=like)
            assert torch.equal(found.slots["mine"], mine)
            assert torch.equal(found.slots["owed"].own[0], mine)
        else:
            with pytest.raises(fds.checkpointing.StructureError, match="each rank had its own"):
                fds.load(tmp_path, like=like)
            found = fds.load(tmp_path, like=like, allow_missing=("slots.owed.*", "slots.mine"))
            assert torch.equal(step.params(found)["w"], torch.ones(4))

    comm.simulate(program, 3, world_size=3)
    comm.simulate(program, 2, world_size=2)


@pytest.mark.parametrize(
    "places", [{"optimizer": "disk"}, {"optimizer": "disk", "params": "disk"}, {"optimizer": "cpu", "params": "cpu"}]
)
def test_another_placement_of_the_optimizer(tmp_path: Path, places: dict[str, Any]) -> None:
    """What lies on a disk or a host is saved as what lies in memory, and comes back to either."""
    (tmp_path / "files").mkdir()
    path = {"path": tmp_path / "files"} if "disk" in places.values() else {}

    def program() -> None:
        precise = transforms.mixed_precision("bf16")
        away = make("adamw", precise, transforms.offload(**places, **path), transforms.zero(3))
        here = make("adamw", precise, transforms.zero(1))
        state = trained(away)
        fds.save(state, tmp_path / "run", tag="away")
        found = fds.load(tmp_path / "run", like=here.init(fresh()), tag="away")
        assert_same(here.params(found), away.params(state))
        fds.save(found, tmp_path / "run", tag="here")
        back = fds.load(tmp_path / "run", like=away.init(fresh()), tag="here")
        assert_same(away.params(back), away.params(state))
        assert_same(away.params(run(away, back, 2, 3)), here.params(run(here, found, 2, 3)))

    comm.simulate(program, world_size=2)


def test_torchs_own_loader_reads_it(tmp_path: Path) -> None:
    """The format is one of torch.distributed.checkpoint's: sharded, resharded, and without a pickle."""
    import torch.distributed.checkpoint as dcp

    from functional_ds.checkpointing.dcp import CheckpointReader

    expected = comm.simulate(lambda: saved(tmp_path, make("adamw", transforms.zero(3))), world_size=2)[0][1]
    flat = torch.zeros(33)
    with pytest.warns(UserWarning, match="single process"):
        dcp.load({"params/embed.w": flat}, storage_reader=CheckpointReader(tmp_path, "2"))
    assert torch.equal(flat.view(11, 3), expected["embed.w"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_states_on_a_gpu(tmp_path: Path) -> None:
    step = fds.train_step(lambda p, x: (p["w"] * x).sum(), fds.adamw(0.1))
    params = {"w": torch.randn(1000, 300, device="cuda")}
    state, _ = step(step.init(params), torch.ones(300, device="cuda"))
    with checkpointing.Saver(tmp_path) as saver:
        saver.save(state)
        kept = state.clone()
        step(state, torch.ones(300, device="cuda"))
    assert_same(fds.tree.leaves(fds.load(tmp_path, like=step.init(params))), fds.tree.leaves(kept))
