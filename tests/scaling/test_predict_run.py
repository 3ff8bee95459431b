"""``predict_run`` beside the laws of schedules, and beside published runs."""

from typing import Any

import attrs
import pytest

from functional_ds.scaling import MACHINES, Machine, MeshPlan, PredictedRun, Transformer, predict_run, rank_share

FAST = Machine("no links, no kernels", 1e12, 1e12, 1e30, link_bandwidth=1e30, link_latency=0.0, memory=10**9)
EVEN = Transformer(layers=16, width=64, heads=4, vocabulary=1, length=32)  # a head that takes no time

# Narayanan et al. 2021, table 1: heads, width, layers, tp, pp, GPUs, batch, teraFLOP/s of a GPU.
MEGATRON = [
    (24, 2304, 24, 1, 1, 32, 512, 137),
    (32, 3072, 30, 2, 1, 64, 512, 138),
    (32, 4096, 36, 4, 1, 128, 512, 142),
    (48, 6144, 40, 8, 1, 256, 1024, 135),
    (64, 8192, 48, 8, 2, 512, 1536, 138),
    (80, 10240, 60, 8, 4, 1024, 1792, 140),
    (96, 12288, 80, 8, 8, 1536, 2304, 148),
    (128, 16384, 96, 8, 16, 1920, 2160, 155),
    (128, 20480, 105, 8, 35, 2520, 2520, 163),
    (160, 25600, 128, 8, 64, 3072, 3072, 163),
]


@pytest.mark.law(35)
@pytest.mark.parametrize(("pp", "chunks", "micro"), [(4, 1, 8), (2, 2, 4), (4, 4, 12), (1, 1, 3)])
def test_bubble_and_memory_are_the_schedules(pp: int, chunks: int, micro: int) -> None:
    """(p - 1) / (m v + p - 1), and as many micro-batches in flight as the law says, where nothing else takes time."""
    run = predict_run(EVEN, MeshPlan(pp=pp, chunks=chunks, micro_batches=micro), FAST)
    assert run.bubble == pytest.approx((pp - 1) / (micro * chunks + pp - 1), rel=1e-2)
    in_flight = min(micro * chunks, 2 * (pp - 1) + (chunks - 1) * pp + 1 if chunks > 1 else pp)
    layers = EVEN.layers // pp // chunks
    head = EVEN.head_kept(EVEN.length) if pp == 1 else 0
    assert run.memories[0].activations == in_flight * layers * EVEN.layer_kept(EVEN.length) + head


def test_a_step_takes_its_operations() -> None:
    """Without links and kernels, one device takes its FLOPs; seconds add up; a utilisation is no more than 1."""
    run = predict_run(EVEN, MeshPlan(micro_batches=2), FAST)
    assert run.step_seconds == pytest.approx(run.shares[0].flops / 1e12)
    assert run.utilisation() == pytest.approx(1.0)
    assert run.tokens_per_second == pytest.approx(2 * EVEN.length / run.step_seconds)


def test_what_runs_beside_takes_no_time() -> None:
    model, plan = EVEN, MeshPlan(dp=64, stage=3)
    hidden, shown = (predict_run(model, attrs.evolve(plan, overlap=way), MACHINES["a100-80gb"]) for way in (True, False))
    assert shown.seconds["data"] > hidden.seconds["data"] >= 0
    assert shown.memory == hidden.memory


def megatron(row: tuple[int, ...], efficiency: float) -> PredictedRun:
    heads, width, layers, tp, pp, ranks, batch, _ = row
    own, dp = layers // pp, ranks // tp // pp
    chunks = 1 if pp == 1 else next(v for v in range(2, own + 1) if own % v == 0)
    ways: dict[str, Any] = {"recompute": "whole", "overlap": False, "fp32_gradients": False}
    model = Transformer(layers=layers, width=width, heads=heads, vocabulary=51200, length=2048)
    plan = MeshPlan(dp=dp, tp=tp, pp=pp, chunks=chunks, micro_batches=batch // dp, **ways)
    return predict_run(model, plan, attrs.evolve(MACHINES["a100-80gb"], factors={"products": 1 / efficiency}))


def test_a_published_run_is_predicted() -> None:
    """One number is fitted, to the smallest run of table 1; the largest, a trillion parameters, is off by less than 10 %."""
    small, large = MEGATRON[0], MEGATRON[-1]
    assert megatron(small, 0.5851).flops_per_second / 1e12 == pytest.approx(small[-1], rel=0.005)
    run = megatron(large, 0.5851)
    assert run.model.parameters / 1e9 == pytest.approx(1008.0, abs=0.05)
    assert run.flops_per_second / 1e12 == pytest.approx(large[-1], rel=0.1)
    assert run.fits


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (MeshPlan(tp=3), r"tp=3: it does not divide the model's heads, 4"),
        (MeshPlan(pp=5), r"pp=5, chunks=1: 5 stages do not divide the 16 layers"),
    ],
)
def test_meshes_that_do_not_divide(plan: MeshPlan, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        predict_run(EVEN, plan, FAST)


def test_sizes_that_are_none() -> None:
    with pytest.raises(ValueError, match="heads=3: they do not divide the width 64"):
        attrs.evolve(EVEN, heads=3)
    with pytest.raises(ValueError, match="key_heads=3"):
        attrs.evolve(EVEN, key_heads=3)
    with pytest.raises(ValueError, match="stage"):
        MeshPlan(stage=4)
    with pytest.raises(ValueError, match="stage=3, pp=2: a pipeline's schedule says when"):
        MeshPlan(stage=3, pp=2)
    with pytest.raises(ValueError, match="place=1 is not one of the pipeline's 1 ranks"):
        rank_share(EVEN, MeshPlan(), 1)
