"""What is not elementwise is refused where it would be wrong, and what is elementwise never."""

from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import functional_ds as fds
from functional_ds import comm, transforms
from tests.optim.test_adam import assert_same, fresh, trained

STAGES = (0, 1, 2, 3)


@attrs.frozen
class Pair:
    """An optax-shaped pair without a state, from a function of the gradients."""

    change: Any

    def init(self, params: list[Tensor]) -> tuple[()]:
        return ()

    def update(self, grads: list[Tensor], state: Any, *, params: list[Tensor]) -> tuple[list[Tensor], Any]:
        return self.change(grads, params), state


def clipped(grads: list[Tensor], params: list[Tensor]) -> list[Tensor]:
    norm = torch.stack([grad.norm() for grad in grads]).norm()
    return [-0.1 * grad / norm.clamp(min=1e-3) for grad in grads]


def by_leaf_norms(grads: list[Tensor], params: list[Tensor]) -> list[Tensor]:
    return [-0.1 * grad * p.norm() / grad.norm() for grad, p in zip(grads, params, strict=True)]


def factored(grads: list[Tensor], params: list[Tensor]) -> list[Tensor]:
    """Adafactor's: matrices by rows and columns, vectors by elements."""
    return [-0.1 * (grad / grad.square().mean(-1, keepdim=True).sqrt() if grad.dim() > 1 else grad.sign()) for grad in grads]


def by_signs(grads: list[Tensor], params: list[Tensor]) -> list[Tensor]:
    return [-0.1 * grad.sign() for grad in grads]


def at_random(grads: list[Tensor], params: list[Tensor]) -> list[Tensor]:
    return [-0.1 * grad * torch.rand_like(grad) for grad in grads]


def communicating(grads: list[Tensor], params: list[Tensor]) -> list[Tensor]:
    """A clip that knows about shards."""
    norm = comm.all_reduce(torch.stack([grad.norm() for grad in grads]).square().sum()).sqrt()
    return [-0.1 * grad / norm for grad in grads]


def of_two(grads: list[Tensor], params: list[Tensor]) -> list[Tensor]:
    """For one tree alone, so that the trial cannot run."""
    if sum(grad.numel() for grad in grads) == 17:
        raise ValueError("not my params")
    return by_signs(grads, params)


def run(optimizer: Any, stage: int | None, n: int = 2) -> Any:
    strategy = () if stage is None else (transforms.zero(stage),)
    return comm.simulate(lambda: trained(optimizer, *strategy), world_size=1 if stage is None else n)


@pytest.mark.parametrize("change", [clipped, by_leaf_norms, factored])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_looks_at_norms_is_refused_in_shards(change: Any, stage: int) -> None:
    run(Pair(change), None)
    with pytest.raises(ValueError, match=r"Pair\(\.\.\.\) is not elementwise.*got shards of flat tensors.*T\.clip"):
        run(Pair(change), stage)


@pytest.mark.parametrize("change", [by_leaf_norms, factored])
@pytest.mark.parametrize(("stage", "n"), [(0, 2), (3, 1)])
def test_what_looks_at_leaves_is_refused_in_flat_tensors(change: Any, stage: int, n: int) -> None:
    with pytest.raises(ValueError, match=r"is not elementwise.*got flat tensors of several leaves.*fds\.PerParameter"):
        run(Pair(change), stage, n)


def test_a_global_norm_is_right_in_flat_tensors() -> None:
    for found in run(Pair(clipped), 0):
        assert_same(found, run(Pair(clipped), None)[0])


def test_offload_moves_one_leaf_at_a_time() -> None:
    """Leaves' own norms are right there, and a global one is refused."""
    offload = transforms.offload("cpu")
    assert_same(trained(Pair(by_leaf_norms), offload), trained(Pair(by_leaf_norms)))
    assert_same(trained(Pair(by_signs), offload), trained(Pair(by_signs)))
    with pytest.raises(ValueError, match=r"got one leaf at a time.*T\.clip"):
        trained(Pair(clipped), offload)


@pytest.mark.parametrize("change", [by_signs, at_random, communicating, of_two])
@pytest.mark.parametrize("stage", STAGES)
def test_what_cannot_be_shown_wrong_is_taken(change: Any, stage: int) -> None:
    run(Pair(change), stage)


def test_the_trial_draws_nothing() -> None:
    step = fds.train_step(lambda params, x: params["w"].sum() * x, Pair(at_random))
    torch.manual_seed(3)
    before = torch.get_rng_state()
    step.init({"w": torch.ones(2)})
    assert torch.equal(before, torch.get_rng_state())


def test_optimizers_of_users_are_tried_unless_they_say_otherwise() -> None:
    def update(params: list[Tensor], grads: fds.Weighted, state: Any, rate: Any) -> tuple[list[Tensor], Any]:
        return [p + change for p, change in zip(params, clipped(grads.sum, params), strict=True)], state

    with pytest.raises(ValueError, match="mine is not elementwise"):
        run(fds.Optimizer(lambda params: (), update, "mine"), 1)
    run(fds.Optimizer(lambda params: (), update, "mine", elementwise=True), 1)


def test_in_param_groups_and_slices() -> None:
    with pytest.raises(ValueError, match=r"Pair\(\.\.\.\) is not elementwise"):
        run(fds.param_groups({"w": Pair(clipped)}, fds.sgd(0.1)), 3)

    def program(rule: Any) -> None:
        step = transforms.tensor_parallel({"w": 1}, comm.world())(fds.train_step(lambda p, x: (x @ p["w"]).sum(), rule))
        step.init({"w": torch.ones(4, 6)})

    comm.simulate(program, Pair(by_signs), world_size=2)
    with pytest.raises(ValueError, match="got slices of leaves"):
        comm.simulate(program, Pair(by_leaf_norms), world_size=2)


TORCHOPT = ("adadelta", "adagrad", "adam", "adamax", "adamw", "radam", "rmsprop", "sgd")


@pytest.mark.sample(4)
@pytest.mark.parametrize("lr", [1e-6, 0.1])
@pytest.mark.parametrize("name", TORCHOPT)
def test_torchopts_optimizers_are_taken(name: str, lr: float) -> None:
    """In every stage, with what options change: decay, momentum, centred, schedules."""
    torchopt = pytest.importorskip("torchopt")
    further: list[dict[str, Any]] = [{}, {"weight_decay": 0.1}]
    further += [{"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "weight_decay": 0.1}] if name == "sgd" else []
    further += [{"centered": True}, {"momentum": 0.9}] if name == "rmsprop" else []
    for options in further:
        for stage in STAGES:
            run(getattr(torchopt, name)(lr, **options), stage)
    for stage in STAGES:
        run(getattr(torchopt, name)(torchopt.schedule.polynomial_schedule(lr, 0.0, 1.0, 2)), stage)


@pytest.mark.parametrize("most", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_torchopts_clip_is_refused(name: str, most: float) -> None:
    torchopt = pytest.importorskip("torchopt")
    pair = torchopt.combine.chain(torchopt.clip.clip_grad_norm(most), getattr(torchopt, name)(0.1))
    run(pair, None)
    with pytest.raises(ValueError, match="is not elementwise"):
        run(pair, 2)


def test_fresh_params_are_those_of_the_leaves() -> None:
    assert sum(leaf.numel() for leaf in fresh().values()) != 17  # or of_two would refuse them
