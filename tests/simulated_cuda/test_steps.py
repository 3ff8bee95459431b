"""Whole steps on a simulated device: the values of the CPU, no race, no early free, and no wait that is not known here."""

import pytest
import torch

import functional_ds as fds
from functional_ds import comm
from functional_ds.testing import assert_same, simulated_cuda
from tests.simulated_cuda.programs import CHAINS, WIDTH, Block, losses, on_processes, pipelined, simulated

# Where the host waits for the device, and why it must.
WAITS = {
    "programs.py": "a test copies its batch",
    "leaf_states.py": "an update on the host reads the weight of its gradients",
    "handles.py": "what is read from the disk is copied to the device",
    "update.py": "ranks vote whether their disks held, and an update on the host reads the step's number",
}


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("name", "ranks"), [*((name, 2) for name in CHAINS if name != "replicated"), ("stage 3", 1), ("replicated", 4)]
)
def test_a_step_is_the_cpus_and_nothing_is_found(name: str, ranks: int) -> None:
    expected = comm.simulate(losses, name, "cpu", world_size=ranks)
    for (found, findings), plain in zip(
        comm.simulate(simulated, losses, name, "cuda", world_size=ranks), expected, strict=True
    ):
        assert_same(found, plain)
        assert [str(each) for each in findings if each.kind != "host sync"] == []
        assert {each.second.file.rpartition("/")[2] for each in findings} - WAITS.keys() == set()


@pytest.mark.parametrize("schedule", ["one_f_one_b", "gpipe"])
def test_a_pipeline_is_the_cpus_and_nothing_is_found(schedule: str) -> None:
    """Its stages are traced on tensors without values, which say that they are on the device, too."""
    expected = comm.simulate(pipelined, schedule, "cpu", world_size=2)
    for (found, findings), plain in zip(
        comm.simulate(simulated, pipelined, schedule, "cuda", world_size=2), expected, strict=True
    ):
        assert_same(found, plain)
        assert [str(each) for each in findings if "programs.py" not in each.second.file] == []


def test_draws_of_a_key_let_no_host_wait() -> None:
    (expected,) = comm.simulate(losses, "stage 0", "cpu", True, world_size=1)
    ((found, findings),) = comm.simulate(simulated, losses, "stage 0", "cuda", True, world_size=1)
    assert_same(found, expected)
    assert [str(each) for each in findings if "programs.py" not in each.second.file] == []


def test_processes_over_nccls_lowering() -> None:
    """The library calls torch.distributed as it calls NCCL's: steps, and all collectives."""
    names = ("stage 3", "stage 1, accumulated")
    expected = [comm.simulate(losses, name, "cpu", world_size=2) for name in names]
    for rank, (runs, sent) in enumerate(comm.spawn(on_processes, names, world_size=2)):
        for (found, findings), plain in zip(runs, expected, strict=True):
            torch.testing.assert_close(found, plain[rank])
            assert [each for each in findings if "programs.py" not in each] == []
        for found, plain in sent:
            assert_same(found, plain)


@pytest.mark.parametrize("computed", [True, False])
def test_a_second_run_draws_what_the_first_one_drew(computed: bool) -> None:
    """Dropout draws from the device's generator, which a part that runs again finds as it was, also if its input is a leaf."""

    def grads(recomputed: bool) -> list[torch.Tensor]:
        with simulated_cuda():
            torch.manual_seed(0)
            block = Block().cuda()
            x = torch.ones(4, WIDTH, device="cuda", requires_grad=True)
            y = (fds.remat(block) if recomputed else block)(x * 1 if computed else x)
            after = torch.rand(2, device="cuda")
            y.square().sum().backward()
            leaves = [y.detach(), after, torch.rand(2, device="cuda"), x.grad, *(leaf.grad for leaf in block.parameters())]
            return [leaf.cpu() for leaf in leaves if leaf is not None]

    assert_same(grads(True), grads(False))
