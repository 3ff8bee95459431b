"""Activation checkpointing, experts and pipelines by DeepSpeed's names compute what DeepSpeed, and plain PyTorch, compute."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.deepspeed import checkpointing, pipe
from functional_ds.deepspeed.moe import layer as experts
from functional_ds.deepspeed.moe import utils as moe_utils
from functional_ds.deepspeed.pipe import LayerSpec, PipelineModule, ProcessTopology, TiedLayerSpec, pipeline_parts
from functional_ds.deepspeed.pipe.pipeline_parts import PipelineParts
from tests.deepspeed.real import real

# -- checkpointing -----------------------------------------------------------------------------------------------------


class Megatron:
    """What scripts pass as ``mpu_``."""

    def get_model_parallel_group(self) -> comm.Group:
        return comm.world()


@pytest.mark.parametrize("options", [{}, {"checkpoint_in_cpu": True}, {"partition_activations": True}])
def test_a_checkpointed_function_has_the_same_gradients(options: dict[str, bool]) -> None:
    def on_rank() -> bool:
        assert not checkpointing.is_configured()
        checkpointing.configure(Megatron(), **options)
        assert checkpointing.is_configured()
        torch.manual_seed(0)
        module, x = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Tanh()), torch.ones(4, 3)
        found = []
        for run in (module, partial(checkpointing.checkpoint, module)):
            torch.manual_seed(1)
            run(x).square().sum().backward()  # x needs no gradient, and the params get theirs
            found.append([p.grad for p in module.parameters()])
            module.zero_grad()
        return all(map(torch.equal, *found))

    assert comm.simulate(on_rank, world_size=2) == [True, True]


def test_a_configs_block_counts_where_an_argument_is_left_out() -> None:
    def policy(**more: Any) -> str:
        block = {"activation_checkpointing": {"cpu_checkpointing": "true", "partition_activations": "false"}}
        checkpointing.configure(Megatron(), block, **more)
        return (checkpointing._OPTIONS.get() or checkpointing.ActivationOptions()).policy

    assert comm.simulate(policy, world_size=2) == ["recompute,inputs=offload"] * 2
    assert comm.simulate(lambda: policy(checkpoint_in_cpu=False), world_size=1) == ["recompute,inputs=save"]
    with pytest.raises(ValueError, match="cpu_checkpointing: 'maybe' is neither true nor false"):
        checkpointing.configure(None, {"activation_checkpointing": {"cpu_checkpointing": "maybe"}})


# -- experts -----------------------------------------------------------------------------------------------------------


def outcome(module: Any, **arguments: Any) -> dict[str, Tensor]:
    """What a layer of experts computes, and all gradients."""
    torch.manual_seed(0)
    layer = module.MoE(6, nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)), num_experts=4, **arguments)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=draw))
    x = torch.randn(2, 7, 6, generator=draw, requires_grad=True)
    used = torch.arange(14) % 3 != 0 if arguments["k"] == 1 and not arguments["drop_tokens"] else None
    torch.manual_seed(5)
    out, balance, counts = layer(x, None if used is None else used.long())
    (out.square().sum() + balance).backward()
    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in layer.named_parameters()}
    assert x.grad is not None
    return {"out": out.detach(), "balance": balance.detach(), "counts": counts.float(), "x": x.grad, **grads}


CASES = list(itertools.product((1, 2, 3), (True, False), (None, "Jitter", "RSample"), (0.5, 1.25)))


@pytest.mark.parametrize("k", [1, 2, 3])
def test_experts_are_deepspeeds(k: int) -> None:
    theirs = real("deepspeed.moe.layer")
    for _, drop, noise, room in [case for case in CASES if case[0] == k]:
        more = {
            "k": k,
            "drop_tokens": drop,
            "use_residual": noise is None,
            "noisy_gate_policy": noise,
            "capacity_factor": room,
            "min_capacity": 2,
        }
        ours, expected = outcome(experts, **more), outcome(theirs, **more)
        assert ours.keys() == expected.keys()
        for name, value in expected.items():
            rounding = 1e-6 * value.abs().max().item()  # sums cancel: an element of 0.2 had addends of 300, and their ulp
            torch.testing.assert_close(
                ours[name], value, rtol=1e-5, atol=rounding, msg=lambda text, n=name, m=more: f"{n} {m} {text}"
            )


@pytest.mark.parametrize("k", [1, 2])
def test_capacities_are_rounded_up_in_fp32_as_deepspeeds(k: int) -> None:
    """50 · 1.1 is 55 there, and 55.00000000000001 in fp64."""
    gate = experts.TopKGate(2, 2 * k, k, 1.1, min_capacity=1, top2_2nd_expert_sampling=False)
    with torch.no_grad():
        gate.wg.weight.copy_(-torch.arange(4.0 * k).view(2 * k, 2))
    kept = gate(torch.ones(100, 2)).routing.kept
    assert kept is not None
    assert kept.sum(0).tolist() == [55] * k  # all tokens choose alike


def test_experts_need_a_number_of_experts_a_token() -> None:
    with pytest.raises(ValueError, match=r"k=3: a token goes to .* no more than num_experts=2"):
        experts.MoE(4, nn.Linear(4, 4), num_experts=2, k=3)
    with pytest.raises(ValueError, match="does not divide by ep_size=0"):
        experts.MoE(4, nn.Linear(4, 4), num_experts=2, ep_size=0)


def test_experts_over_ranks_compute_what_one_rank_does() -> None:
    def made(ep_size: int, first: int) -> experts.MoE:
        layer = experts.MoE(3, nn.Linear(3, 3), num_experts=2, ep_size=ep_size, k=2, drop_tokens=False)
        layer.deepspeed_moe.gate.top2_2nd_expert_sampling = False
        with torch.no_grad():
            layer.deepspeed_moe.gate.wg.weight.copy_(torch.arange(6.0).view(2, 3) / 6)
            for place, each in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
                for p in each.parameters():
                    p.fill_(1.0 + first + place)
        return layer

    def on_rank() -> list[float]:
        rank, x = comm.get_rank(), torch.linspace(-1, 1, 12).view(4, 3)
        layer = made(2, rank)
        out, *_ = layer(x[2 * rank : 2 * rank + 2])
        out.square().sum().backward()
        grads = [p.grad for p in layer.deepspeed_moe.experts.parameters()]
        return [*out.flatten().tolist(), *(grad.sum().item() for grad in grads if grad is not None)]

    both = comm.simulate(on_rank, world_size=2)
    whole = made(1, 0)
    out, *_ = whole(torch.linspace(-1, 1, 12).view(4, 3))
    out.square().sum().backward()
    grads = [p.grad.sum().item() for p in whole.deepspeed_moe.experts.parameters() if p.grad is not None]
    assert both[0][:6] + both[1][:6] == pytest.approx(out.flatten().tolist(), rel=1e-5)
    assert both[0][6:] + both[1][6:] == pytest.approx(grads, rel=1e-5)


def test_param_groups_of_experts_are_deepspeeds() -> None:
    theirs = real("deepspeed.moe.utils")
    layer = experts.MoE(4, nn.Linear(4, 4), num_experts=3)
    names = {id(p): name for name, p in layer.named_parameters()}

    def split(module: Any) -> list[tuple[str, bool, list[str]]]:
        group = {"params": list(layer.parameters()), "name": "all", "lr": 0.1}
        found = module.split_params_into_different_moe_groups_for_optimizer(group, max_group_size=40)
        return [(each["name"], each.get("moe", False), [names[id(p)] for p in each["params"]]) for each in found]

    # DeepSpeed begins with an empty group where the first param alone is too large; that is no difference to an optimizer
    assert split(moe_utils) == [each for each in split(theirs) if each[2]]
    assert moe_utils.has_moe_layers(layer) == (True, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_experts": 3, "ep_size": 2}, "does not divide by ep_size"),
        ({"noisy_gate_policy": "Loud"}, "'Jitter', 'RSample' or None"),
        ({"enable_expert_tensor_parallelism": True}, "T.tensor_parallel"),
    ],
)
def test_experts_refuse(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        experts.MoE(2, nn.Linear(2, 2), **arguments)


# -- pipelines ---------------------------------------------------------------------------------------------------------

VOCABULARY = 7


def cross_entropy(y: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(y.flatten(0, 1), labels.flatten())


def model(stages: int, *, interval: int = 0, method: str = "uniform") -> PipelineModule:
    torch.manual_seed(0)
    return PipelineModule(
        [
            TiedLayerSpec("embed", nn.Embedding, VOCABULARY, 4),
            LayerSpec(nn.Linear, 4, 4),
            nn.Tanh(),
            lambda x: x * 2,
            LayerSpec(nn.Linear, 4, 4),
            TiedLayerSpec("embed", nn.Embedding, VOCABULARY, 4, forward_fn=lambda module, x: x @ module.weight.T),
        ],
        num_stages=stages,
        loss_fn=cross_entropy,
        partition_method=method,
        activation_checkpoint_interval=interval,
    )


def batches() -> list[list[tuple[Tensor, Tensor]]]:
    draw = torch.Generator().manual_seed(1)
    return [[(torch.randint(VOCABULARY, (2, 5), generator=draw),) * 2 for _ in range(4)] for _ in range(2)]


def pipelined(stages: int, interval: int, zero: bool) -> tuple[list[float], tuple[str, ...]]:
    parts = pipeline_parts(model(stages, interval=interval))
    strategy = [T.zero(1, parts.data)] if zero else []
    share = 4 // parts.data.size
    step = fds.compose(*strategy, parts.transform(share))(fds.train_step(parts.stages, fds.adamw(0.01, weight_decay=0.01)))
    state, losses = step.init(parts.params), []
    for micros in batches():
        state, metrics = step(state, parts.joined(micros[parts.data.rank :: parts.data.size]))
        losses.append(metrics["loss"].item())
    return losses, tuple(sorted(state.params)) if not zero else ()


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """The losses of the module itself in plain PyTorch."""
    module = model(1)
    optimizer, losses = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.01), []
    for micros in batches():
        x = torch.cat([x for x, _ in micros])
        optimizer.zero_grad()
        loss = cross_entropy(module(x), x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("ranks", "interval", "zero"), [(2, 0, False), (2, 1, False), (4, 0, True)])
def test_a_pipeline_trains_as_its_module(alone: list[float], ranks: int, interval: int, zero: bool) -> None:
    for place, (losses, held) in enumerate(comm.simulate(lambda: pipelined(2, interval, zero), world_size=ranks)):
        assert losses == pytest.approx(alone, rel=1e-5)
        if not zero:
            own = [["1.bias", "1.weight"], ["4.bias", "4.weight"]][place]
            assert held == (*own, "tied_modules.embed.weight")  # its stage's params alone


@pytest.mark.parametrize("method", ["uniform", "parameters", "type:linear", "type:Embedding"])
def test_a_row_is_cut_where_deepspeed_cuts_it(method: str) -> None:
    found = comm.simulate(lambda: model(2, method=method).parts, world_size=2)
    weights = {"type:linear": [0, 1, 0, 0, 1, 0], "type:Embedding": [1, 0, 0, 0, 0, 1], "parameters": [28, 20, 0, 0, 20, 28]}
    theirs = real("deepspeed.runtime.utils")
    parts = theirs.partition_balanced(weights[method], 2) if method in weights else theirs.partition_uniform(6, 2)
    assert found == [list(map(int, parts))] * 2


def test_a_pipelines_layers_are_found_by_number() -> None:
    def on_rank() -> tuple[Any, ...]:
        module = model(2)
        return (
            module.stage_id,
            module.stage_owner(2),
            module.stage_owner(3),
            module.num_pipeline_stages(),
            str(module.topology()),
        )

    assert comm.simulate(on_rank, world_size=2) == [(0, 0, 1, 2, "pipe=2, data=1"), (1, 0, 1, 2, "pipe=2, data=1")]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PipelineModule([nn.Tanh()]), "num_stages or topology is needed"),
        (lambda: PipelineModule([nn.Tanh()], num_stages=2), "does not divide the world of 1"),
        (lambda: PipelineModule([3], num_stages=1), "layer 0 is 3"),
        (lambda: model(1, method="profile"), "'uniform', 'parameters' or 'type:REGEX'"),
        (lambda: model(1, method="type:Conv"), "matches no layer; there are <lambda>, Embedding, Linear, Tanh"),
        (lambda: PipelineParts.joined([torch.ones(2), torch.ones(3)]), "equal shapes"),
        (
            lambda: PipelineModule([nn.Tanh()], topology=ProcessTopology(["pipe", "model"], [1, 2])),
            "as many ranks as the world",
        ),
    ],
)
def test_pipelines_refuse(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_grids_of_ranks_are_deepspeeds() -> None:
    theirs = real("deepspeed.runtime.pipe.topology")
    axes, dims = ["pipe", "data", "model"], [2, 3, 2]
    ours, other = ProcessTopology(axes, dims), theirs.ProcessTopology(axes, dims)
    for axis in axes:
        assert ours.get_axis_comm_lists(axis) == other.get_axis_comm_lists(axis)
        assert ours.get_axis_list(axis, 1) == other.get_axis_list(axis, 1)
        assert ours.get_dim(axis) == other.get_dim(axis)
    assert ours.get_dim("none") == other.get_dim("none") == 0
    assert [tuple(ours.get_coord(rank)) for rank in range(12)] == [tuple(other.get_coord(rank)) for rank in range(12)]
    assert ours.filter_match(pipe=1, model=0) == other.filter_match(pipe=1, model=0)


@pytest.mark.parametrize("sizes", [(2, 1, 2), (2, 2, 1)])
def test_a_grid_says_who_shares_what(sizes: tuple[int, int, int]) -> None:
    """A rank's group along an axis has the ranks whose places differ in that axis alone, in the axis's order."""
    axes = ("pipe", "data", "model")

    def seen() -> dict[str, Any]:
        topology = pipe.PipeModelDataParallelTopology(num_pp=sizes[0], num_dp=sizes[1], num_mp=sizes[2])
        grid = pipe.PipelineParallelGrid(topology)
        me = dict(zip(axes, topology.get_coord(grid.get_global_rank()), strict=True))
        places = comm.all_gather_object(me)
        found = {}
        for axis, name in zip(axes, ("pipe_parallel", "data_parallel", "slice_parallel"), strict=True):
            shared = [rank for rank, at in enumerate(places) if all(at[other] == me[other] for other in axes if other != axis)]
            group = getattr(grid, f"get_{name}_group")()
            found[axis] = (group.ranks, getattr(grid, f"get_{name}_rank")(), getattr(grid, f"get_{name}_world_size")())
            assert found[axis] == (tuple(shared), shared.index(comm.world().rank), len(shared))
            assert [*map(grid.stage_to_global, range(sizes[0]))] == shared or axis != "pipe"
        model = [rank for rank, at in enumerate(places) if at["data"] == me["data"]]
        assert grid.get_model_parallel_group().ranks == tuple(model)
        assert grid.get_model_parallel_rank() == model.index(comm.world().rank)
        assert (grid.get_stage_id(), grid.get_data_parallel_id()) == (me["pipe"], me["data"])
        assert grid.get_data_parallel_group_ranks() == [*found["data"][0]]
        return found

    assert len({str(each) for each in comm.simulate(seen, world_size=4)}) == 4
    with pytest.raises(ValueError, match="are 4 ranks, and there are 1"):
        pipe.PipelineParallelGrid(pipe.PipeDataParallelTopology(2, 2))
