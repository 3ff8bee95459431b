"""Law 28 for offload: a step with it is the step without, bitwise; and what is in memory, donated, skipped, refused."""

import gc
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.testing import assert_same, seeds
from functional_ds.transforms.offloading import OnDisk, OnHost, fetched, restored
from tests.transforms import rules
from tests.transforms.models import CASES, own_rows

PRECISIONS: dict[str, tuple[fds.Transform, ...]] = {
    "fp32": (),
    "bf16": (T.mixed_precision("bf16"),),
    "fp16": (T.mixed_precision("fp16", T.DynamicScale(2.0**17, hysteresis=1)),),
    "no masters": (T.mixed_precision("params=bf16,compute=bf16", states=torch.bfloat16, stochastic=True),),
    "a mean": (T.ema(0.5), T.mixed_precision("bf16", 8.0)),
}

FURTHER: dict[str, fds.Transform] = {"clip": T.clip(0.1), "accumulate": T.accumulate(2), "schedule": T.schedule(T.warmup(3))}


@pytest.fixture(scope="module")
def folder() -> Any:
    with tempfile.TemporaryDirectory() as path:
        yield path


@st.composite
def options(draw: st.DrawFn, stage: int | None) -> dict[str, Any]:
    optimizer = draw(st.sampled_from(("disk", "disk", "cpu")))
    nearer = ["cpu", "disk"][: 1 + (optimizer == "disk")]
    params = draw(st.sampled_from([None, *nearer])) if stage == 3 else None
    return {
        "optimizer": optimizer,
        "params": params,
        "ratio": 1.0 if params else draw(st.sampled_from((0.0, 0.3, 1.0, 1.0))),
        "buffers": draw(st.integers(1, 3)),
        "buffer_bytes": draw(st.sampled_from((1, 4096, 2**20))),
        "threads": draw(st.integers(1, 3)),
        "direct": draw(st.booleans()),
    }


def offloaded(folder: str, **options: Any) -> fds.Transform:
    return T.offload(**options, path=folder if "disk" in options.values() else None)


def everything(step: fds.Step, state: fds.State) -> Any:
    """Params as the user sees them, and all of the state but what the line of states shares."""
    own = {name: slot for name, slot in state.slots.items() if name not in ("offload", "zero")}
    return step.params(state), fetched(fds.tree.replace(state, slots=own, batch=None))


def run(case: str, *strategy: fds.Transform, steps: int = 2) -> Any:
    params, loss = CASES[case].make()
    step = fds.compose(*strategy)(fds.train_step(loss, fds.adamw(1e-2)))
    state, found = step.init(params), []
    for _ in range(steps):
        state, metrics = step(state, own_rows(CASES[case].batch(12), comm.world()))
        found.append(metrics)
    return found, everything(step, state), step.evaluate(state, own_rows(CASES[case].batch(12), comm.world()))


@pytest.mark.law(28)
@given(data=st.data(), seed=seeds())
def test_a_step_with_offload_is_the_step_without(data: st.DataObject, seed: int, folder: str) -> None:
    """Bitwise, metrics and all of the state, whatever else is composed, and whatever is offloaded where.

    On one rank ``zero(3)`` frees units only where params are offloaded, so losses that use units several times add their
    gradients in another order then; those are left to more ranks.
    """
    stage = data.draw(st.sampled_from((None, 0, 1, 2, 3, 3)))
    case = data.draw(st.sampled_from(sorted(CASES)))
    before = PRECISIONS[data.draw(st.sampled_from(sorted(PRECISIONS)))]
    zero = () if stage is None else (T.zero(stage),)
    after = tuple(FURTHER[name] for name in data.draw(st.lists(st.sampled_from(sorted(FURTHER)), unique=True)))
    chosen = data.draw(options(stage))
    once = not chosen["params"] or case in ("mlp", "blocks", "lora", "attention")
    n = 1 if stage is None else data.draw(st.integers(1 if once else 2, 3))
    expected = comm.simulate(run, case, *before, *zero, *after, world_size=n, seed=seed)
    inner = data.draw(st.booleans())  # clip and its like may also stand before offload
    chain = (
        (*before, *after, offloaded(folder, **chosen), *zero)
        if inner
        else (*before, offloaded(folder, **chosen), *zero, *after)
    )
    assert_same(comm.simulate(run, case, *chain, world_size=n, seed=seed), expected)


@pytest.mark.parametrize(("place", "ratio"), [("cpu", 1.0), ("disk", 1.0), ("disk", 0.0)])
def test_updates_of_leaves_that_the_loss_left_out_are_counted(place: str, ratio: float, folder: str) -> None:
    """The ranks first run an update of no leaves, whose state has no counts."""
    expected = comm.simulate(run, "branching", world_size=1)
    assert_same(comm.simulate(run, "branching", offloaded(folder, optimizer=place, ratio=ratio), world_size=1), expected)


def test_clipping_of_pieces_is_by_the_norm_of_all_leaves(folder: str) -> None:
    """Which is in fp64 where any leaf is, though a piece has none of these."""
    expected = comm.simulate(run, "odd leaves", T.clip(0.1), world_size=1)
    disk = offloaded(folder, optimizer="disk", buffer_bytes=1)
    assert_same(comm.simulate(run, "odd leaves", T.clip(0.1), disk, world_size=1), expected)


@pytest.mark.law(28)
@given(
    rule=st.sampled_from(sorted(set(rules.RULES) - {"galore", "shampoo"})),
    stage=st.sampled_from((None, 0, 1, 3)),
    half=st.booleans(),
    data=st.data(),
)
def test_any_optimizer_can_be_offloaded(rule: str, stage: int | None, half: bool, data: st.DataObject, folder: str) -> None:
    """Those that see leaves, too: they get whole ones, and the state has the structure that it has without."""
    zero = () if stage is None else (T.zero(stage),)
    before = (T.mixed_precision("fp16", 4.0),) if half else ()
    n = 1 if stage is None else data.draw(st.integers(1, 3))
    chain = (*before, offloaded(folder, **data.draw(options(stage))), *zero)
    expected = comm.simulate(lambda: rules.trained(rule, *before, *zero, show=everything, steps=2), world_size=n)
    assert_same(comm.simulate(lambda: rules.trained(rule, *chain, show=everything, steps=2), world_size=n), expected)


@pytest.mark.parametrize("stage", [None, 0, 1, 3])
@pytest.mark.parametrize("rule", ["galore", "shampoo"])
def test_rules_for_whole_matrices_are_refused(rule: str, stage: int | None, folder: str) -> None:
    """Their owners' states are no lists with a place a stored tensor."""
    chain = (T.offload(optimizer="disk", path=folder), *(() if stage is None else (T.zero(stage),)))
    with pytest.raises(ValueError, match=r"offload: .* cannot be"):
        comm.simulate(lambda: rules.trained(rule, *chain), world_size=1 if stage is None else 3)


@pytest.mark.law(28)
def test_foreign_optimizers(folder: str) -> None:
    """A TorchOpt pair, whose updates are additive and not in place."""
    torchopt = pytest.importorskip("torchopt")

    def program(*strategy: fds.Transform) -> Any:
        params, loss = CASES["blocks"].make()
        step = fds.compose(*strategy)(fds.train_step(loss, torchopt.adam(0.1)))
        state = step.init(params)
        for _ in range(3):
            state, _ = step(state, CASES["blocks"].batch(8))
        return everything(step, state)

    disk = T.offload(optimizer="disk", path=folder, buffer_bytes=1)
    assert_same(program(disk, T.zero(1)), program(T.zero(1)))


def example(folder: str, *, params: str | None = None, numel: int = 300, **further: Any) -> tuple[fds.Step, fds.State]:
    chain = (T.offload("disk", params, path=folder, buffer_bytes=1, **further), *([T.zero(3)] if params else []))
    step = fds.compose(*chain)(fds.train_step(lambda p, x: ((p["w"] * x).sum() - 1) ** 2, fds.adamw(0.1)))
    return step, step.init({"w": torch.linspace(-1, 1, numel)})


@pytest.mark.law(28)
@given(numel=st.integers(1, 400), low=st.integers(0, 400), high=st.integers(0, 400))
def test_handles_are_read_and_written_piece_by_piece(numel: int, low: int, high: int, folder: str) -> None:
    """restored ∘ fetched = id; read(a, b) = fetched[a:b]; written gives another value and leaves the first."""
    step, state = example(folder, params="disk", numel=numel)
    state, _ = step(state, torch.tensor(0.5))
    handle = state.optimizer.exp_avg[0]
    assert isinstance(handle, OnDisk)
    assert isinstance(state.params[0], OnDisk)
    whole = fetched(handle)
    torch.testing.assert_close(handle.read(low, high), whole[low : max(low, high)], rtol=0, atol=0)
    again = restored(fetched(state), state)
    assert_same(fetched(again), fetched(state))
    other = handle.written([whole[:low] + 1, whole[low:] + 1])
    assert_same(other.read(), whole + 1)
    assert_same(handle.read(), whole)
    assert_same(everything(step, step(again, torch.tensor(0.5))[0]), everything(step, step(state, torch.tensor(0.5))[0]))


def test_restoring_refuses_what_does_not_fit(folder: str) -> None:
    _, state = example(folder)
    for numel in (299, 301, 700):
        with pytest.raises(ValueError, match=rf"pieces: they have {numel} elements, and OnDisk.* has 300"):
            state.optimizer.exp_avg[0].written([torch.ones(numel)])
    with pytest.raises(ValueError, match="values: their structure"):
        restored({"w": torch.ones(2)}, state)
    with pytest.raises(ValueError, match=r"values: torch.float64\[300\] instead of a handle of torch.float32\[300\]"):
        restored(torch.ones(300, dtype=torch.float64), state.optimizer.exp_avg[0])


@pytest.mark.law(31)
@pytest.mark.parametrize("chosen", [("disk", None), ("disk", "disk"), ("disk", "cpu"), ("cpu", "cpu")])
def test_donation_changes_nothing_but_memory(chosen: tuple[Any, Any], folder: str) -> None:
    """A state that is kept can be stepped from again and again, with one result, which is donation's."""
    params, loss = CASES["blocks"].make()
    batch = CASES["blocks"].batch(8)
    step = fds.compose(
        T.mixed_precision("bf16"), T.offload(*chosen, path=folder if "disk" in chosen else None, buffer_bytes=1), T.zero(3)
    )(fds.train_step(loss, fds.adamw(1e-2)))
    kept = step.init(params)
    before = everything(step, kept)
    results = []
    for _ in range(3):
        after, _ = step(kept, batch, donate=False)
        results.append(everything(step, step(after, batch)[0]))
    assert_same(everything(step, kept), before)
    results.append(everything(step, step(step(kept, batch)[0], batch)[0]))
    for result in results[1:]:
        assert_same(result, results[0])
    with pytest.raises(fds.DonatedStateError):
        step(kept, batch)


@pytest.mark.law(25)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_skipped_step_leaves_every_file_as_it_is(stage: int, folder: str) -> None:
    """On all ranks, where the gradients of one overflow."""

    def program() -> None:
        params, loss = CASES["blocks"].make()
        chain = (T.ema(0.5), T.mixed_precision("fp16", 8.0), T.offload("disk", path=folder, buffer_bytes=1), T.zero(stage))
        step = fds.compose(*chain, T.clip(1.0))(fds.train_step(loss, fds.adamw(1e-2)))
        state, _ = step(step.init(params), own_rows(CASES["blocks"].batch(8), comm.world()))
        before = everything(step, state)
        x, y = own_rows(CASES["blocks"].batch(8), comm.world())
        state, metrics = step(state, (x * 1e7 if comm.world().rank == 1 else x, y))
        assert metrics["skipped"] == 1
        assert_same(everything(step, state), before)

    comm.simulate(program, world_size=2)


# -- memory -------------------------------------------------------------------------------------------------------------


class _Live(TorchDispatchMode):
    """The most bytes of tensors that were made within it and alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage().data_ptr() for x in fds.tree.leaves((args, kwargs)) if isinstance(x, Tensor)}
        found = func(*args, **(kwargs or {}))
        for leaf in fds.tree.leaves(found):
            storage = leaf.untyped_storage() if isinstance(leaf, Tensor) else None
            if storage is not None and storage.nbytes() and storage.data_ptr() not in given | self.seen:
                self.seen.add(storage.data_ptr())
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, storage.data_ptr(), storage.nbytes())
        return found

    def _gone(self, pointer: int, nbytes: int) -> None:
        self.seen.discard(pointer)
        self.now -= nbytes


def peak_of_an_update(folder: str, leaves: int, buffers: int) -> tuple[int, int]:
    params = {f"{i}": torch.ones(10_000) for i in range(leaves)}
    offload = T.offload("disk", path=folder, buffers=buffers, buffer_bytes=2**14)
    step = offload(fds.train_step(lambda p, x: sum((w * x).sum() for w in p.values()), fds.adamw(0.1)))
    state, _ = step(step.init(params), torch.tensor(1.0))
    grads = fds.Weighted([torch.ones(10_000) for _ in range(leaves)], torch.tensor(1.0))
    with _Live() as live:
        step.update(state, grads)
    return live.peak, sum(buffer.memory.untyped_storage().nbytes() for buffer in state.slots["offload"].storage.buffers)


@pytest.mark.law(28)
@given(st.integers(1, 3))
def test_memory_of_an_update_does_not_grow_with_the_model(buffers: int) -> None:
    """What an update makes beside its buffers is a few scalars a leaf; the buffers are what was asked for, and a page each."""
    with tempfile.TemporaryDirectory() as folder:
        small, held = peak_of_an_update(folder, 2, buffers)
        large, held_then = peak_of_an_update(folder, 12, buffers)
    assert held == held_then <= buffers * (2**14 + 5 * 4096)
    assert large - small < 10 * 10_000 * 4 // 50  # ten leaves more; of their states less than a fiftieth
    assert small < 2 * 10_000 * 4


@pytest.mark.parametrize("n", [1, 2])
def test_params_are_in_memory_a_few_units_at_a_time(n: int, folder: str) -> None:
    """Of twelve units no more than four are whole at once: two in use, one on its way and one read ahead."""
    side, seen = 62, []

    def loss(params: Any, x: Tensor) -> Tensor:
        for weight in params.values():
            x = torch.tanh(x @ weight)
        wholes = (leaf for leaf in gc.get_objects() if type(leaf) is Tensor and leaf.shape == (side * side,))
        seen.append(len({leaf.data_ptr() for leaf in wholes}))
        return x.square().mean()

    def program() -> None:
        step = fds.compose(T.offload("disk", "disk", path=folder), T.zero(3))(fds.train_step(loss, fds.adamw(0.1)))
        state = step.init({f"blocks.{i}.w": torch.ones(side, side) for i in range(12)})
        for _ in range(2):
            state, _ = step(state, torch.ones(2, side))

    comm.simulate(program, world_size=n)
    assert len(seen) == 2 * n
    assert 1 <= max(seen) <= 4 * n


def left_in(folder: Path) -> list[Path]:
    """What is in the folder, once threads that have read from it have had time to let go of it."""
    deadline = time.monotonic() + 20
    while (found := list(folder.iterdir())) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def test_files_go_with_the_last_state(tmp_path: Path) -> None:
    step, state = example(str(tmp_path), params="disk")
    assert [path.name.startswith("fds-offload-") for path in tmp_path.iterdir()] == [True]
    state, _ = step(state, torch.tensor(1.0))
    handle = state.optimizer.exp_avg[0]
    del state
    assert handle.read().numel() == 300
    del handle
    assert left_in(tmp_path) == []


# -- processes, devices --------------------------------------------------------------------------------------------------


def in_a_process(folder: str, case: str) -> Any:
    chain = (T.mixed_precision("bf16"), T.offload("disk", "disk", path=folder, buffer_bytes=1), T.zero(3), T.clip(1.0))
    return run(case, *chain)


@pytest.mark.law(18)
def test_processes_give_the_bits_of_the_simulator(tmp_path: Path) -> None:
    found = comm.spawn(in_a_process, str(tmp_path), "blocks", world_size=2)
    assert_same(found, comm.simulate(in_a_process, str(tmp_path), "blocks", world_size=2))
    assert left_in(tmp_path) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("chosen", [("cpu", None), ("cpu", "cpu"), ("disk", None), ("disk", "disk")])
@pytest.mark.parametrize("half", [False, True])
def test_on_a_gpu(chosen: tuple[Any, Any], half: bool, tmp_path: Path) -> None:
    """States are pinned on the host or on the disk, params come back, and the steps are the GPU's up to rounding."""

    def program(*strategy: fds.Transform) -> Any:
        params, loss = CASES["mlp"].make()
        chain = (*([T.mixed_precision("bf16")] if half else []), *strategy, T.zero(3))
        step = fds.compose(*chain)(fds.train_step(loss, fds.adamw(1e-2)))
        state = step.init(fds.tree.map(lambda x: x.cuda(), params))
        for _ in range(3):
            state, metrics = step(state, tuple(x.cuda() for x in CASES["mlp"].batch(8)))
        assert metrics["loss"].is_cuda
        return step.params(state)

    offload = T.offload(*chosen, path=str(tmp_path) if "disk" in chosen else None, buffer_bytes=256)
    for (path, found), expected in zip(fds.tree.named(program(offload)), fds.tree.leaves(program()), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=lambda text, path=path: f"{path}: {text}")


def test_params_on_the_host_are_handles() -> None:
    step = fds.compose(T.offload("cpu", "cpu"), T.zero(3))(fds.train_step(lambda p, x: (p["w"] * x).sum(), fds.sgd(0.5)))
    state = step.init({"w": torch.ones(3)})
    assert isinstance(state.params[0], OnHost)
    assert_same(fetched(state).params[0], torch.ones(3))


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_deferred_leaves_are_read(where: Any, folder: str) -> None:
    """Leaves without values yet get theirs without ZeRO, too; the plan reads none."""
    asked: list[str] = []

    def read(path: str) -> Tensor:
        asked.append(path)
        return torch.arange(300.0) + len(path)

    bare = {name: torch.empty(300, device="meta") for name in ("w", "bias")}
    step = offloaded(folder, optimizer=where, buffer_bytes=1024)(fds.train_step(lambda p, x: (p["w"] * x).sum(), fds.adam(0.1)))
    state = step.init(fds.from_source(bare, read))
    assert sorted(asked) == ["bias", "w"]
    assert_same(step.params(state), {name: torch.arange(300.0) + len(name) for name in bare})
    step(state, torch.ones(300))


# -- bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: T.offload("ram"), r"optimizer='ram' is unknown: use 'cpu', 'disk' or None"),
        (lambda p: T.offload("cpu", "nvme"), r"params='nvme' is unknown"),
        (lambda p: T.offload(), r"optimizer=None and params=None offload nothing"),
        (lambda p: T.offload("cpu", "disk", path=p), r"params='disk' needs optimizer='disk', too"),
        (lambda p: T.offload("disk"), r"path=None: 'disk' needs a folder"),
        (lambda p: T.offload("cpu", path=p), r"'disk' needs a folder, and nothing else does"),
        (lambda p: T.offload("disk", path=f"{p}/none"), r"none' is not a folder: name one that exists"),
        (lambda p: T.offload("cpu", ratio=1.5), r"ratio=1.5 must be in 0..1"),
        (lambda p: T.offload("cpu", ratio=float("nan")), r"ratio=nan must be in 0..1"),
        (lambda p: T.offload("cpu", "cpu", ratio=0.5), r"ratio=0.5 keeps a part"),
        (lambda p: T.offload("cpu", ratio="half"), r"ratio='half' must be in 0..1"),  # type: ignore[arg-type]
        (lambda p: T.offload("cpu", buffers=0), r"buffers=0 must be at least 1"),
        (lambda p: T.offload("cpu", buffers=1.5), r"buffers=1.5 must be at least 1, and whole"),  # type: ignore[arg-type]
        (lambda p: T.offload("cpu", buffer_bytes=0), r"buffer_bytes=0 must"),
        (lambda p: T.offload("cpu", threads=0), r"threads=0 must"),
    ],
)
def test_bad_input(make: Callable[[str], Any], message: str, folder: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(folder)


def test_a_folder_that_is_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # who runs tests as root may write anywhere
    with pytest.raises(ValueError, match="is not writable for this process"):
        T.offload("disk", path=tmp_path)


def base(optimizer: Any = None) -> fds.Step:
    return fds.train_step(lambda p, x: (p["w"] * x).sum(), optimizer or fds.adamw(0.1))


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        ((T.zero(1), T.offload("cpu")), "put it before zero"),
        ((T.offload("cpu"), T.offload("cpu")), "is offloaded already"),
        ((T.compressed_gradients(comm.codecs.TopK(0.5)), T.offload("cpu")), "put it before compressed_gradients"),
        ((T.offload("cpu"), T.mixed_precision("bf16")), "put it before offload"),
        ((T.offload("cpu", "cpu"), T.zero(2)), r"but with zero\(3\)"),
        ((T.offload("cpu", "cpu"),), r"but with zero\(3\)"),
        ((T.offload("cpu"), T.ema(0.5)), "put ema before"),
    ],
)
def test_refuses_compositions(chain: tuple[fds.Transform, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fds.compose(*chain)(base()).init({"w": torch.ones(3)})


def test_refuses_optimizers_that_are_no_lists() -> None:
    """One whose state is a single tensor for all leaves, and one that looks at values to begin with."""

    def init(params: list[Tensor]) -> Any:
        return torch.cat([p.reshape(-1) for p in params])

    odd = fds.Optimizer(init, lambda params, grads, state, rate: (params, state))
    with pytest.raises(ValueError, match=r"a tensor of shape \[5\] belongs to no leaf"):
        T.offload("cpu")(base(odd)).init({"w": torch.ones(3), "v": torch.ones(2)})
    curious = fds.Optimizer(lambda params: [p * p.sum().item() for p in params], odd.update)
    with pytest.raises(ValueError, match="cannot be planned from shapes alone"):
        T.offload("cpu")(base(curious)).init({"w": torch.ones(3)})


def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    """Refused before anything is allocated: these params have no memory of their own, and would need 32 TB of files."""
    step = T.offload("disk", path=tmp_path)(base())
    with pytest.raises(T.OffloadError, match=r"is too small: this rank needs 3\d{13} bytes there .* are free"):
        step.init({"w": torch.ones(1).expand(2 * 10**12)})
    assert list(tmp_path.iterdir()) == []


def test_it_says_what_it_does(tmp_path: Path) -> None:
    step = fds.compose(T.offload("disk", "cpu", path=tmp_path), T.zero(3))(base())
    assert f"offload(optimizer='disk', params='cpu', path='{tmp_path}') -> zero(3" in str(step)
    assert "offload(optimizer='cpu', ratio=0.25)" in str(T.offload("cpu", ratio=0.25)(base()))


@pytest.mark.law(28)
@pytest.mark.parametrize(("n", "live"), [(2, 2), (3, 1)])
@pytest.mark.parametrize("optimizer", ["cpu", "disk"])
def test_params_on_the_host_of_owned_units(n: int, live: int, optimizer: Any, folder: str) -> None:
    """Ranks that do not own a unit make room for it on the device, wherever the owner's params lie."""
    apply, params = fds.functional(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))

    def program(*before: fds.Transform) -> dict[str, Tensor]:
        zero = T.zero(3, aggregate="owner", max_live_units=live)
        step = fds.compose(*before, zero)(fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.adamw(0.1)))
        state = step.init(params)
        for i in range(2):
            state, _ = step(state, torch.randn(4, 4, generator=torch.Generator().manual_seed(i)))
        return dict(fds.tree.named(step.params(state)))

    offload = T.offload(optimizer, "cpu", **({"path": folder} if optimizer == "disk" else {}))
    for found, expected in zip(
        comm.simulate(program, offload, world_size=n), comm.simulate(program, world_size=n), strict=True
    ):
        assert_same(found, expected)
