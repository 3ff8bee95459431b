"""Plans: what their keys and words mean, and what is refused."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.base.marks import slices_of
from functional_ds.parallel.tensor.leaf_cuts import cuts_of
from functional_ds.parallel.tensor.words import fits


class Attention(nn.Module):
    """Grouped-query attention's projections, as Hugging Face names them."""

    def __init__(self, heads: int, kv: int, width: int = 4) -> None:
        super().__init__()
        self.head_dim, self.num_key_value_groups = 2, heads // kv
        self.q_proj, self.o_proj = nn.Linear(width, 2 * heads), nn.Linear(2 * heads, width)
        self.k_proj, self.v_proj = nn.Linear(width, 2 * kv), nn.Linear(width, 2 * kv, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, 2)) for each in (self.q_proj, self.k_proj, self.v_proj))
        mixed = q * (k + v).repeat_interleave(self.num_key_value_groups, -2)
        return self.o_proj(mixed.flatten(-2))  # type: ignore[no-any-return]


def net(heads: int = 4, kv: int = 2) -> nn.Sequential:
    """A small model with everything that a plan can name."""
    torch.manual_seed(0)
    mlp = nn.Sequential(OrderedDict(up=nn.Linear(4, 8), act=nn.Tanh(), down=nn.Linear(8, 4)))
    return nn.Sequential(OrderedDict(embed=nn.Embedding(8, 4), attn=Attention(heads, kv), norm=nn.LayerNorm(4), mlp=mlp))


PLAN: dict[str, Any] = {
    "q_proj": "colwise",
    "k_proj": "colwise",
    "v_proj": "colwise",
    "o_proj": "rowwise",
    "mlp.up": "colwise",
    "mlp.down": "rowwise",
    "embed": "vocab",
}


def step_of(module: nn.Module, plan: Any, *strategy: fds.Transform) -> Any:
    """A state of a plan, after one step."""
    apply, params = fds.functional(module)
    step = fds.train_step(lambda p, ids: apply(p, ids).square().mean(), fds.sgd(0.1))
    step = fds.compose(*strategy, T.tensor_parallel(plan))(step)
    state = step.init(params)
    return step, step(state, torch.arange(4))[0]


def refused(plan: Any, module: nn.Module | None = None, n: int = 2) -> str:
    """What a plan is refused with."""
    with pytest.raises((ValueError, RuntimeError)) as found:
        comm.simulate(lambda: step_of(module or net(), plan) and None, world_size=n)
    return str(found.value)


def test_keys_are_the_last_names_of_a_path() -> None:
    """Patterns stand for one name each."""
    assert all(fits(*each) for each in (("q_proj", "a.b.q_proj"), ("b.*", "a.b.c"), ("layers.[01].x", "layers.1.x")))
    assert not any(fits(*each) for each in (("b", "a.b.c"), ("*.*.*.*", "a.b.c"), ("proj", "a.q_proj")))


@pytest.mark.parametrize("n", [2, 4])
def test_heads_stay_whole_and_are_shared(n: int) -> None:
    """Fewer key-value heads than ranks: neighbours hold the same head; all others are cut evenly."""

    def program() -> Any:
        apply, params = fds.functional(net())
        cuts = cuts_of(params, PLAN, comm.world())
        del apply  # the params know their module for as long as it is there
        return {path: (cut.dim, cut.ranges, cut.sharers) for path, cut in cuts.slices.items()}

    for rank, found in enumerate(comm.simulate(program, world_size=n)):
        head = rank * 2 // n
        sharers = tuple(range(head * n // 2, (head + 1) * n // 2))
        assert found["attn.k_proj.weight"] == (0, ((2 * head, 2 * head + 2),), sharers)
        assert found["attn.k_proj.bias"] == found["attn.k_proj.weight"]
        wide = 8 // n
        assert found["attn.q_proj.weight"] == (0, ((rank * wide, (rank + 1) * wide),), (rank,))
        assert found["attn.o_proj.weight"] == (1, ((rank * wide, (rank + 1) * wide),), (rank,))
        assert not {"attn.o_proj.bias", "norm.weight"} & found.keys()


class Fused(Attention):
    """The same with one projection, as Phi-3 has it, which is gathered."""

    def __init__(self, heads: int, kv: int) -> None:
        nn.Module.__init__(self)
        self.head_dim, self.num_key_value_groups, self.sizes = 2, heads // kv, [2 * heads, 2 * kv, 2 * kv]
        self.qkv_proj, self.o_proj = nn.Linear(4, sum(self.sizes)), nn.Linear(2 * heads, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (-1, 2)) for each in self.qkv_proj(x).split(self.sizes, -1))
        mixed = q * (k + v).repeat_interleave(self.num_key_value_groups, -2)
        return self.o_proj(mixed.flatten(-2))  # type: ignore[no-any-return]


FUSED = {"qkv_proj": "colwise_gather_output", "o_proj": "rowwise_split_input"}
WIDE = {name: PLAN[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj")}


@pytest.mark.parametrize(
    ("build", "plan", "n"),
    [
        (lambda: Attention(4, 2, width=12), WIDE, 2),  # more features than its heads have, in whole heads
        (lambda: Attention(4, 2, width=24), WIDE, 4),
        (lambda: Attention(4, 2, width=16), WIDE, 4),  # as many times more as a head serves
        (lambda: Fused(4, 1), FUSED, 2),
    ],
)
def test_heads_are_those_of_the_queries(build: Any, plan: dict[str, str], n: int) -> None:
    """Whatever other widths an attention's linears have."""

    def program() -> float:
        torch.manual_seed(0)
        apply, params = fds.functional(nn.Sequential(OrderedDict(attn=build())))
        step = T.tensor_parallel(plan)(fds.train_step(lambda p, x: apply(p, x).square().sum(), fds.sgd(0.1)))
        x = torch.randn(3, next(iter(params.values())).shape[1], generator=torch.Generator().manual_seed(1))
        return step(step.init(params), x)[1]["loss"].item()

    whole = comm.simulate(program, world_size=1)[0]
    assert comm.simulate(program, world_size=n) == [pytest.approx(whole, rel=1e-5)] * n


def test_packed_blocks_are_cut_each() -> None:
    """Each rank has its part of each block, in order."""

    def program() -> Any:
        cuts = cuts_of(fds.functional(net())[1], {"mlp.up": fds.tp.Packed([4, 2, 2])}, comm.world())
        return cuts.slices["mlp.up.weight"].ranges, cuts.slices["mlp.up.bias"].ranges

    assert comm.simulate(program, world_size=2) == [(((0, 2), (4, 5), (6, 7)),) * 2, (((2, 4), (5, 6), (7, 8)),) * 2]


def test_leaves_of_no_module_take_words_and_dims() -> None:
    """Words mean what they mean for ``torch.nn.Linear``; slices are marked, and whole ones are not."""
    params = [{"up": torch.arange(8.0).view(4, 2), "down": torch.arange(8.0).view(2, 4), "scale": torch.ones(2)}]

    def loss(p: Any, x: Tensor) -> Tensor:
        hidden = fds.tp.column(x * p[0]["scale"], p[0]["up"])
        return fds.tp.row(hidden.tanh(), p[0]["down"]).square().sum()

    def program(plan: dict[str, Any]) -> Any:
        step = T.tensor_parallel(plan)(fds.train_step(loss, fds.sgd(0.1)))
        state = step.init(params)
        marks = {path: len(slices_of(leaf)) for path, leaf in fds.tree.named(state.params)}
        state, metrics = step(state, torch.ones(3, 2))
        whole = step.params(state)
        assert not any(slices_of(leaf) for leaf in fds.tree.leaves(whole))
        return marks, metrics["loss"].item(), [leaf.tolist() for leaf in fds.tree.leaves(whole)]

    words = comm.simulate(lambda: program({"up": "colwise", "down": "rowwise"}), world_size=2)
    dims = comm.simulate(lambda: program({r"\.up$": 0, "down": 1}), world_size=2)
    assert words == dims
    assert words[0][0] == {"0.down": 1, "0.scale": 0, "0.up": 1}


def test_plans_that_are_refused() -> None:
    """By key, leaf, size and ranks."""
    assert "plan: '(' is not a regular expression: missing )" in refused({"(": 0})
    assert "plan: 'mlp.upp' matches no path; the nearest is 'mlp.up'" in refused({**PLAN, "mlp.upp": "colwise"})
    assert "'mlp.up.bias' by 'up': 'rowwise'; let one match" in refused({**PLAN, "up": "rowwise"})
    assert "'mlp.up.bias' by 'mlp.up': 'colwise'; let one match" in refused({**PLAN, r"up\.bias": 0})
    assert "'mlp.down.bias' by 'down': 'rowwise'; let one match" in refused({**PLAN, "down": "rowwise"})
    for sizes in (0, [], [8, 0], [12, -4]):
        with pytest.raises(ValueError, match="blocks have at least one place each"):
            fds.tp.Packed(sizes)
    assert "'mlp.down.weight' of shape [4, 8] does not divide along dim 1 by the 3 ranks of 'world'" in refused(
        {"mlp.up": "colwise", "mlp.down": "rowwise"}, n=3
    )
    assert "'mlp.up.bias' of shape [8] in blocks of [5, 3] does not divide" in refused({"mlp.up": fds.tp.Packed([5, 3])})
    assert "the blocks are 7 long together, and the dim 8" in refused({"mlp.up": fds.tp.Packed([4, 3])})
    assert "'attn.o_proj.weight': 4 heads of 2 along dim 1 of shape [4, 8] do not divide by the 8 ranks" in refused(PLAN, n=8)
    assert "'attn.k_proj.bias': 3 heads of 2 along dim 0 of shape [6] do not divide" in refused(PLAN, net(6, 3), n=2)
    assert "'mlp' means 'mlp', a " in (found := refused({**PLAN, "mlp": "colwise"}))
    assert "without params of its own: name what is in it, such as ['mlp.up', 'mlp.down']" in found
    assert "'colwize' is not one of the words colwise, " in refused({**PLAN, "norm": "colwize"})
    assert "'attn.head' is 'local', and no module at such a path has a number 'head'" in refused({**PLAN, "attn.head": "local"})
    assert "attn.head_dim = 2 does not divide by the 4 ranks" in refused({**PLAN, "attn.head_dim": "local"}, n=4)
    assert "'mlp.down' is split by its inputs, 4 of 8 on each rank, and its input has 8 features" in refused(
        {"mlp.down": "rowwise"}
    )
    assert "'norm' is 'sequence_parallel', and 'norm' is a LayerNorm: name the list" in refused(
        {**PLAN, "norm": "sequence_parallel"}
    )
    flat = nn.Sequential(OrderedDict(embed=nn.Embedding(8, 4), layers=nn.Sequential(net().mlp)))
    plan = {"layers": "sequence_parallel", "up": "colwise", "down": "rowwise"}
    assert "'layers.0' is a layer of a sequence_parallel list and holds split linears itself" in refused(plan, flat)


def test_torchs_own_draws_are_refused() -> None:
    """A rank's mask would not be the single device's; in eval mode, or with one rank, nothing is drawn."""
    draws_are_refused()


def draws_are_refused() -> None:
    """``nn.Dropout`` between cut layers."""
    module = net()
    module.mlp.act = nn.Dropout(0.5)  # type: ignore[union-attr, assignment]
    assert "the loss drew from torch's random generator" in refused(PLAN, module)
    comm.simulate(lambda: step_of(module.eval(), PLAN) and None, world_size=2)
    step_of(module.train(), PLAN)


def test_a_module_that_the_loss_goes_around_is_refused() -> None:
    """Slices of a module's params, used by hand, would be taken for whole ones."""
    apply, params = fds.functional(net())

    def program() -> None:
        step = T.tensor_parallel(PLAN)(fds.train_step(lambda p, x: (x @ p["mlp.up.weight"].t()).sum(), fds.sgd(0.1)))
        step(step.init(params), torch.ones(2, 4))

    with pytest.raises(ValueError, match="is a slice of a module's parameter, and the loss called no module"):
        comm.simulate(program, world_size=2)
    assert apply.module is not None


def test_batches_that_differ_are_refused() -> None:
    """Before the first step: all ranks of the group compute the same rows."""
    apply, params = fds.functional(net())

    def program() -> None:
        step = T.tensor_parallel(PLAN)(fds.train_step(lambda p, ids: apply(p, ids).sum(), fds.sgd(0.1)))
        step(step.init(params), torch.arange(8).chunk(comm.world().size)[comm.world().rank])

    with pytest.raises(ValueError, match=r"the ranks \[1\] have another batch than rank 0"):
        comm.simulate(program, world_size=2)


def test_axes_and_claims() -> None:
    """A group that shares ranks with ZeRO's, and two transforms that cut one leaf."""
    params = {"w": torch.ones(4, 4)}

    def init(*strategy: fds.Transform) -> None:
        fds.compose(*strategy)(fds.train_step(lambda p, x: p["w"].sum(), fds.sgd(0.1))).init(params)

    with pytest.raises(ValueError, match=r"its group 'world' and that of zero share the ranks \[0, 1\]"):
        comm.simulate(lambda: init(T.zero(1), T.tensor_parallel({"w": 0})), world_size=2)
    with pytest.raises(ValueError, match=r"the slot 'tensor_parallel' belongs to tensor_parallel\("):
        init(T.tensor_parallel({"w": 0}), T.tensor_parallel({"w": 1}))

    def cut_before(inner: Any, step: fds.Step, given: Any) -> Any:
        from functional_ds.sharding.leaf_slice import LeafSlice, mark_slice

        return inner(step, {"w": mark_slice(given["w"], LeafSlice.even(0, 8, 2, 0))})

    for dim, refusal in ((0, True), (1, False)):
        strategy = T.tensor_parallel({"w": dim}), fds.wrap("experts", prepare=cut_before)
        if refusal:
            with pytest.raises(ValueError, match=r"plan: 'w': a leaf of shape \[2, 4\] is a slice along dim 0 already"):
                comm.simulate(lambda strategy=strategy: init(*strategy), world_size=2)
        else:
            comm.simulate(lambda strategy=strategy: init(*strategy), world_size=2)


def test_hugging_faces_own_plan() -> None:
    """Without entries for what a model lacks."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "moe_intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4, "num_experts": 2, "num_experts_per_tok": 1}
    config = transformers.Qwen3MoeConfig(**sizes, **heads, pad_token_id=0, bos_token_id=0, eos_token_id=0)
    plan = fds.tp.plan_of(transformers.Qwen3MoeForCausalLM(config))
    assert plan["model.layers.*.mlp.experts"] == "moe_tp_experts"
    assert "model.layers.*.mlp.gate_proj" not in plan  # of dense layers, which it has none of
    with pytest.raises(ValueError, match="Linear has no tp_plan"):
        fds.tp.plan_of(nn.Linear(1, 1))
