"""What the simulator has shown of an engine's parts holds on real processes, too."""

import torch
from torch import nn

import functional_ds as fds
from functional_ds import comm
from functional_ds.deepspeed.pipe import LayerSpec, PipelineModule
from functional_ds.deepspeed.pipe.pipeline_engine import pipeline_engine
from tests.deepspeed.engine.surface_scripts import SURFACE

_NAMES = ("norms, stage 3", "parts, stage 3", "leaves, stage 3", "cycle, stage 3")
_SGD = {"type": "SGD", "params": {"lr": 0.1}}


def numbers() -> dict[str, list[float]]:
    """A rank's numbers of each script, of a model built in ``zero.Init``, and of a pipeline with buffers."""
    rank, ranks = comm.world().rank, comm.world().size
    found = {name: SURFACE[name][0](fds.deepspeed, rank, SURFACE[name][1], ranks, "") for name in _NAMES}
    return {**found, "deferred": deferred(rank), "pipeline": pipeline()}


def deferred(rank: int) -> list[float]:
    torch.manual_seed(rank)  # rank 0's values count
    with fds.deepspeed.zero.Init():
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": _SGD, "zero_optimization": {"stage": 3}}
    engine, losses = fds.deepspeed.initialize(model=model, config=config)[0], []
    for update in range(2):
        loss = engine(torch.full((2, 4), 1.0 + rank + update)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def pipeline() -> list[float]:
    torch.manual_seed(0)
    layers = [LayerSpec(nn.Linear, 3, 4), LayerSpec(nn.BatchNorm1d, 4), nn.Tanh(), LayerSpec(nn.Linear, 4, 1)]
    module = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "optimizer": _SGD}
    engine = pipeline_engine(module, config)
    data = [(torch.arange(12.0).view(4, 3) + each, torch.full((4, 1), float(each))) for each in range(2)]
    losses = [engine.train_batch(iter(data)).item() for _ in range(2)]
    return losses + [float(value.float().sum()) for value in engine.module_state_dict().values()]


def test_processes_find_the_simulators_numbers() -> None:
    """Each engine with collectives of its own: norms, parts, leaf modules, betas that cycle, zero.Init, pipelines' buffers."""
    for mine, simulated in zip(comm.spawn(numbers, world_size=2), comm.simulate(numbers, world_size=2), strict=True):
        assert mine.keys() == simulated.keys()
        for name, values in simulated.items():
            torch.testing.assert_close(torch.tensor(mine[name]), torch.tensor(values), rtol=1e-6, atol=1e-7, msg=name)
