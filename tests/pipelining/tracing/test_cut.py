"""Stages from modules: together they are the module, bit for bit."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm
from functional_ds import pipelining as pp
from functional_ds import transforms as T
from functional_ds.testing import assert_same
from tests.pipelining.modules import CASES, Case, mse, rows

Params = dict[str, Tensor]


def _leaves(params: Params) -> Params:
    return {path: leaf.detach().clone().requires_grad_() for path, leaf in params.items()}


def _of(function: Any, params: Params) -> tuple[Tensor, Params]:
    """A loss and its gradients, from a fixed state of torch's random numbers."""
    leaves = _leaves(params)
    torch.manual_seed(11)
    loss = function(leaves)
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    pairs = zip(leaves.items(), grads, strict=True)
    return loss.detach(), {path: torch.zeros_like(leaf) if grad is None else grad for (path, leaf), grad in pairs}


def _apart(stages: pp.Stages, params: Params, batch: Any) -> tuple[Tensor, Params]:
    """The same stage by stage, as on ranks of their own: nothing but x goes forward, nothing but its gradient back."""
    torch.manual_seed(11)
    x: Any = None
    ran = []
    for index, stage in enumerate(stages):
        own = _leaves({path: params[path] for path in stage.paths})
        x = fds.tree.map(lambda t: t.detach().requires_grad_(t.is_floating_point()), x)
        y = stages.run(index, own, x, batch, None)
        ran.append((own, x, y))
        x = y
    totals = {path: torch.zeros_like(leaf) for path, leaf in params.items()}
    seeds: list[Any] = [torch.ones(())]
    for own, x, y in reversed(ran):
        pairs = [(t, g) for t, g in zip(fds.tree.leaves(y), seeds, strict=True) if g is not None and t.requires_grad]
        ends = [t for t in fds.tree.leaves(x) if t.requires_grad]
        outputs, given_ = zip(*pairs, strict=True)
        found = torch.autograd.grad(outputs, [*ends, *own.values()], given_, allow_unused=True)
        arrived = dict(zip(map(id, ends), found, strict=False))
        seeds = [arrived.get(id(t)) for t in fds.tree.leaves(x)]
        for path, grad in zip(own, found[len(ends) :], strict=True):
            totals[path] += 0 if grad is None else grad
    return ran[-1][2].detach(), totals


def _whole(case: Case, params: Params, batch: Any) -> tuple[Tensor, Params]:
    apply, _ = fds.functional(case.built())
    return _of(lambda leaves: case.loss(apply(leaves, batch[0]), batch), params)


@pytest.mark.law(36)
@settings(max_examples=settings.default.max_examples * 3 // 5)
@given(name=st.sampled_from(sorted(CASES)), data=st.data())
def test_stages_together_are_the_module(name: str, data: st.DataObject) -> None:
    """stages(params, batch) = loss(module(batch)), value and gradients, bitwise, for any cuts and batch sizes."""
    case = CASES[name]
    at = [path for path in case.at if data.draw(st.booleans(), label=path)]
    stages, params = pp.cut(case.built(), at, loss=case.loss, example=case.batch(2))
    assert len(stages) == len(at) + 1
    batch = case.batch(data.draw(st.sampled_from([2, 3]), label="rows"))
    assert_same(_of(lambda leaves: stages(leaves, batch), params), _whole(case, params, batch))


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.law(36)
def test_stages_apart_are_the_module(name: str) -> None:
    """Stages that share nothing but x have the module's loss; a leaf's gradients on all of its stages sum up to its own."""
    case = CASES[name]
    stages, params = pp.cut(case.built(), case.at, loss=case.loss, example=case.batch(2))
    batch = case.batch(3)
    loss, grads = _apart(stages, params, batch)
    expected, whole = _whole(case, params, batch)
    assert_same(loss, expected)
    torch.testing.assert_close(grads, whole)


def _steps(loss: Any, params: Params, batch: Any, *transforms: fds.Transform) -> tuple[list[float], Any]:
    step = fds.compose(*transforms)(fds.train_step(loss, fds.adamw(0.05, eps=1e-4)))
    state = step.init(params)
    losses = []
    for _ in range(2):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"].item())
    return [*losses, step.evaluate(state, batch).item()], step.params(state)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["gpt", "masked", "skips"])
@pytest.mark.parametrize(
    "transforms",
    [(T.mixed_precision("bf16"),), (T.zero(3),), (T.accumulate(2), T.zero(2))],
    ids=["bf16", "zero 3", "accumulated"],
)
def test_steps_of_stages_are_steps_of_the_module(name: str, transforms: Any) -> None:
    """train_step(stages) = train_step(loss of the module), cast and in shards."""
    case = CASES[name]
    stages, params = pp.cut(case.built(), case.at[1:3], loss=case.loss, example=case.batch(2))
    apply, _ = fds.functional(case.built())

    def program() -> None:
        batch = case.batch(4)
        found = _steps(stages, params, batch, *transforms)
        assert_same(found, _steps(lambda p, b: case.loss(apply(p, b[0]), b), params, batch, *transforms))

    comm.simulate(program, world_size=2)


@pytest.mark.sample(2)
@pytest.mark.law(36)
@pytest.mark.parametrize(("name", "policy"), [("gpt", "f32"), ("skips", "f32"), ("records", "f32"), ("masked", "bf16")])
def test_a_cut_model_in_a_pipeline(name: str, policy: str) -> None:
    """pipeline(cut(module)) = the single-device step of the module, skips, integers and tied leaves included."""
    case = CASES[name]
    stages, params = pp.cut(case.built(), case.at[1:4], loss=case.loss, example=case.batch(2))
    schedule = pp.interleaved_one_f_one_b(2, 4, v=2) if len(stages) == 4 else pp.one_f_one_b(len(stages), 4)
    precision = T.mixed_precision(policy)

    def program() -> Any:
        return _steps(stages, params, case.batch(8), precision, T.pipeline(schedule, stages, comm.world()))

    whole = _steps(stages, params, case.batch(8), precision, T.accumulate(4))
    for found in comm.simulate(program, world_size=schedule.ranks):
        if policy == "f32":
            torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-5)
        else:  # AdamW makes steps of 0.05 out of gradients that are little but rounding
            torch.testing.assert_close(found[0], whole[0], rtol=1e-2, atol=0)


def test_what_is_sent() -> None:
    """Activations that are used later are sent on; masks and positions are recomputed, and unused results are left out."""
    case = CASES["masked"]
    stages, params = pp.cut(case.built(), case.at, loss=case.loss, example=case.batch(2))
    sent = [[(x.dtype, tuple(x.shape)) for x in handed] for handed in stages.check(params, case.batch(2))]
    hidden, chosen = (torch.float32, (2, 5, 6)), (torch.int64, (2, 5))
    within = [hidden, chosen, (torch.float32, (2, 5, 6))]  # the residual, the integers, and what the layer is to take
    assert [sorted(map(str, each)) for each in sent[:4]] == [sorted(map(str, within))] * 4
    assert sent[4] == [hidden]
    skips = CASES["skips"]
    stages, params = pp.cut(skips.built(), skips.at, loss=skips.loss, example=skips.batch(2))
    assert [len(each) for each in stages.check(params, skips.batch(2))] == [1, 2, 3, 2, 1]


def test_unused_leaves_are_stored_first() -> None:
    """A parameter that no stage uses is the first one's; tied ones are on every stage that uses them."""
    module = nn.Module()
    module = CASES["masked"].built()
    module.unused = nn.Parameter(torch.ones(2))
    stages, params = pp.cut(module, ["layers.1", "head"], loss=CASES["masked"].loss, example=CASES["masked"].batch(2))
    assert "unused" in stages[0].paths
    assert [path for path in params if sum(path in stage.paths for stage in stages) > 1] == ["embed.weight"]
    assert "of them shared" in str(stages)


def test_numbers_of_stages() -> None:
    """Blocks are shared out by number, parameters, given or measured cost."""
    gpt = CASES["gpt"]
    sized = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 60), nn.Linear(60, 6))

    def starts(module: nn.Module, at: Any, case: Case = CASES["sequential"], **options: Any) -> list[str]:
        stages, _ = pp.cut(module, at, loss=case.loss, example=case.batch(2), **options)
        return [stage.name.partition(" ")[0] for stage in stages]

    assert starts(gpt.built(), 3, gpt) == ["wte", "blocks.1", "blocks.2"]
    assert starts(sized, 3) == ["0", "2", "4"]
    assert starts(sized, 2, by="parameters") == ["0", "5"]
    assert starts(sized, 2, by=[9, 1, 1, 1, 1, 1]) == ["0", "1"]
    assert starts(sized, 2, by=lambda path, module: float(path == "0")) == ["0", "1"]
    assert len(starts(sized, 3, by="measured")) == 3
    assert starts(gpt.built(), ["blocks.[12]"], gpt) == ["wte", "blocks.1", "blocks.2"]
    assert starts(CASES["twice"].built(), [("layers.0", 1), ("layers.0", 2)]) == ["layers.0"] * 3
    with pytest.raises(ValueError, match="only 6 blocks are called"):
        starts(sized, 7, blocks="*")
    with pytest.raises(ValueError, match="the longest ModuleList or Sequential has 6"):
        starts(sized, 7)
    with pytest.raises(ValueError, match="by has 1 costs for 6 blocks"):
        starts(sized, 2, by=[1])
    with pytest.raises(ValueError, match="by='size' is unknown"):
        starts(sized, 2, by="size")


@pytest.mark.parametrize(
    ("at", "match"),
    [
        (["layer.1"], "'layer.1' is not a module of this one; the nearest are layers"),
        (["layers.2", "layers.1"], "'layers.2' comes before 'layers.1', but is called after it"),
        (["layers.1", "layers.1"], "at: 'layers.1' is listed twice"),
        (["layers.0"], "nothing is computed before 'layers.0'"),
        ([("layers.1", 3)], "'layers.1' is not called 4 times"),
    ],
)
def test_bad_cuts_are_refused(at: Any, match: str) -> None:
    """Names that are not there, not called or out of order."""
    with pytest.raises(ValueError, match=match):
        pp.cut(CASES["twice"].built(), at, loss=mse, example=rows(2))


def test_what_is_cut_and_where_is_of_the_right_kind() -> None:
    """A function, a path alone and half a number are refused by name."""
    with pytest.raises(TypeError, match=r"module=.* is not an nn\.Module; stages\(functions, params\)"):
        pp.cut(lambda x: x, 2, example=rows(2))  # type: ignore[arg-type]
    for at in ("layers.1", 2.0):
        with pytest.raises(TypeError, match=f"at={at!r}: give a number of stages, or a list"):
            pp.cut(CASES["twice"].built(), at, example=rows(2))  # type: ignore[arg-type]


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2


class _Does(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.first, self.second, self.between = nn.Linear(6, 6), nn.Linear(6, 6), between
        self.table, self.inner = torch.zeros(6), _Appends()

    def forward(self, x: Tensor) -> Tensor:
        given = x
        x = self.first(x)
        return self.second(self.between(self, x, given))


def _branches(module: Any, x: Tensor, given: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def _by_chance(module: Any, x: Tensor, given: Tensor) -> Tensor:
    return x if torch.rand(()) < 0.5 else -x


def _function(module: Any, x: Tensor, given: Tensor) -> Tensor:
    return _Double.apply(x).tanh()


def _writes_input(module: Any, x: Tensor, given: Tensor) -> Tensor:
    given.add_(x)
    return given


def _writes_constant(module: Any, x: Tensor, given: Tensor) -> Tensor:
    module.table.add_(1)
    return x + module.table


class _Appends(nn.Module):
    """Puts one of its results into a list that it is given."""

    def forward(self, x: Tensor, more: list[Tensor]) -> Tensor:
        more.append(x * 2)
        return x.tanh()


def _appends(module: Any, x: Tensor, given: Tensor) -> Tensor:
    more: list[Tensor] = []
    return module.inner(x, more) + more[0]


def _hooks(module: Any, x: Tensor, given: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return x.tanh()


@pytest.mark.parametrize(
    ("between", "match"),
    [
        (_branches, r"test_cut\.py:\d+: __bool__ reads a tensor's value"),
        (_by_chance, r"test_cut\.py:\d+: __bool__ reads a tensor's value"),
        (_function, r"test_cut\.py:\d+: tanh's argument comes from code that is not seen .* autograd.Function"),
        (_writes_input, r"test_cut\.py:\d+: writes into one of the module's inputs"),
        (_writes_constant, r"test_cut\.py:\d+: writes into a tensor \[6\] that is not a buffer"),
        (_appends, r"test_cut\.py:\d+: inner puts a tensor into a list or dict that it is given; return it"),
        (_hooks, r"test_cut\.py:\d+: tanh is called under saved_tensors_hooks"),
    ],
)
def test_what_cannot_be_cut_is_refused(between: Any, match: str) -> None:
    """A forward that a stage could not repeat is refused, and the line is named."""
    with pytest.raises(ValueError, match=match):
        pp.cut(_Does(between), ["second"], loss=mse, example=rows(2))


def test_torn_views_are_refused() -> None:
    """A tensor that is written into after the cut, while a view of it is sent, too."""

    class Torn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            part = x[:, :3]
            y = self.second(x.detach())
            part.add_(1)
            return x + y

    with pytest.raises(ValueError, match="of which a view is used on both sides of the split"):
        pp.cut(Torn(), ["second"], loss=mse, example=rows(2))


def test_buffers_stay_and_modes_hold() -> None:
    """check writes no running statistics; eval() of the cut module holds for the stages."""
    case = CASES["normed"]
    stages, params = pp.cut(case.built(), case.at, loss=case.loss, example=case.batch(2))
    assert stages.apply is not None
    before = {name: buffer.clone() for name, buffer in stages.apply.buffers.items()}
    stages.check(params, case.batch(3))
    assert_same(dict(stages.apply.buffers), before)
    trained = stages(params, case.batch(3))
    stages.apply.module.eval()
    evaluated = stages(params, case.batch(3))
    assert trained != evaluated
    assert evaluated == stages(params, case.batch(3))


def test_another_batch_may_use_what_the_example_did_not() -> None:
    """A stage that is not begun with some batch is refused by name."""

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x)) if len(x) > 2 else self.first(x)

    stages, params = pp.cut(Sometimes(), ["second"], loss=mse, example=rows(3))
    with pytest.raises(ValueError, match="'second' begins a stage, but is not called 1 times with this batch"):
        stages(params, rows(2))


def _llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 16}
    config = transformers.LlamaConfig(
        **sizes, num_key_value_heads=1, tie_word_embeddings=True, use_cache=False, max_position_embeddings=16
    )
    return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]


def _gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(vocab_size=16, n_embd=8, n_layer=3, n_head=2, n_positions=16, use_cache=False, **ends)
    return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


@pytest.mark.sample(2)
@pytest.mark.law(36)
@pytest.mark.parametrize(
    ("make", "at"), [(_llama, ["model.layers.1", "model.layers.2"]), (_gpt2, ["transformer.h.1", "transformer.h.2"])]
)
@pytest.mark.parametrize("padded", [False, True])
def test_hugging_face_models(make: Any, at: list[str], padded: bool) -> None:
    """Language models with tied heads, rotary tables and masks: value and gradients bitwise, and one activation is sent."""
    torch.manual_seed(0)
    module = make()
    ids = torch.randint(0, 16, (2, 7))
    batch = {"input_ids": ids, "labels": ids}
    if padded:
        batch["attention_mask"] = (torch.arange(7) > torch.tensor([[0], [2]])).long()
    stages, params = pp.cut(module, at, loss=lambda output, batch: output.loss, example=batch)
    assert [[tuple(x.shape) for x in handed] for handed in stages.check(params, batch)] == [[(2, 7, 8)]] * 2
    apply, _ = fds.functional(module)
    assert_same(_of(lambda leaves: stages(leaves, batch), params), _of(lambda leaves: apply(leaves, **batch).loss, params))


def test_caches_are_refused_with_a_hint() -> None:
    """An object that blocks fill with tensors cannot be sent."""
    module = _llama()
    module.config.use_cache = True
    with pytest.raises(ValueError, match=r"a DynamicCache that holds tensors.*use_cache=False"):
        pp.cut(module, 2, loss=mse, example={"input_ids": torch.zeros(1, 3, dtype=torch.int64)})
