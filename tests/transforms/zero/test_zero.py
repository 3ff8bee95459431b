"""Laws 19 to 22: every stage is the single-device step, in exactly the memory and traffic that was promised."""

import warnings
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import functional_ds as fds
from functional_ds import comm, transforms
from functional_ds.step.axes import axis
from functional_ds.transforms.zero.gather import Gatherer
from tests.transforms.models import CASES, Blocks, mlp, own_rows, run

STAGES = (0, 1, 2, 3)
TOLERANCE = 2e-5  # a few hundred fp32 additions in other orders, passed through three AdamW updates with eps = 1e-4


@cache
def alone(name: str, rows: int, k: int = 1) -> tuple[list[float], list[float], Any]:
    """The single-device step on the whole batch."""
    return run(CASES[name], (transforms.accumulate(k),) if k > 1 else (), rows=rows)


def assert_same(found: tuple[list[float], list[float], Any], expected: tuple[list[float], list[float], Any]) -> None:
    torch.testing.assert_close(found[:2], expected[:2], rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
    for leaf, other in zip(fds.tree.leaves(found[2]), fds.tree.leaves(expected[2]), strict=True):
        torch.testing.assert_close(leaf, other, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


def whole(path: str) -> str:
    return "everything"


def leaf(path: str) -> str:
    return path


@pytest.mark.law(19)
@given(
    name=st.sampled_from(sorted(CASES)),
    stage=st.sampled_from(STAGES),
    n=st.sampled_from((1, 2, 3, 4, 8)),
    k=st.sampled_from((1, 2)),
    unit_of=st.sampled_from((None, whole, leaf)),
    reshard=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_stage_is_the_single_device_step(
    name: str, stage: int, n: int, k: int, unit_of: Any, reshard: bool, seed: int
) -> None:
    """zero(k) on n ranks = the step on the concatenated batch, for any model, unit partition, micro-batches, interleaving."""
    rows = 2 * n
    strategy = (transforms.zero(stage, unit_of=unit_of, reshard_last_units=reshard), transforms.accumulate(k))
    expected = alone(name, rows)
    for found in comm.simulate(lambda: run(CASES[name], strategy, rows=rows), world_size=n, seed=seed):
        assert_same(found, expected)


@pytest.mark.sample(19)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", sorted(CASES))
def test_every_model_in_every_stage(name: str, stage: int) -> None:
    """Law 19 for each model that has an awkward trait, whatever Hypothesis drew."""
    for found in comm.simulate(lambda: run(CASES[name], (transforms.zero(stage),)), world_size=2, seed=stage):
        assert_same(found, alone(name, 8))


def everything_on_processes() -> dict[tuple[str, int], Any]:
    names = ("checkpoint", "tied", "lora", "odd leaves", "branching", "weighted")
    pairs = [(name, stage) for place, name in enumerate(names) for stage in STAGES if (place + stage) % 2]
    return {(name, stage): run(CASES[name], (transforms.zero(stage),)) for name, stage in pairs}


def test_processes_give_the_bits_of_the_simulator() -> None:
    """Law 18 for whole steps: two Gloo processes and two simulated ranks end with the same bits."""
    simulated = comm.simulate(everything_on_processes, world_size=2)
    spawned = comm.spawn(everything_on_processes, world_size=2)
    for here, there in zip(simulated, spawned, strict=True):
        for key, expected in here.items():
            assert there[key][:2] == expected[:2], key
            for leaf, other in zip(fds.tree.leaves(there[key][2]), fds.tree.leaves(expected[2]), strict=True):
                assert torch.equal(leaf, other), key


@pytest.mark.parametrize("stage", STAGES)
def test_hugging_face_llama(stage: int) -> None:
    """Law 19 for a Llama with tied embeddings, a frozen layer and recomputation."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        use_cache=False,
    )

    def program(*strategy: fds.Transform) -> list[float]:
        torch.manual_seed(0)
        llama = transformers.LlamaForCausalLM(config)
        llama.model.layers[1].requires_grad_(False)
        llama.train()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # transformers is renaming this
            llama.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        apply, params = fds.functional(llama)
        step = fds.train_step(lambda p, ids: apply(p, input_ids=ids, labels=ids).loss, fds.adamw(1e-2, eps=1e-4))
        step = fds.compose(*strategy)(step)
        state = step.init(params)
        ids = own_rows(torch.randint(0, 61, (4, 12), generator=torch.Generator().manual_seed(5)), comm.world())
        losses = []
        for _ in range(3):
            state, metrics = step(state, ids)
            losses.append(metrics["loss"].item())
        return losses

    expected = program()
    for losses in comm.simulate(lambda: program(transforms.zero(stage)), world_size=2):
        torch.testing.assert_close(losses, expected, rtol=TOLERANCE, atol=TOLERANCE)


# -- memory and traffic -------------------------------------------------------------------------------------------------


def blocks_program(stage: int, policy: str, reshard: bool, k: int = 1) -> dict[str, Any]:
    """What one step holds and sends: state bytes by kind, gradient bytes at the update, the ledger's elements."""
    torch.manual_seed(0)
    apply, params = fds.functional(Blocks())
    held: dict[str, Any] = {}

    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        held["gradients"] = sum(g.nbytes for g in grads.sum)
        return inner(step, state, grads)

    chain = [transforms.mixed_precision("bf16")] if policy == "bf16" else []
    chain += [transforms.zero(stage, reshard_last_units=reshard), transforms.accumulate(k), fds.wrap("weigh", update=update)]
    step = fds.compose(*chain)(
        fds.train_step(lambda p, b: F.mse_loss(apply(p, b[0]), b[1].to(p["out.bias"].dtype)), fds.adamw(1e-2))
    )
    batch = own_rows(CASES["blocks"].batch(60 * k), comm.world())
    state, _ = step(step.init(params), batch)
    state, _ = step(state, batch)  # the order of units is known from here on
    with comm.ledger() as book:
        state, _ = step(state, batch)
    held["params"] = sum(t.nbytes for t in fds.tree.leaves(state.params))
    held["masters"] = sum(t.nbytes for t in fds.tree.leaves(getattr(state.slots.get("mixed_precision"), "masters", ())))
    held["moments"] = sum(t.nbytes for t in fds.tree.leaves((state.optimizer.exp_avg, state.optimizer.exp_avg_sq)))
    layout = state.slots["zero"].layout
    held["psi"] = sum(layout.n * segment.shard for segment in layout.segments)
    held["sent"] = {(row.collective, row.group): (row.calls, row.elements) for row in book.rows}
    held["units"] = len(layout.units)
    held["unit sizes"] = [sum(layout.n * layout.segments[i].shard for i in unit.segments) for unit in layout.units]
    return held


@pytest.mark.sample(2)
@pytest.mark.law(20)
@pytest.mark.parametrize("stage", STAGES)
@given(n=st.integers(1, 5))
def test_bytes_on_each_rank(stage: int, n: int) -> None:
    """Mixed-precision Adam: 16Ψ; 4Ψ + 12Ψ/n; 2Ψ + 14Ψ/n; 16Ψ/n with Ψ padded to shards.

    Stage 1 may hold 2Ψ of gradients and hands shards to the update, because each unit is reduced as soon as it is complete.
    """
    for held in comm.simulate(blocks_program, stage, "bf16", False, world_size=n):
        psi, part = held["psi"], held["psi"] // n
        assert held["params"] == 2 * (psi if stage < 3 else part)
        assert held["masters"] == 4 * (part if stage else psi)
        assert held["moments"] == 8 * (part if stage else psi)
        assert held["gradients"] == 2 * (part if stage else psi)
        total = held["params"] + held["masters"] + held["moments"] + held["gradients"]
        formula = (16 * psi, 4 * psi + 12 * part, 2 * psi + 14 * part, 16 * part)[stage]
        assert total == formula - (2 * psi - 2 * part if stage == 1 else 0)


@pytest.mark.sample(2)
@pytest.mark.law(21)
@pytest.mark.parametrize("stage", STAGES)
@given(n=st.integers(1, 5), k=st.sampled_from((1, 2)))
def test_elements_each_rank_sends(stage: int, n: int, k: int) -> None:
    """2Ψ(n-1)/n in stages 0, 1 and 2; 3Ψ(n-1)/n in stage 3; stages 0 and 1 reduce once whatever the micro-batches."""
    for held in comm.simulate(blocks_program, stage, "fp32", True, k, world_size=n):
        psi, sent = held["psi"], held["sent"]
        once = psi * (n - 1) // n
        if stage == 0:
            if n > 1:  # a step of one rank sends nothing and calls nothing
                assert sent["all_reduce", "world/reduce"] == (held["units"], 2 * once)
            continue
        passes = k if stage >= 2 else 1
        if n > 1:
            assert sent["reduce_scatter", "world/reduce"] == (passes * held["units"], passes * once)
            gathers = 2 * k if stage == 3 else 1
            assert sent["all_gather", "world"] == (gathers * held["units"], gathers * once)


@pytest.mark.law(21)
def test_keeping_saves_what_it_says() -> None:
    """By default stage 3 does not gather again what was whole at the end of the forward pass: here two units."""
    for held in comm.simulate(blocks_program, 3, "fp32", False, world_size=2):
        rest, *_, last = held["unit sizes"]
        assert held["sent"]["all_gather", "world"][1] == (2 * held["psi"] - rest - last) // 2


def test_at_most_two_whole_units_and_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage 3 never holds more than two whole units beside the one that is fetched ahead."""
    most = [0]
    fetch = Gatherer.fetch

    def watched(self: Gatherer, unit: int) -> list[Tensor]:
        found = fetch(self, unit)
        most[0] = max(most[0], len(self.whole))
        return found

    monkeypatch.setattr(Gatherer, "fetch", watched)
    comm.simulate(lambda: run(CASES["several passes"], (transforms.zero(3),), steps=4), world_size=2)
    assert most[0] == 2


@pytest.mark.law(21)
@pytest.mark.parametrize("inplace", [False, True])
def test_an_evaluation_gathers_each_unit_once(inplace: bool) -> None:
    """Also where the module writes into its activations, which have to be told from params."""

    def program() -> list[int]:
        layers = [nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(inplace=inplace)) for _ in range(5)]
        apply, params = fds.functional(nn.Sequential(*layers))
        step = transforms.zero(3)(fds.train_step(lambda params, x: apply(params, x).sum(), fds.sgd(0.1)))
        state, found = step.init(params), []
        for _ in range(3):
            with comm.ledger() as book:
                step.evaluate(state, torch.ones(2, 4))
            found.append(sum(row.elements for row in book.rows if row.collective == "all_gather"))
        return found

    assert comm.simulate(program, world_size=2) == [[5 * 8, 5 * 8, 5 * 8]] * 2


def test_units_are_freed_and_gradients_flow_once() -> None:
    """After a step nothing of the whole units is left: the live tensors are the state's."""
    import gc
    import weakref

    seen: list[weakref.ref[Any]] = []

    def loss(p: Any, batch: Any) -> Tensor:
        seen.append(weakref.ref((p["w"] * 1.0).untyped_storage()))
        return ((batch @ p["w"]) ** 2).mean()

    def program() -> bool:
        step = transforms.zero(3)(fds.train_step(loss, fds.sgd(0.1)))
        state, _ = step(step.init({"w": torch.ones(3, 2)}), torch.ones(2, 3))
        gc.disable()
        state, _ = step(state, torch.ones(2, 3))
        gone = all(ref() is None for ref in seen)
        gc.enable()
        return gone

    assert comm.simulate(program, world_size=2) == [True, True]


# -- weights ------------------------------------------------------------------------------------------------------------


@pytest.mark.law(22)
@given(tokens=st.lists(st.integers(0, 5), min_size=4, max_size=4), stage=st.sampled_from(STAGES))
def test_ranks_and_micro_batches_weigh_by_tokens(tokens: list[int], stage: int) -> None:
    """∇L(B) = Σ wᵢ ∇L(Bᵢ), wᵢ = tokensᵢ / Σ tokens: exactly, on small integers; a batch without tokens moves nothing."""
    counts = torch.tensor(tokens, dtype=torch.float32)
    values = torch.arange(4.0)

    def loss(p: Any, batch: tuple[Tensor, Tensor]) -> fds.Weighted:
        return fds.Weighted((p["w"] * batch[0] * batch[1]).sum(), batch[1].sum())

    def program() -> tuple[float, float]:
        step = fds.compose(transforms.zero(stage), transforms.accumulate(2))(fds.train_step(loss, fds.sgd(1.0)))
        state, metrics = step(step.init({"w": torch.zeros(1)}), own_rows((values, counts), comm.world()))
        return step.params(state)["w"].item(), metrics["loss"].item()

    total = max(sum(tokens), 1)
    expected = -((values * counts).sum() / total).item()
    for moved, loss_value in comm.simulate(program, world_size=2):
        assert moved == pytest.approx(expected, rel=1e-6)
        assert loss_value == 0 or (not sum(tokens) and loss_value != loss_value)  # a mean over no tokens is NaN


# -- bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [4, -1, "3", None])
def test_refuses_a_stage_that_does_not_exist(stage: Any) -> None:
    with pytest.raises(ValueError, match=r"stage=.*0, 1, 2 and 3"):
        transforms.zero(stage)


def test_refuses_what_is_no_group() -> None:
    with pytest.raises(TypeError, match="not a group"):
        transforms.zero(1, "dp")  # type: ignore[arg-type]


def test_refuses_params_that_differ_between_ranks() -> None:
    def program() -> None:
        size = 3 if comm.world().rank == 1 else 2
        transforms.zero(3)(fds.train_step(lambda p, b: p["w"].sum(), fds.sgd(0.1))).init({"w": torch.ones(size)})

    with pytest.raises(ValueError, match=r"ranks \[1\].*same model"):
        comm.simulate(program, world_size=3)


def test_rank_0_gives_the_params() -> None:
    def program() -> list[float]:
        step = transforms.zero(3)(fds.train_step(lambda p, b: p["w"].sum(), fds.sgd(0.1)))
        return step.params(step.init({"w": torch.full((3,), float(comm.world().rank))}))["w"].tolist()

    assert comm.simulate(program, world_size=2) == [[0.0] * 3] * 2


def test_an_error_in_the_loss_loses_nothing() -> None:
    """A state survives a failing loss, and the next step goes on as if nothing had happened."""

    def program(fail: bool) -> list[float]:
        def loss(p: Any, batch: Tensor) -> Tensor:
            if batch.sum() < 0:
                raise RuntimeError("bad batch")
            return (p["blocks"][0] * p["blocks"][1] * batch).sum()

        step = transforms.zero(3)(fds.train_step(loss, fds.sgd(0.1)))
        state = step.init({"blocks": [torch.ones(4), torch.ones(4)]})
        state, _ = step(state, torch.ones(4))
        if fail:
            with pytest.raises(RuntimeError, match="bad batch"):
                step(state, -torch.ones(4))
        state, metrics = step(state, torch.ones(4))
        return [metrics["loss"].item(), *step.params(state)["blocks"][1].tolist()]

    assert comm.simulate(program, True, world_size=2) == comm.simulate(program, False, world_size=2)


def test_one_step_of_eight_ranks_runs_a_model_of_units() -> None:
    """The MLP of the benchmark: four layers are four units."""
    apply, params = fds.functional(mlp())
    assert [unit.name for unit in fds.Layout.of(params, 8).units] == ["0", "2", "4", "6"]
    assert isinstance(apply.module, nn.Module)


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return w * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_that_goes_past_torch_functions_is_refused(stage: int) -> None:
    """A custom autograd.Function would take the placeholder for the parameter; its gradient would be lost in silence."""

    def program(bare: bool) -> None:
        def loss(p: Any, batch: Tensor) -> Tensor:
            return (Doubling.apply(p["w"] if bare else p["w"].view_as(p["w"])) * batch).sum()

        step = transforms.zero(stage)(fds.train_step(loss, fds.sgd(0.5)))
        state, _ = step(step.init({"w": torch.ones(2)}), torch.ones(2))
        assert step.params(state)["w"].tolist() == [0.0, 0.0]

    comm.simulate(program, False, world_size=2)
    with pytest.raises(RuntimeError, match=r"the parameter 'w' .* pass p\.view_as\(p\)"):
        comm.simulate(program, True, world_size=2)


@pytest.mark.parametrize("stage", [None, *STAGES])
def test_reentrant_checkpoints_are_refused(stage: int | None) -> None:
    """They would leave what they recompute without gradients, without an error where nothing before is trained."""

    def program() -> None:
        def loss(p: Any, batch: Tensor) -> Tensor:
            return checkpoint(lambda x: (x * p["w"]).sum(), batch.requires_grad_(), use_reentrant=True)  # type: ignore[no-any-return]

        step = fds.train_step(loss, fds.sgd(0.5))
        step = step if stage is None else transforms.zero(stage)(step)
        step(step.init({"w": torch.ones(2)}), torch.ones(2))

    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        comm.simulate(program, world_size=2)


@pytest.mark.parametrize("stage", STAGES)
def test_in_place_changes_of_saved_tensors_are_refused(stage: int) -> None:
    """As torch does alone, also where stage 3 keeps saved tensors itself."""

    def program() -> None:
        def loss(p: Any, batch: Tensor) -> Tensor:
            y = (p["w"] * batch).exp()
            y.add_(1)
            return y.sum()

        step = transforms.zero(stage)(fds.train_step(loss, fds.sgd(0.5)))
        step(step.init({"w": torch.ones(2)}), torch.ones(2))

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        comm.simulate(program, world_size=2)


def test_one_zero_and_no_view_before_it() -> None:
    step = fds.train_step(lambda p, b: p["w"].sum(), fds.sgd(0.1))
    with pytest.raises(ValueError, match="another view already"):
        fds.compose(transforms.zero(1), transforms.zero(3))(step)


def test_states_of_two_inits_have_one_structure() -> None:
    step = transforms.zero(3)(fds.train_step(lambda p, b: p["w"].sum(), fds.sgd(0.1)))
    one, other = step.init({"w": torch.ones(2)}), step.init({"w": torch.ones(2)})
    assert all(fds.tree.leaves(fds.tree.map(torch.equal, one.params, other.params)))
    assert fds.tree.structure(one) == fds.tree.structure(other)


def on_a_gpu(stage: int) -> list[float]:
    """The MLP on this process's GPU, in bf16 with fp32 masters."""
    torch.manual_seed(0)
    apply, params = fds.functional(mlp().to("cuda"))
    strategy = (transforms.mixed_precision("bf16"), transforms.zero(stage), transforms.accumulate(2), transforms.clip(1.0))
    step = fds.compose(*strategy)(fds.train_step(lambda p, b: F.mse_loss(apply(p, b[0]), b[1]), fds.adamw(1e-2)))
    state, losses = step.init(params), []
    batch = tuple(x.to("cuda") for x in CASES["mlp"].batch(8))
    for _ in range(4):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"].item())
    return losses


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("stage", STAGES)
def test_a_world_of_one_on_nccl(stage: int) -> None:
    """The same step on a GPU, over NCCL: near the CPU's losses."""
    (losses,) = comm.spawn(on_a_gpu, stage, world_size=1)
    torch.testing.assert_close(losses, run(CASES["mlp"], (), steps=4)[0], rtol=0.1, atol=0.1)


@pytest.mark.law(27)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    stage=st.integers(0, 3),
    n=st.integers(1, 4),
    threshold=st.sampled_from([0, 5]),
    tp=st.booleans(),
)
def test_what_a_transform_adds_to_padding_does_not_count(
    sizes: list[int], stage: int, n: int, threshold: int, tp: bool
) -> None:
    """A norm of gradients to which a number was added: flat tensors end in padding, and have some between leaves."""

    def noisy(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        return inner(step, state, fds.tree.replace(grads, sum=[grad + 0.5 * grads.weight for grad in grads.sum]))

    params = {str(i): torch.linspace(-1, 1, 2 * size).view(2, size) for i, size in enumerate(sizes)}

    def program(dp: Any = None) -> Any:
        mesh = comm.mesh(dp=n, tp=1 + tp) if dp else None
        zero = [transforms.zero(stage, mesh["dp"], persistence_threshold=threshold if stage == 3 else 0)] if mesh else []
        cut = [transforms.tensor_parallel({"0": 0}, mesh["tp"])] if mesh and tp else []
        chain = fds.compose(*zero, *cut, transforms.clip(0.1), fds.wrap("noise", update=noisy))
        step = chain(fds.train_step(loss, fds.adamw(0.1, eps=1.0)))
        state = step.init(params)
        for _ in range(2):
            state, _ = step(state, torch.ones(3))
        return step.params(state)

    def loss(p: Any, x: Tensor) -> Tensor:
        sums = [w.sin().sum() for w in p.values()]
        if axis("tp"):
            sums[0] = comm.reduce_from(sums[0], axis("tp"))
        return x.mean() * torch.stack(sums).sum()

    expected = program()
    for found in comm.simulate(program, True, world_size=n * (1 + tp)):
        torch.testing.assert_close(found, expected)
