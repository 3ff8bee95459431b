"""Leaves without values: built without memory, read where they are stored, with the bits of a whole initialisation."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import init

import functional_ds as fds
from functional_ds import comm, transforms
from functional_ds.sharding.sources import is_deferred, values_of
from functional_ds.testing import assert_same
from tests.transforms.models import Blocks, Tied


class Scaled(nn.Module):
    """Defaults that are overwritten, then scaled by depth, in views."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.table = nn.Parameter(torch.empty(6, 4))
        for part in self.table.split(2):
            init.normal_(part, std=0.02)
        with torch.no_grad():
            for depth, layer in enumerate(self.layers):
                layer.weight.normal_(std=0.02, generator=torch.Generator().manual_seed(depth))
                layer.weight.mul_(1 / (depth + 1))
                layer.bias.zero_()
        self.register_buffer("waves", 1 / 10000 ** (torch.arange(0, 8, 2).float() / 8))
        self.factor = torch.tensor([2.0])


class Drawn(nn.Module):
    """Values that are drawn until they are well, made of matrices, of permutations, of each other."""

    def __init__(self) -> None:
        super().__init__()
        self.truncated = nn.Parameter(init.trunc_normal_(torch.empty(9, 5), std=0.02, a=-0.02, b=0.02))
        self.orthogonal = nn.Parameter(init.orthogonal_(torch.empty(4, 6)))
        self.sparse = nn.Parameter(init.sparse_(torch.empty(7, 5), 0.3))
        self.dirac = nn.Parameter(init.dirac_(torch.empty(3, 3, 2)))
        self.embed = nn.Embedding(11, 4, padding_idx=2)
        self.order = nn.Parameter(torch.randperm(5).float() * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
        self.chance = nn.Parameter(torch.bernoulli(torch.full((9,), 0.3)))
        self.narrow = nn.Linear(3, 40, dtype=torch.bfloat16)
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2)  # copies its layer
        self.lstm = nn.LSTM(3, 4)


class Seeded(nn.Module):
    """Draws by a generator of its own, by the default one, and by its own again."""

    def __init__(self) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(3)
        self.first = nn.Parameter(torch.randn(7, generator=own))
        self.order = nn.Parameter(torch.randperm(5, generator=own).float())
        self.whole = nn.Linear(3, 4)
        self.chance = nn.Parameter(torch.bernoulli(torch.full((9,), 0.3), generator=own))
        self.last = nn.Parameter(torch.empty(5).normal_(generator=own) + torch.rand(5, generator=own))


class Turned(nn.Module):
    """Values that are written over themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        with torch.no_grad():
            self.weight.copy_(self.weight)


def cast() -> nn.Module:
    """Cast and moved after it was built, in part and as a whole, then drawn anew."""
    module = nn.Sequential(nn.Linear(4, 3).half().requires_grad_(False), nn.BatchNorm1d(3).to("cpu"), Tied().double())
    module.to(torch.bfloat16).float()[1].to(torch.bfloat16)
    init.normal_(module[1].weight)
    return module.cpu()


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "scaled": Scaled,
    "drawn": Drawn,
    "blocks": Blocks,
    "tied": Tied,
    "cast": cast,
    "seeded": Seeded,
    "turned": Turned,
}


def whole(build: Callable[[], nn.Module]) -> tuple[dict[str, Tensor], Any]:
    """Params, buffers and the generator's state of an initialisation in memory."""
    torch.manual_seed(5)
    module = build()
    return fds.functional(module)[1], (dict(module.named_buffers()), torch.get_rng_state())


@pytest.mark.parametrize("name", sorted(BUILDS))
def test_values_are_those_of_a_whole_initialisation(name: str) -> None:
    """Bit for bit: params, what is trained, buffers, and the state in which the generator is left."""
    expected, others = whole(BUILDS[name])
    torch.manual_seed(5)
    apply, params = fds.deferred(BUILDS[name])
    assert_same((dict(apply.module.named_buffers()), torch.get_rng_state()), others)
    torch.manual_seed(77)  # what happens since changes nothing
    assert [*params] == [*expected]
    assert all(is_deferred(leaf) for leaf in params.values())
    for path in reversed([*params]):
        assert_same(values_of(params[path]), expected[path].detach())
        assert isinstance(params[path], nn.Parameter) == (not expected[path].requires_grad)  # frozen ones are marked so


@given(
    name=st.sampled_from(("scaled", "tied")),
    n=st.integers(1, 3),
    stage=st.sampled_from((None, 0, 1, 2, 3)),
    half=st.booleans(),
    options=st.sampled_from(({}, {"intra_node": 1}, {"aggregate": "owner"}, {"persistence_threshold": 16})),
)
def test_states_begin_alike(name: str, n: int, stage: int | None, half: bool, options: dict[str, Any]) -> None:
    """init of deferred leaves = init of the whole ones, bitwise, in every stage, and nobody sends params at first."""
    options = options if stage and not ("persistence_threshold" in options and stage < 3) else {}

    def program(deferred: bool) -> Any:
        torch.manual_seed(5)
        params = fds.deferred(BUILDS[name])[1] if deferred else fds.functional(BUILDS[name]())[1]
        chain = [transforms.mixed_precision()] if half else []
        chain += [] if stage is None else [transforms.zero(stage, **options)]
        step = fds.compose(*chain)(fds.train_step(lambda p, x: x.sum(), fds.sgd(0.1, momentum=0.9)))
        with comm.ledger() as book:
            state = step.init(params)
        if deferred:
            assert not [r for r in book.rows if r.collective == "broadcast" and "owner" not in options.values()]
        return state.params, state.optimizer, getattr(state.slots.get("mixed_precision"), "masters", None), step.params(state)

    assert_same(*(comm.simulate(program, deferred, world_size=n) for deferred in (True, False)))


def test_training_goes_on_from_there() -> None:
    def program(deferred: bool) -> list[float]:
        torch.manual_seed(5)
        apply, params = fds.deferred(Blocks) if deferred else fds.functional(Blocks())
        step = transforms.zero(3)(fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.1)))
        state, losses = step.init(params), []
        for _ in range(3):
            state, metrics = step(state, torch.ones(2, 6))
            losses.append(metrics["loss"].item())
        return losses

    assert comm.simulate(program, True, world_size=2) == comm.simulate(program, False, world_size=2)


class Log:
    """A source of whole numbers that knows what was read, and how much of it is there at once."""

    def __init__(self) -> None:
        self.read_: list[tuple[str, int]] = []
        self.there: list[weakref.ref[Tensor]] = []
        self.most = 0

    def read(self, path: str, start: int, stop: int) -> Tensor:
        self.read_.append((path, stop - start))
        self.there = [ref for ref in self.there if ref() is not None]
        found = torch.arange(start, stop, dtype=torch.float64)
        self.there.append(weakref.ref(found))
        self.most = max(self.most, len(self.there))
        return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_rank_reads_its_own_elements_once(stage: int) -> None:
    """One leaf at a time: all ranks together read every element once, in stage 0 each rank all of them."""
    shapes = {f"h.{i}.{name}": size for i in range(3) for name, size in (("w", (4, 6)), ("b", (5,)))}

    def program() -> tuple[int, int, Any]:
        log = Log()
        params = {path: torch.empty(shape, device="meta") for path, shape in shapes.items()}
        step = transforms.zero(stage)(fds.train_step(lambda p, x: x.sum(), fds.sgd(0.1)))
        state = step.init(fds.from_source(params, log))
        return sum(size for _, size in log.read_), log.most, step.params(state)

    total = 3 * (24 + 5)
    results = comm.simulate(program, world_size=3)
    assert sum(size for size, _, _ in results) == (3 * total if stage == 0 else total)
    for _, most, params in results:
        assert most <= 1
        assert_same(params, {path: torch.arange(torch.Size(s).numel()).float().view(s) for path, s in shapes.items()})


class Peak(torch.utils._python_dispatch.TorchDispatchMode):
    """The most bytes of tensors with values that are there at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[Any, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in fds.tree.leaves(found):
            if isinstance(x, Tensor) and type(x) is Tensor and not x.is_meta:
                storage = x.untyped_storage()
                self.alive[storage._cdata] = (torch.multiprocessing.reductions.StorageWeakRef(storage), storage.nbytes())
        self.alive = {key: pair for key, pair in self.alive.items() if not pair[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return found


def test_no_more_is_there_than_shards_and_a_leaf() -> None:
    """A model of 16 layers on 16 ranks: this rank's shards, its optimizer's, and twice a leaf; far below the model's bytes."""
    layer, layers, n = 4 * 64 * 64, 16, 16

    def program() -> int:
        _, params = fds.deferred(lambda: nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(layers))))
        step = transforms.zero(3)(fds.train_step(lambda p, x: x.sum(), fds.sgd(0.1)))
        with Peak() as peak:
            step.init(params)
        return peak.most

    most = max(comm.simulate(program, world_size=n))
    assert most < layer * layers // n * 2 + 3 * layer
    assert most < layer * layers // 2


# -- bad input --------------------------------------------------------------------------------------------------------


def test_what_is_no_source_is_refused() -> None:
    with pytest.raises(TypeError, match=r"source=3 has no read"):
        fds.from_source({"w": torch.ones(1)}, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [torch.ones(2, 2), "text"])
def test_a_source_that_gives_something_else_is_named(given: Any) -> None:
    class Odd:
        def read(self, path: str, start: int, stop: int) -> Any:
            return given

    step = fds.train_step(lambda p, x: x.sum(), fds.sgd(0.1))
    with pytest.raises(ValueError, match=r"elements 0 to 6 of 'w', of shape \[2, 3\], it gave"):
        step.init(fds.from_source({"w": torch.empty(2, 3, device="meta")}, Odd()))


def test_other_devices_are_refused() -> None:
    with pytest.raises(RuntimeError, match="leave the device out"):
        fds.deferred(lambda: nn.Linear(2, 2, device="meta"))


def test_memory_that_leaves_torch_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"build: \.numpy\(\) of a tensor of shape \[2, 4\]"):
        fds.deferred(lambda: nn.Linear(4, 2) if nn.Linear(4, 2).weight.detach().numpy().any() else nn.Identity())


def test_marks_stay_with_deferred_leaves() -> None:
    """Frozen after they were deferred, and stored in another dtype."""
    params = fds.freeze(fds.deferred(lambda: nn.Linear(2, 2))[1], "bias")
    step = transforms.mixed_precision("bf16,*weight*=f32")(fds.train_step(lambda p, x: x.sum(), fds.sgd(0.1)))
    state = step.init(params)
    assert {path: leaf.dtype for path, leaf in state.params.items()} == {"weight": torch.float32, "bias": torch.bfloat16}
    assert isinstance(state.params["bias"], nn.Parameter)
