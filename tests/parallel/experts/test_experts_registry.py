"""Mixtures of Hugging Face, unmodified, on ranks: value and gradients of one device with transformers' own experts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import functional_ds as fds
from functional_ds import comm, moe
from functional_ds.sharding.leaf_slice import LeafSlice
from functional_ds.step.axes import with_axis

EXPERTS, INNER, TOKENS = 4, 16, (5, 3)

SMALL: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "head_dim": 8,
    "attn_implementation": "eager",
}


def mixtral() -> Any:
    return MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=EXPERTS))


def qwen3() -> Any:
    config = Qwen3MoeConfig(**SMALL, moe_intermediate_size=INNER, num_experts=EXPERTS, norm_topk_prob=True)
    return Qwen3MoeForCausalLM(config)


def deepseek_v3() -> Any:
    heads = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8}
    routing = {"n_group": 2, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_intermediate_size": INNER}
    small = {name: value for name, value in SMALL.items() if name != "head_dim"}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**small, **heads, **routing, n_routed_experts=EXPERTS))


def gpt_oss() -> Any:
    return GptOssForCausalLM(GptOssConfig(**SMALL, num_local_experts=EXPERTS))


MODELS: dict[str, Callable[[], Any]] = {"mixtral": mixtral, "qwen3": qwen3, "deepseek_v3": deepseek_v3, "gpt_oss": gpt_oss}


def built(name: str, experts: str) -> tuple[Any, dict[str, Tensor]]:
    """A model of small random numbers as a function, in fp64."""
    torch.manual_seed(0)
    model = MODELS[name]().double()
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.3)
    model.set_experts_implementation(experts)
    apply, params = fds.functional(model)
    return apply, params


Place = tuple[int, int]  # a rank, and how many there are


def own_part(path: str, leaf: Tensor, model: str, *, ep: Place, tp: Place) -> Tensor:
    """Experts along dim 0 over ep, and each of them over tp."""
    if ".experts." not in path:
        return leaf
    cuts = [LeafSlice.even(0, EXPERTS, ep[1], ep[0])]
    transposed = model == "gpt_oss"
    if "gate_up" in path:  # gpt_oss has gates and ups in turn
        blocks = [2 * INNER] if transposed else [INNER, INNER]
        cuts.append(LeafSlice.even(2 if transposed and leaf.dim() == 3 else 1, blocks, tp[1], tp[0]))
    elif leaf.dim() == 3:
        cuts.append(LeafSlice.even(1 if transposed else 2, INNER, tp[1], tp[0]))
    for cut in cuts:
        leaf = cut.of(leaf)
    return leaf.clone()


def ids_of(part: int) -> Tensor:
    """Two sequences, of other lengths on each rank."""
    return torch.randint(0, 32, (2, TOKENS[part]), generator=torch.Generator().manual_seed(part))


def one_step(apply: Any, params: dict[str, Tensor], batch: list[Tensor], *strategy: Any) -> tuple[float, dict[str, Tensor]]:
    """The loss, and the params' gradients, which are what sgd(1) takes off."""

    def loss(params: Any, batch: list[Tensor]) -> fds.Weighted:
        return fds.Weighted(torch.stack([apply(params, ids).logits.square().sum() for ids in batch]).sum(), 1.0)

    step = fds.compose(*strategy)(fds.train_step(loss, fds.sgd(1.0)))
    before = {name: leaf.detach().clone() for name, leaf in params.items()}
    state, metrics = step(step.init(params), batch)
    after = step.params(state)
    trained = {name for name, leaf in params.items() if leaf.is_floating_point()}
    return metrics["loss"].item(), {name: before[name] - after[name].detach() for name in trained}


def expert_axis(mesh: comm.Mesh) -> fds.Transform:
    """What T.experts and T.tensor_parallel tell the model."""

    def forward(inner: Any, step: Any, state: Any, function: Any, batch: Any) -> Any:
        function = with_axis("ep", moe.ExpertAxis(mesh["ep"]), with_axis("tp", mesh["tp"], function))
        return inner(step, state, function, batch)

    return fds.wrap("axes", forward=forward)


@pytest.mark.sample(4)
@pytest.mark.law(46, 47)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("ep", "tp"), [(1, 1), (2, 1), (2, 2)])
def test_a_model_on_ranks_is_one_device(model: str, ep: int, tp: int) -> None:
    """Loss and gradients of every leaf; the model's files are transformers' own."""
    apply, params = built(model, "eager")
    loss, expected = one_step(apply, params, [ids_of(part) for part in range(ep)])

    def program() -> tuple[float, dict[str, Tensor]]:
        mesh = comm.mesh(ep=ep, tp=tp)
        apply, whole = built(model, moe.register_experts())
        places: Any = {name: (mesh[name].rank, mesh[name].size) for name in ("ep", "tp")}
        mine = {path: own_part(path, leaf, model, **places) for path, leaf in whole.items()}
        found, grads = one_step(apply, mine, [ids_of(mesh["ep"].rank)], expert_axis(mesh))
        dense = {path: grad for path, grad in grads.items() if ".experts." not in path}
        return comm.all_reduce(torch.tensor(found), mesh["ep"]).item(), {**grads, **comm.all_reduce(dense, mesh["ep"])}

    for place, (total, found) in enumerate(comm.simulate(program, world_size=ep * tp)):
        assert total == pytest.approx(loss, rel=1e-5)
        assert found.keys() == expected.keys()
        for path, grad in found.items():
            wanted = own_part(path, expected[path], model, ep=(place // tp, ep), tp=(place % tp, tp))
            assert float((grad - wanted).abs().max()) <= 1e-6 * (1 + float(wanted.abs().max())), path


def test_outside_of_a_step_it_computes_all_experts() -> None:
    """And registering again is no change; another's name is refused."""
    name = moe.register_experts()
    assert moe.register_experts() == name
    ours, params = built("mixtral", name)
    ids = ids_of(0)
    torch.testing.assert_close(ours(params, ids).logits, built("mixtral", "eager")[0](params, ids).logits)
    with pytest.raises(ValueError, match="transformers has other experts of this name"):
        moe.register_experts("grouped_mm")


def test_experts_that_are_cut_otherwise_are_named() -> None:
    apply, params = built("mixtral", moe.register_experts())
    cut = {path: own_part(path, leaf, "mixtral", ep=(0, 1), tp=(0, 2)) for path, leaf in params.items()}
    with pytest.raises(ValueError, match="8 of the 16 rows of an expert, and the step has 1 tensor-parallel ranks"):
        apply(cut, ids_of(0))
    half = {path: own_part(path, leaf, "mixtral", ep=(0, 2), tp=(0, 1)) for path, leaf in params.items()}
    with pytest.raises(ValueError, match="the rows come in 4 groups"):
        apply(half, ids_of(0))


def test_a_model_under_transformers_own_expert_parallelism_is_refused() -> None:
    model = mixtral()
    model.set_experts_implementation(moe.register_experts())
    model.model.layers[0].mlp.experts._is_expert_parallel = True
    with pytest.raises(ValueError, match="transformers' own expert parallelism"):
        model(ids_of(0))
