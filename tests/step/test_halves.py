"""Halves of a step: open, backward, finish (law 57)."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm
from functional_ds import pipelining as pp
from functional_ds import transforms as T
from functional_ds.base.prng import Key
from functional_ds.testing import assert_same
from tests.planting import Bug, planted

STAGES = (None, 0, 1, 2, 3)
PRECISIONS: dict[str, tuple[Callable[[], fds.Transform], ...]] = {
    "fp32": (),
    "bf16": (lambda: T.mixed_precision("bf16", 1.0),),
    "fp16": (lambda: T.mixed_precision("fp16", 8.0),),  # some of the batches below overflow
}
OTHERS: dict[str, Callable[[], fds.Transform]] = {
    "clip": lambda: T.clip(0.5),
    "offload": lambda: T.offload("cpu"),
    "remat": lambda: T.remat(policy="recompute"),
    "ema": lambda: T.ema(0.9),
}
ORDER = (("ema",), ("offload",), ("remat", "clip"))  # around precision and zero


class Net(nn.Module):
    """Buffers that a forward pass writes, and a head that some batches leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.out, self.extra = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor, both: bool = False) -> Tensor:
        x = self.norm(self.inp(x))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.out(x) + self.extra(x) if both else self.out(x)


def functional(build: Callable[[], nn.Module] = Net, seed: int = 0) -> tuple[fds.Apply, dict[str, Tensor]]:
    torch.manual_seed(seed)
    return fds.functional(build())


def strategy(stage: int | None, precision: str = "fp32", others: tuple[str, ...] = (), k: int = 1) -> fds.Transform:
    first, second, third = ([OTHERS[name]() for name in names if name in others] for names in ORDER)
    zero = [] if stage is None else [T.zero(stage)]
    return fds.compose(*first, *(make() for make in PRECISIONS[precision]), *second, *zero, *third, T.accumulate(k))


def batches(count: int, rows: int = 4, big: float = 1.0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(comm.world().rank)
    found = [(torch.randn(rows, 3, generator=generator), torch.randn(rows, 2, generator=generator)) for _ in range(count)]
    return [(x * (big if i == 1 else 1.0), y) for i, (x, y) in enumerate(found)]


def differentiated(run: fds.OpenPass, apply: fds.Apply, how: str, both: bool, last: bool | None) -> fds.Gradients:
    """Gradients of a micro-batch, as loops come to them."""
    if last is not None:
        run.last = last
    if how == "step":  # the step's own loss
        return run.backward()

    def loss_of(params: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return net_loss(apply, params, batch, run.key, both)

    loss, metrics = run(loss_of, run.batch)
    if how == "loss.backward":
        run.scaled((loss, metrics)).backward()
        return run.collect()
    return run.backward((loss, metrics))


def net_loss(apply: fds.Apply, params: Any, batch: Any, key: Key | None, both: bool) -> tuple[Tensor, dict[str, Tensor]]:
    found = apply(params, batch[0], both)
    found = found if key is None else key.dropout(found, 0.2, "out")
    loss = F.mse_loss(found.float(), batch[1].float())
    return loss, {"size": found.detach().float().abs().mean()}


def both_ways(transform: fds.Transform, k: int, how: str, boundary: str, both: bool, donate: bool, big: float) -> None:
    """A run of ``step(state, batch)`` and one of halves, compared after each step."""
    apply, params = functional()
    step = transform(fds.train_step(lambda p, b, key: net_loss(apply, p, b, key, both), fds.adamw(0.1), seed=3))
    one, other = step.init(params), step.init(params)
    for batch in batches(3, rows=2 * k, big=big):
        one, expected = step(one, batch)
        grads = None
        for i, micro in enumerate(zip(*(leaf.chunk(k) for leaf in batch), strict=True)):
            last = {"backward": i == k - 1, "finish": False}[boundary]
            grads = differentiated(step.open(other, micro, grads), apply, how, both, last)
        assert grads is not None
        before = other if donate else other.clone()
        after, metrics = step.finish(other, grads, donate=donate)
        if not donate:
            assert_same(fds.tree.leaves(other), fds.tree.leaves(before))
        other = after
        assert_same(fds.tree.leaves(other), fds.tree.leaves(one))
        assert_same(metrics, expected)


HOW = ("step", "backward", "loss.backward")


@pytest.mark.law(57)
@given(
    stage=st.sampled_from(STAGES),
    precision=st.sampled_from(sorted(PRECISIONS)),
    others=st.sets(st.sampled_from(sorted(OTHERS))).map(tuple),
    k=st.sampled_from((1, 2, 3)),
    n=st.sampled_from((1, 2)),
    how=st.sampled_from(HOW),
    boundary=st.sampled_from(("backward", "finish")),
    both=st.booleans(),
    donate=st.booleans(),
)
@settings(max_examples=settings.default.max_examples // 2)
def test_halves_are_the_step(
    stage: int | None,
    precision: str,
    others: tuple[str, ...],
    k: int,
    n: int,
    how: str,
    boundary: str,
    both: bool,
    donate: bool,
) -> None:
    """Bit for bit: metrics, params, optimizer, buffers, draws, leaves without gradients, skipped steps."""

    def program() -> None:
        both_ways(strategy(stage, precision, others, k), k, how, boundary, both, donate, 1e5 if precision == "fp16" else 1.0)

    comm.simulate(program, world_size=n)


def sharded_in_blocks(stage: int) -> tuple[fds.Transform, ...]:
    mesh = comm.mesh(replicas=2, shards=2)
    return (T.zero(stage, mesh["shards"], replicate=mesh["replicas"]),)


REDUCING: dict[str, tuple[int, Callable[[], tuple[fds.Transform, ...]]]] = {
    "replicas, stage 2": (4, lambda: sharded_in_blocks(2)),
    "replicas, stage 1": (4, lambda: sharded_in_blocks(1)),
    "levels": (4, lambda: (T.zero(3, intra_node=2, hpz=True),)),
    "predivided": (2, lambda: (T.zero(0, gradient_predivide_factor=2.0),)),
    "persistent": (2, lambda: (T.zero(3, persistence_threshold=8),)),
    "owners": (2, lambda: (T.mixed_precision("bf16"), T.zero(1, aggregate="owner"))),
    "one bit": (2, lambda: (T.compressed_gradients(comm.codecs.OneBit()),)),
}


@pytest.mark.sample(2)
@pytest.mark.law(57)
@pytest.mark.parametrize("name", REDUCING)
def test_halves_with_whatever_reduces(name: str) -> None:
    """The loss is differentiated by torch, and ``finish`` alone knows the boundary."""
    n, make = REDUCING[name]

    def program() -> None:
        both_ways(
            fds.compose(*make(), T.accumulate(2)), 2, "loss.backward", "finish", comm.world().rank == 0, donate=True, big=1.0
        )

    comm.simulate(program, world_size=n)


# -- several losses ------------------------------------------------------------------------------------------------------


def torch_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Net()


@pytest.mark.law(57)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["graph kept", "two graphs", "two passes", "direct"])
def test_losses_of_a_step_are_summed(stage: int | None, how: str) -> None:
    """As ``.grad`` sums them, whether their graphs have parts in common, or they are of different passes."""

    def program() -> dict[str, Tensor]:
        apply, params = functional()
        step = strategy(stage)(fds.train_step(lambda p, b: F.mse_loss(apply(p, b[0]), b[1]), fds.sgd(0.1)))
        state = step.init(params)
        for x, y in batches(2):
            run = step.open(state, (x, y))
            if how == "two graphs":  # both are computed before the first backward
                one, other = F.mse_loss(run(apply, x), y), run(apply, x).abs().mean()
                run.backward(one, close=False)
                grads = run.backward(other)
            elif how == "two passes":
                grads = run.backward(F.mse_loss(run(apply, x), y))
                run = step.open(state, (x, y), grads)
                grads = run.backward(run(apply, x).abs().mean(), weighs=False)
            elif how == "graph kept":
                out = run(apply, x)
                run.backward(F.mse_loss(out, y), retain_graph=True)
                grads = run.backward(out.abs().mean())
            else:
                out = run(apply, x)
                F.mse_loss(out, y).backward(retain_graph=True)
                run.collect(close=False)
                out.abs().mean().backward()
                grads = run.collect()
            state, _ = step.finish(state, grads)
        return {**step.params(state), **step.module_buffers(state)}

    expected = torch_net()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for x, y in batches(2):
        out = expected(x)
        again = out if how in ("graph kept", "direct") else expected(x)
        (F.mse_loss(out, y) + again.abs().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(comm.simulate(program, world_size=1)[0], expected.state_dict())


def gan(generator: nn.Module, critic: nn.Module, rounds: list[tuple[Tensor, Tensor]]) -> list[float]:
    """In plain PyTorch: both train on the same fakes, and the generator's loss goes through the critic."""
    of_g, of_c = torch.optim.SGD(generator.parameters(), 0.1), torch.optim.SGD(critic.parameters(), 0.1)
    losses = []
    for real, noise in rounds:
        fake = generator(noise)
        of_c.zero_grad()
        F.softplus(-critic(real)).mean().backward()
        F.softplus(critic(fake.detach())).mean().backward()
        of_c.step()
        of_g.zero_grad()
        loss = F.softplus(-critic(fake)).mean() + (fake**2).mean()
        loss.backward()
        of_g.step()
        losses.append(loss.item())
    return losses


def gan_in_halves(apply: Any, critic: Any, steps: Any, states: Any, rounds: Any) -> tuple[list[float], Any]:
    (g, c), (of_g, of_c), losses = steps, states, []
    for real, noise in rounds:
        making = g.open(of_g, noise)
        fake = making(apply, noise)
        judging = c.open(of_c, real)
        on_real = F.softplus(-judging(critic, real)).mean()
        on_fake = F.softplus(judging(critic, fake.detach())).mean()
        of_c, _ = c.finish(of_c, judging.backward(on_real + on_fake))
        with c.open(of_c, real) as judging:  # nothing of the critic is trained by the generator's loss
            loss = F.softplus(-judging(critic, fake)).mean() + (fake**2).mean()
            grads = making.backward(loss)
        of_g, metrics = g.finish(of_g, grads)
        losses.append(metrics["loss"].item())
    return losses, (of_g, of_c)


@pytest.mark.law(57)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("n", [1, 2])
def test_two_steps_share_a_pass(stage: int | None, n: int) -> None:
    """A GAN: the fakes of one pass of the generator train the critic, and then, through the critic, the generator."""
    if stage is None and n > 1:
        return

    def nets() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)), nn.Sequential(
            nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)
        )

    draw = torch.Generator().manual_seed(4)
    rounds = [(torch.randn(4, 3, generator=draw), torch.randn(4, 2, generator=draw)) for _ in range(3)]
    plain = nets()
    expected = gan(*plain, rounds)

    def program() -> Any:
        (make, of_g), (judge, of_c) = map(fds.functional, nets())
        steps = [strategy(stage)(fds.train_step(lambda p, b: b.sum(), fds.sgd(0.1))) for _ in range(2)]
        states = [step.init(params) for step, params in zip(steps, (of_g, of_c), strict=True)]
        own = [[x.chunk(n)[comm.world().rank] for x in each] for each in rounds]
        losses, states = gan_in_halves(make, judge, steps, states, own)
        return losses, [step.params(state) for step, state in zip(steps, states, strict=True)]

    for losses, found in comm.simulate(program, world_size=n):
        assert losses == pytest.approx(expected, rel=1e-5)
        for own, net in zip(found, plain, strict=True):
            torch.testing.assert_close(own, net.state_dict())


@pytest.mark.law(57)
@pytest.mark.parametrize("stage", STAGES)
def test_one_backward_trains_two_steps(stage: int | None) -> None:
    """An encoder and a decoder with a step each: one ``loss.backward()`` goes through both passes."""
    torch.manual_seed(2)
    nets = [nn.Linear(3, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 3))]

    def program() -> Any:
        pairs = [fds.functional(copy.deepcopy(net)) for net in nets]
        steps = [strategy(stage)(fds.train_step(lambda p, b: b.sum(), fds.sgd(0.1))) for _ in pairs]
        states = [step.init(params) for step, (_, params) in zip(steps, pairs, strict=True)]
        for x, _ in batches(2):
            runs = [step.open(state, x) for step, state in zip(steps, states, strict=True)]
            hidden = x
            for run, (apply, _) in zip(runs, pairs, strict=True):
                hidden = run(apply, hidden)
            F.mse_loss(hidden, x).backward()
            states = [step.finish(state, run.collect())[0] for step, state, run in zip(steps, states, runs, strict=True)]
        return [step.params(state) for step, state in zip(steps, states, strict=True)]

    (found,) = comm.simulate(program, world_size=1)
    expected = copy.deepcopy(nets)
    optimizer = torch.optim.SGD([p for net in expected for p in net.parameters()], lr=0.1)
    for x, _ in batches(2):
        optimizer.zero_grad()
        F.mse_loss(expected[1](expected[0](x)), x).backward()
        optimizer.step()
    for own, net in zip(found, expected, strict=True):
        torch.testing.assert_close(own, net.state_dict())


def penalised(net: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The loss of a critic whose slope is held at 1, as in WGAN-GP."""
    x = x.clone().requires_grad_()
    found = net(x)
    (slope,) = torch.autograd.grad(found.sum(), x, create_graph=True)
    return found.mean() + (slope.norm(dim=1) - 1).square().mean()


@pytest.mark.law(57)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("direct", [False, True])
def test_a_gradient_penalty(stage: int | None, direct: bool) -> None:
    """A backward pass by the inputs comes before that of the loss, and belongs to its graph."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def program() -> Any:
        apply, params = fds.functional(copy.deepcopy(net))
        step = strategy(stage)(fds.train_step(lambda p, b: b.sum(), fds.sgd(0.1)))
        state = step.init(params)
        for x, _ in batches(2):
            run = step.open(state, x)
            loss = penalised(lambda x, run=run: run(apply, x), x)  # type: ignore[misc]
            if direct:
                loss.backward()
            state, _ = step.finish(state, run.collect() if direct else run.backward(loss))
        return step.params(state)

    expected = copy.deepcopy(net)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for x, _ in batches(2):
        optimizer.zero_grad()
        penalised(expected, x).backward()
        optimizer.step()
    torch.testing.assert_close(comm.simulate(program, world_size=1)[0], expected.state_dict())


def casts_keep_graphs() -> None:
    step = T.mixed_precision("bf16")(fds.train_step(lambda p, b: b.sum(), fds.sgd(0.1)))
    x = torch.ones(2, requires_grad=True)
    with step.open(step.init({"w": torch.tensor([2.0, 3.0])})) as run:
        found = run(lambda params, x: params["w"] * x, x)
        assert found.dtype == torch.bfloat16
        (grad,) = torch.autograd.grad(found.sum(), x)
        assert grad.tolist() == [2.0, 3.0]


def test_casts_keep_the_graph_of_what_comes_in() -> None:
    casts_keep_graphs()


# -- passes that are dropped -----------------------------------------------------------------------------------------------


@pytest.mark.law(57)
@given(stage=st.sampled_from(STAGES), n=st.sampled_from((1, 2)), when=st.sampled_from(("unused", "run", "evaluated", "failed")))
@settings(max_examples=settings.default.max_examples // 2)
def test_a_pass_that_is_dropped_leaves_nothing(stage: int | None, n: int, when: str) -> None:
    """Between micro-batches, too: the step is the one without it, and no pass stays open."""

    def program() -> None:
        apply, params = functional()
        step = strategy(stage, k=2)(fds.train_step(lambda p, b: F.mse_loss(apply(p, b[0]), b[1]), fds.adamw(0.1)))
        one, other = step.init(params), step.init(params)
        for batch in batches(2):
            one, expected = step(one, batch)
            grads = None
            for i, micro in enumerate(zip(*(leaf.chunk(2) for leaf in batch), strict=True)):
                dropped(step, other, apply, micro, grads, when)
                run = step.open(other, micro, grads)
                grads = run.backward(F.mse_loss(run(apply, micro[0]), micro[1]), last=i == 1)
            other, metrics = step.finish(other, grads)
            assert_same(fds.tree.leaves(other), fds.tree.leaves(one))
            assert_same(metrics, expected)
            assert fds.step.pass_scope.current_pass() is None

    comm.simulate(program, world_size=n)


def dropped(step: fds.Step, state: fds.State, apply: Any, micro: Any, grads: Any, when: str) -> None:
    def fails(params: Any, x: Tensor) -> Tensor:
        raise KeyError(str(apply(params, x).sum()))

    if when == "evaluated":
        with step.open(state, micro, grads, trains=False) as run:
            found = run(apply, micro[0])
            assert not found.requires_grad
            assert run.key is None
        return
    with step.open(state, micro, grads) as run:
        if when == "run":
            run(apply, micro[0])
        elif when == "failed":
            with pytest.raises(KeyError):
                run(fails, micro[0])
    with pytest.raises(RuntimeError, match="closed; open another"):
        run(apply, micro[0])


# -- what is refused -------------------------------------------------------------------------------------------------------


def started(*parts: fds.Transform) -> tuple[fds.Step, fds.State, Any, tuple[Tensor, Tensor]]:
    apply, params = functional()
    step = fds.compose(*parts)(fds.train_step(lambda p, b: F.mse_loss(apply(p, b[0]), b[1]), fds.adamw(0.1)))
    return step, step.init(params), apply, batches(1)[0]


@pytest.mark.parametrize("which", ["pipeline", "sequence", "balance"])
def test_what_runs_the_passes_itself_has_no_halves(which: str) -> None:
    if which == "pipeline":
        apply, params = functional(lambda: nn.Linear(3, 2))
        stages = pp.stages([apply], [params], inputs=lambda b: b[0], loss=lambda y, b: F.mse_loss(y, b[1]))
        step = T.pipeline(pp.one_f_one_b(1, 2), stages)(fds.train_step(stages, fds.sgd(0.1)))
        state, batch = step.init([params]), batches(1)[0]
    else:
        step, state, _, batch = started(T.sequence() if which == "sequence" else T.balance(0.1, {"router": 2}))
    with pytest.raises(ValueError, match=rf"open: {which}\(.*cannot be run as separate passes .*call step\(state, batch\)"):
        step.open(state, batch)


def test_gradients_are_used_once_and_with_their_state() -> None:
    step, state, _, batch = started()
    other = step.init(functional()[1])
    grads = step.open(state, batch).backward()
    with pytest.raises(ValueError, match="of another state"):
        step.open(other, batch, grads)
    with pytest.raises(ValueError, match="of another state"):
        step.finish(other, grads)
    more = step.open(state, batch, grads).backward()
    for use in (lambda: step.open(state, batch, grads), lambda: step.finish(state, grads)):
        with pytest.raises(ValueError, match="used already"):
            use()
    step.finish(state, more)
    with pytest.raises(fds.DonatedStateError):
        step.open(state, batch)
    assert "used" in repr(grads)


def test_a_pass_says_what_it_cannot_do() -> None:
    step, state, apply, (x, y) = started()
    run = step.open(state, (x, y))
    assert "not run yet" in repr(run)
    out = run(apply, x)
    with pytest.raises(RuntimeError, match="no backward pass has reached"):
        run.collect()
    run.backward(F.mse_loss(out, y), retain_graph=True)
    with pytest.raises(RuntimeError, match="open another pass"):
        run(apply, x)
    run.close()
    with pytest.raises(RuntimeError, match="in a pass that is closed"):
        F.mse_loss(out, y).backward()
    with pytest.raises(RuntimeError, match="this pass is closed"):
        run.backward(F.mse_loss(out, y))
    with pytest.raises(RuntimeError, match="has no graph"):
        step.open(state, (x, y)).backward(torch.ones(()))
    run = step.open(state, (x, y), trains=False)
    for use in (run.backward, run.collect, lambda: run.scaled(out.mean())):
        with pytest.raises(RuntimeError, match="trains=False"):
            use()  # type: ignore[operator]
    with pytest.raises(ValueError, match="give it a loss"):
        step.open(state).backward()
    with pytest.raises(ValueError, match="structure"):
        step.open(step(state, (x, y))[0], x)


@pytest.mark.parametrize("stage", STAGES)
def test_a_state_with_an_open_pass_is_not_donated(stage: int | None) -> None:
    """Its backward would find params that the update has written; in stage 3 it would gather them without a word."""
    step, state, apply, (x, y) = started(strategy(stage))
    run = step.open(state, (x, y))
    loss = F.mse_loss(run(apply, x), y)
    with pytest.raises(ValueError, match="another pass of it is still open"):
        step(state, (x, y))
    after, _ = step(state, (x, y), donate=False)
    expected, _ = step.finish(state, run.backward(loss), donate=False)
    assert_same(fds.tree.leaves(expected), fds.tree.leaves(after))
    step(state, (x, y))


def test_a_scaled_loss_must_be_the_one_that_is_differentiated() -> None:
    step, state, apply, (x, y) = started(T.mixed_precision("fp16", 8.0))
    for first in (False, True):
        run = step.open(state, (x, y))
        out = run(apply, x).float()
        if first:
            run.backward(F.mse_loss(out, y), retain_graph=True)
        out.mean().backward()
        with pytest.raises(RuntimeError, match=r"run\.scaled\(loss\)"):
            run.collect()


def blocks_differ(how: str) -> None:
    """Ranks use other blocks, and the loss does not come to all that its functions use."""

    def forward(params: Any, x: Tensor) -> Tensor:
        unseen = torch.tanh(x @ params["blocks"][2])
        for block in (0, 1, 3) if comm.world().rank else ():
            x = torch.tanh(x @ params["blocks"][block])
        return torch.stack([x, unseen])

    def program() -> None:
        params = {"blocks": [torch.eye(3) * (i + 1) / 2 for i in range(4)]}
        for stage in (1, 2, 3):
            step = strategy(stage)(fds.train_step(lambda p, x: forward(p, x)[0].square().mean(), fds.adamw(0.1)))
            one, other = step.init(params), step.init(params)
            for x, _ in batches(3):
                one, _ = step(one, x)
                with step.open(other, x) as unused:  # a gradient goes through it, and trains nothing
                    own = x.clone().requires_grad_()
                    (through,) = torch.autograd.grad(unused(forward, own)[0].sum(), own)
                    assert through.abs().sum() > 0
                run = step.open(other, x)
                loss = run(forward, x)[0].square().mean()
                if how == "loss.backward":
                    loss.backward()
                other, _ = step.finish(other, run.collect() if how == "loss.backward" else run.backward(loss))
                assert_same(fds.tree.leaves(other), fds.tree.leaves(one))

    comm.simulate(program, world_size=2)


@pytest.mark.law(57)
@pytest.mark.parametrize("how", HOW[1:])
def test_ranks_that_use_other_params(how: str) -> None:
    blocks_differ(how)


@pytest.mark.parametrize("stage", STAGES)
def test_a_plain_backward_needs_no_word_of_the_loss(stage: int | None) -> None:
    """``loss.backward()`` and ``collect``, as programs for ZeRO have it: the update is that of ``backward``."""

    def program() -> None:
        apply, params = functional()
        step = strategy(stage)(fds.train_step(lambda p, b: F.mse_loss(apply(p, b[0]), b[1]), fds.adamw(0.1)))
        one, other = step.init(params), step.init(params)
        for x, y in batches(2):
            one, _ = step(one, (x, y))
            run = step.open(other, (x, y))
            F.mse_loss(run(apply, x), y).backward()
            other, metrics = step.finish(other, run.collect())
            assert metrics == {}
            assert_same(fds.tree.leaves(other), fds.tree.leaves(one))

    comm.simulate(program, world_size=2)


# -- processes, and bugs ---------------------------------------------------------------------------------------------------


def on_processes() -> Any:
    for stage, how, boundary in ((1, "loss.backward", "finish"), (3, "backward", "backward")):
        both_ways(strategy(stage, "bf16", ("clip",), 2), 2, how, boundary, comm.world().rank == 0, True, 1.0)
    return comm.world().rank


def test_processes() -> None:
    assert comm.spawn(on_processes, world_size=2) == [0, 1]


def law(stage: int | None, k: int, how: str, boundary: str, precision: str = "fp32") -> None:
    comm.simulate(
        lambda: both_ways(strategy(stage, precision, (), k), k, how, boundary, comm.world().rank == 0, True, 1.0), world_size=2
    )


BUGS: list[tuple[Callable[[], None], Bug]] = [
    (
        casts_keep_graphs,
        Bug(
            "a cast cuts another step's graph",
            "transforms.precision.mixed_precision:_MixedPrecision._cast",
            "smooth and leaf.requires_grad",
            "False",
            RuntimeError,
        ),
    ),
    (
        lambda: law(1, 2, "backward", "finish"),
        Bug("what was put off is never reduced", "step.pass_gradients:_flushed", "not step.has(Trait.SUMS_LAST)", "True"),
    ),
    (
        lambda: law(0, 2, "backward", "backward"),
        Bug(
            "draws of all micro-batches begin at one row",
            "step.pass_gradients:Gradients.key_at",
            "self._key.at(step=state.step, rows=self._rows)",
            "self._key.at(step=state.step, rows=0)",
        ),
    ),
    (
        lambda: law(0, 2, "backward", "backward"),
        Bug("ranks draw alike", "step.pass_gradients:Gradients.key_at", "rows * step.micro_batches(state)", "rows"),
    ),
    (
        lambda: law(None, 2, "backward", "backward"),
        Bug("buffers of earlier passes are lost", "step.open_pass:OpenPass.__init__", "so_far.after()", "so_far.state"),
    ),
    (
        lambda: law(1, 1, "backward", "finish", "bf16"),
        Bug("a lone micro-batch travels as a sum", "transforms.zero.zero:Zero._reducer", "passes == 1", "False"),
    ),
    (
        lambda: law(1, 2, "loss.backward", "backward"),
        Bug(
            "a direct backward forgets what came before",
            "step.open_pass:OpenPass._reached",
            "None if carry is None else carry.sum",
            "None",
        ),
    ),
    (
        lambda: blocks_differ("loss.backward"),
        Bug(
            "a direct backward leaves out units that this rank did not use",
            "transforms.zero.lazy_params:LazyParams._settle",
            "self.layout.units[unit].trained_leaves and (not reducer.has(unit))",
            "False",
            comm.errors.DeadlockError,
        ),
    ),
    (
        lambda: test_losses_of_a_step_are_summed(None, "graph kept"),
        Bug(
            "the second loss counts as a micro-batch",
            "step.open_pass:OpenPass._weighted",
            "weighs is None and self._weighed",
            "False",
        ),
    ),
    (
        lambda: blocks_differ("backward"),
        Bug(
            "a rank gives up a backward pass alone",
            "step.open_pass:OpenPass._end",
            "pulling.drop()",
            "pass",
            comm.errors.DeadlockError,
        ),
    ),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("check", "bug"), BUGS, ids=[bug.name for _, bug in BUGS])
def test_planted_bugs_are_found(check: Callable[[], None], bug: Bug) -> None:
    check()
    with planted(bug), pytest.raises(bug.shows):
        check()
