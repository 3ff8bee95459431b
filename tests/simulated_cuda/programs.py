"""Training runs that know no device but the one they are given."""

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import functional_ds as fds
from functional_ds import comm
from functional_ds import pipelining as pp
from functional_ds import transforms as T
from functional_ds.testing import Finding, simulated_cuda

ROWS, WIDTH, CLASSES = 8, 8, 4


class Block(nn.Module):
    """A residual block with a norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))
        return found


def network() -> nn.Module:
    """Three blocks and a head, without dropout."""
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(WIDTH, CLASSES)).eval()


def batch(i: int, device: str) -> tuple[Tensor, Tensor]:
    """This rank's rows of the i-th batch."""
    generator, rank, size = torch.Generator().manual_seed(i), comm.world().rank, comm.world().size
    x = torch.randn(ROWS, WIDTH, generator=generator)[rank::size].contiguous()
    y = torch.randint(0, CLASSES, (ROWS,), generator=generator)[rank::size].contiguous()
    return x.to(device), y.to(device)


def replicated() -> tuple[list[Any], Any]:
    """ZeRO-3 within hosts of two ranks, and data parallelism between them."""
    mesh = comm.mesh(hosts=2, ranks=2)
    return [T.zero(3, mesh["ranks"], replicate=mesh["hosts"])], None


# By name: the transforms, and the optimizer if it is not AdamW.
CHAINS: dict[str, Callable[[], tuple[list[Any], Any]]] = {
    "stage 0": lambda: ([T.zero(0)], None),
    "stage 1, accumulated": lambda: ([T.accumulate(2), T.zero(1), T.clip(1.0)], None),
    "stage 2, averaged": lambda: ([T.ema(0.9), T.zero(2)], None),
    "stage 3": lambda: ([T.zero(3), T.clip(1.0)], None),
    "fp16": lambda: ([T.mixed_precision("fp16"), T.zero(3)], None),
    "autocast": lambda: ([T.mixed_precision("bf16,?.norm.*=f32", autocast=True), T.zero(2)], None),
    "recomputed": lambda: ([T.remat("[012]"), T.zero(3)], None),
    "activations on the host": lambda: ([T.remat("[012]", policy="offload"), T.zero(0)], None),
    "optimizer on the host": lambda: ([T.offload("cpu", None, buffer_bytes=256), T.zero(1)], None),
    "params on the host": lambda: ([T.offload("cpu", "cpu", buffer_bytes=256), T.zero(3)], None),
    "on the disk": lambda: ([T.offload("disk", "disk", path=tempfile.gettempdir(), buffer_bytes=256), T.zero(3)], None),
    "replicated": replicated,
    "muon": lambda: ([T.zero(3)], fds.muon(1e-2, others=fds.adamw(1e-2))),
    "lamb": lambda: ([T.zero(1)], fds.lamb(1e-2)),
    "one bit": lambda: ([T.local_gradients(comm.world())], fds.one_bit_adam(1e-2, warmup=1)),
}


def losses(
    name: str, device: str, keyed: bool = False, *, steps: int = 3, after_first: Callable[[], None] = lambda: None
) -> list[Tensor]:
    """The losses of a run on a device; ``keyed`` draws dropout from a ``Key``."""
    chain, optimizer = CHAINS[name]()
    apply, params = fds.functional(network())

    def loss(params: Any, batch: Any) -> Tensor:
        return cross_entropy(apply(params, batch[0]), batch[1])

    def keyed_loss(params: Any, batch: Any, key: Any) -> Tensor:
        return cross_entropy(key.dropout(apply(params, batch[0]), 0.1, "logits"), batch[1])

    step = fds.compose(*chain)(fds.train_step(keyed_loss if keyed else loss, optimizer or fds.adamw(1e-2)))
    state = step.init({path: leaf.detach().to(device) for path, leaf in params.items()})
    found, batches = [], [batch(i, device) for i in range(steps)]
    for each in batches:
        state, metrics = step(state, each)
        found.append(metrics["loss"])
        if len(found) == 1:
            after_first()
    leaves = [*fds.tree.leaves(step.params(state)), *found]
    assert {leaf.device.type for leaf in leaves} == {device}
    return found


def pipelined(schedule: str, device: str, *, after_first: Callable[[], None] = lambda: None) -> list[Tensor]:
    """The losses of a pipeline of two stages on a device."""
    rows = [torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    batches = [(x.to(device), (torch.arange(ROWS) % CLASSES).to(device)) for x in rows]
    stages, params = pp.cut(network().to(device), ["2"], loss=lambda y, batch: cross_entropy(y, batch[1]), example=batches[0])
    step = T.pipeline(getattr(pp, schedule)(2, 4), stages)(fds.train_step(stages, fds.adamw(1e-2)))
    state, found = step.init(params), []
    for batch in batches:
        state, metrics = step(state, batch)
        found.append(metrics["loss"])
        if len(found) == 1:
            after_first()
    assert {loss.device.type for loss in found} == {device}
    return found


def simulated(program: Callable[..., list[Tensor]], *args: Any) -> tuple[list[Tensor], list[Finding]]:
    """The losses of ``program(*args)`` on this rank's simulated device, and what was found: host syncs after its first step."""
    with simulated_cuda(check=False) as gpu:
        first: list[Finding] = []

        def after_first() -> None:
            first.extend([*gpu.races, *gpu.early_frees])
            gpu.clear()

        found = program(*args, after_first=after_first)
        findings = [*first, *gpu.findings]
        return [loss.cpu() for loss in found], findings


COLLECTIVES: dict[str, Callable[[Tensor], Any]] = {
    "all_reduce": comm.all_reduce,
    "all_gather": comm.all_gather,
    "reduce_scatter": comm.reduce_scatter,
    "broadcast": comm.broadcast,
    "reduce": comm.reduce,
    "gather": comm.gather,
    "all_to_all": comm.all_to_all,
    "permute": lambda x: comm.permute(x, [(0, 1), (1, 0)]),
    "exchange": lambda x: comm.batch_p2p([comm.Send(x, 1 - comm.world().rank), comm.Recv(x, 1 - comm.world().rank)])[1],
    "asynchronous": lambda x: comm.start(comm.all_reduce, x).wait() + 1,
}


def sent() -> list[tuple[Tensor, Tensor]]:
    """This rank's results of the collectives on a simulated device and on the host."""
    host = torch.arange(4.0) + 10 * comm.world().rank
    with simulated_cuda() as gpu:
        device = host.cuda()
        found = []
        for call in COLLECTIVES.values():
            result = call(device)
            assert result.is_cuda
            found.append((result.cpu(), call(host)))
        assert len(gpu.findings) == len(found) + 1  # the copies
    return found


def on_processes(names: tuple[str, ...]) -> tuple[list[tuple[list[Tensor], list[str]]], list[tuple[Tensor, Tensor]]]:
    """On this process's simulated device."""
    runs = [simulated(losses, name, "cuda") for name in names]
    return [(found, [str(each) for each in findings]) for found, findings in runs], sent()
