"""A simulated device is CUDA's to a program: devices, copies, generators, errors. Afterwards torch is as it was."""

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functional_ds.testing import assert_same, simulated_cuda


def test_tensors_are_where_the_program_puts_them() -> None:
    with simulated_cuda(check=False):
        x = torch.ones(2, 3, device="cuda")
        places: dict[str, tuple[Tensor, str]] = {
            "arithmetic": (x * 2 + 1, "cuda"),
            "a view": (x.view(3, 2)[1:], "cuda"),
            "like": (torch.zeros_like(x), "cuda"),
            "new": (x.new_zeros(2), "cuda"),
            "like, elsewhere": (torch.zeros_like(x, device="cpu"), "cpu"),
            "the host's": (torch.zeros(2), "cpu"),
            "from values": (torch.tensor([1.0, 2.0], device="cuda"), "cuda"),
            "drawn": (torch.randn(2, device="cuda:0"), "cuda"),
            "to the device": (torch.ones(2).to("cuda"), "cuda"),
            "as another": (torch.ones(2).to(x), "cuda"),
            "to the host": (x.to(torch.device("cpu")), "cpu"),
            "cpu()": (x.cpu(), "cpu"),
            "cuda()": (torch.ones(2).cuda(), "cuda"),
            "cast": (x.to(torch.float64), "cuda"),
            "cast and moved": (x.to("cpu", torch.float64), "cpu"),
            "detached": (x.detach(), "cuda"),
            "a parameter": (nn.Parameter(x), "cuda"),
            "set": (torch.zeros(2).cuda().data, "cuda"),
        }
        for name, (tensor, device) in places.items():
            assert (name, tensor.device.type, tensor.is_cuda) == (name, device, device == "cuda")
        assert x.to("cuda") is x
        assert (x.get_device(), type(x)) == (0, Tensor)
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 1


def test_a_module_trains_as_on_the_cpu() -> None:
    def trained(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.LSTM(8, 4, batch_first=True)).to(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
        x = torch.linspace(-1, 1, 24).view(2, 3, 4).to(device).requires_grad_()
        for _ in range(3):
            net[1](net[0](x))[0].square().mean().backward()
            optimizer.step()
        assert x.grad is not None
        assert x.grad.device.type == device
        return [x.grad.cpu(), *(leaf.detach().cpu() for leaf in copy.deepcopy(net).cpu().parameters())]

    with simulated_cuda(check=False):
        found = trained("cuda")
    assert_same(found, trained("cpu"))


def test_gradients_cross_devices() -> None:
    with simulated_cuda(check=False):
        x = torch.ones(3, requires_grad=True)
        (x.cuda() * 2).sum().backward()
        assert x.grad is not None
        assert (x.grad.device.type, x.grad.tolist()) == ("cpu", [2.0, 2.0, 2.0])


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (lambda x: x + torch.ones(3), "Expected all tensors to be on the same device"),
        (lambda x: torch.ones(()).add_(x.sum()), "Expected all tensors to be on the same device"),
        (lambda x: x.numpy(), "can't convert cuda:0 device type tensor to numpy"),
    ],
)
def test_what_cuda_refuses_is_refused(program: Any, words: str) -> None:
    with simulated_cuda(), pytest.raises((RuntimeError, TypeError), match=words):
        program(torch.ones(3, device="cuda"))


def test_the_device_draws_from_a_generator_of_its_own() -> None:
    with simulated_cuda():
        torch.manual_seed(1)
        host, state = torch.get_rng_state(), torch.cuda.get_rng_state()
        first = torch.nn.functional.dropout(torch.ones(50, device="cuda"))
        assert_same(torch.get_rng_state(), host)
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.nn.functional.dropout(torch.ones(50, device="cuda")), first)
        assert not torch.equal(torch.nn.functional.dropout(torch.ones(50, device="cuda")), first)
        with torch.random.fork_rng([0]):
            inside = torch.rand(3, device="cuda")
        assert torch.equal(torch.rand(3, device="cuda"), inside)


def test_memory_is_counted() -> None:
    with simulated_cuda():
        before = torch.cuda.memory_allocated()
        x = torch.empty(1000, device="cuda")
        assert torch.cuda.memory_allocated() - before == 4000
        del x
        assert torch.cuda.memory_allocated() == before
        assert torch.cuda.max_memory_allocated() == before + 4000


def test_pinned_memory_says_so() -> None:
    with simulated_cuda():
        assert torch.empty(3, pin_memory=True).is_pinned()
        assert torch.ones(3).pin_memory().is_pinned()
        assert not torch.ones(3).is_pinned()


def test_other_threads_and_later_code_have_torchs_own() -> None:
    found: list[Any] = []
    available = torch.cuda.is_available()
    with simulated_cuda():
        x = torch.ones(3, device="cuda")
        thread = threading.Thread(target=lambda: found.append((torch.cuda.is_available(), torch.ones(2).device.type)))
        thread.start()
        thread.join()
    assert found == [(available, "cpu")]
    assert torch.cuda.is_available() == available
    assert (x.device.type, type(torch.Tensor.__dict__.get("device"))) == ("cpu", type(None))
