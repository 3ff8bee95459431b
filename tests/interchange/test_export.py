"""``fds.export``: what is written, what is sent, what is left when something goes wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm
from functional_ds import pipelining as pp
from functional_ds import transforms as T
from functional_ds.base import tree
from functional_ds.interchange.format import CODES, SafetensorsFile, TensorSpec, split_files
from functional_ds.interchange.safetensors_writer import SafetensorsWriter
from functional_ds.testing import assert_same, seeds, shapes
from tests.transforms.models import CASES, Tied, own_rows
from tests.transforms.staged import Staged

PRECISIONS: dict[str, tuple[fds.Transform, ...]] = {
    "fp32": (),
    "bf16": (T.mixed_precision("bf16"),),
    "bf16 without masters": (T.mixed_precision("params=bf16,compute=bf16"),),
}


def trained(case: str, stage: int, precision: str, folder: Path) -> dict[str, Tensor]:
    """Some steps, an export of the state, and what ``step.params`` says of it."""
    params, loss = CASES[case].make()
    step = fds.compose(*PRECISIONS[precision], T.zero(stage))(fds.train_step(loss, fds.adamw(1e-2)))
    state = step.init(params)
    state, _ = step(state, own_rows(CASES[case].batch(8), comm.world()))
    fds.export(state, folder)
    return dict(fds.tree.named(step.params(state)))


@pytest.mark.law(37)
@given(
    case=st.sampled_from(["mlp", "tied", "lora", "recurrent", "odd leaves"]),
    stage=st.sampled_from([0, 1, 2, 3]),
    precision=st.sampled_from(sorted(PRECISIONS)),
    size=st.integers(1, 4),
)
def test_export_is_params(tmp_path_factory: pytest.TempPathFactory, case: str, stage: int, precision: str, size: int) -> None:
    """read ∘ export = step.params, bitwise, for every stage, precision and number of ranks."""
    folder = tmp_path_factory.mktemp("export")
    expected, *_ = comm.simulate(trained, case, stage, precision, folder, world_size=size)
    assert_same(load_file(folder / "model.safetensors"), expected)
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]


def begun(stage: int, folder: Path) -> None:
    params, loss = CASES["lora"].make()
    step = T.zero(stage)(fds.train_step(loss, fds.adamw(1e-2)))
    fds.export(step.init(params), folder / f"{stage}-{comm.world().size}.safetensors")


@pytest.mark.law(37)
def test_the_file_does_not_depend_on_ranks_and_stages(tmp_path: Path) -> None:
    """export_N = export_M, to the byte."""
    for stage, size in [(0, 1), (1, 2), (2, 3), (3, 3), (3, 4)]:
        comm.simulate(begun, stage, tmp_path, world_size=size)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


def replicated(folder: Path) -> None:
    mesh = comm.mesh(dp=2, other=2)
    params, loss = CASES["blocks"].make()
    state = T.zero(3, mesh["dp"])(fds.train_step(loss, fds.adamw(1e-2))).init(params)
    with comm.ledger() as book:
        fds.export(state, folder)
    sent = sum(row.elements for row in book.rows if row.collective == "send")
    lacking = sum(x.numel() for x in params.values()) - sum(x.numel() for x in state.params)
    if comm.world().rank == 0:
        assert sent == 0
    assert sent <= sum(x.numel() for x in params.values()), lacking


def test_ranks_that_have_the_same_shards_send_them_once(tmp_path: Path) -> None:
    comm.simulate(replicated, tmp_path, world_size=4)
    params, _ = CASES["blocks"].make()
    assert_same(load_file(tmp_path / "model.safetensors"), {name: x.detach() for name, x in params.items()})


def averaging(folder: Path) -> tuple[Any, Any]:
    params, loss = CASES["blocks"].make()
    step = fds.compose(T.ema(0.5), T.mixed_precision("bf16"), T.zero(2))(fds.train_step(loss, fds.adamw(1e-2)))
    state = step.init(params)
    state, _ = step(state, own_rows(CASES["blocks"].batch(8), comm.world()))
    fds.export(state, folder / "mean.safetensors", averaged=True)
    return dict(T.averaged(step, state)), dict(step.params(state))


def test_a_mean_is_exported_where_it_is_asked_for(tmp_path: Path) -> None:
    (mean, params), _ = comm.simulate(averaging, tmp_path, world_size=2)
    found = load_file(tmp_path / "mean.safetensors")
    assert_same(found, mean)
    assert any(not torch.equal(found[name], params[name]) for name in params)
    with pytest.raises(ValueError, match="keeps no mean"):
        fds.export({"w": torch.ones(1)}, tmp_path / "x.safetensors", averaged=True)


def piped(folder: Path, dp: int) -> Any:
    mesh = comm.mesh(dp=dp, pp=2)
    case = Staged.of(4, 8)
    strategy = T.zero(3, mesh["dp"]), T.pipeline(pp.interleaved_one_f_one_b(2, 4, v=2), case.stages, mesh["pp"])
    step = fds.compose(T.mixed_precision("bf16"), *strategy)(fds.train_step(case.stages, fds.adamw(0.01)))
    state = step.init(case.params)
    state, _ = step(state, case.batch)
    fds.export(state, folder, overwrite=True)
    return dict(fds.tree.named(step.params(state)))


@pytest.mark.law(37)
@pytest.mark.parametrize("dp", [1, 2])
def test_a_pipelines_stages_come_together(tmp_path: Path, dp: int) -> None:
    """read ∘ export = step.params, for pipeline × ZeRO 3."""
    expected, *_ = comm.simulate(piped, tmp_path, dp, world_size=2 * dp)
    assert_same(load_file(tmp_path / "model.safetensors"), expected)


def alone(folder: Path) -> None:
    """Ranks that are told to be of one group and are not."""
    step = fds.train_step(lambda p, x: p["w"].sum(), fds.sgd(0.1))
    fds.export(step.init({"w": torch.ones(4) * comm.world().rank}), folder)


def test_ranks_whose_values_differ_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has other values of 'w'"):
        comm.simulate(alone, tmp_path / "out", world_size=2)
    assert not (tmp_path / "out").exists()


# -- the format ----------------------------------------------------------------------------------------------------------


@pytest.mark.law(37)
@given(
    kinds=st.lists(st.tuples(shapes(), st.sampled_from(sorted(CODES, key=str))), max_size=5),
    limit=st.none() | st.integers(1, 60),
    seed=seeds(),
)
def test_the_library_reads_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[Any], limit: int | None, seed: int
) -> None:
    """library ∘ write = id, bitwise, for every dtype; values may come in any order and in any pieces."""
    folder = tmp_path_factory.mktemp("format")
    torch.manual_seed(seed)
    values = {
        f"leaf.{i}": torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).reshape(shape)
        for i, (shape, dtype) in enumerate(kinds)
    }
    files = split_files(
        [TensorSpec(name, tuple(x.shape), x.dtype) for name, x in values.items()],
        limit=limit,
        metadata={"format": "pt", "a": "é"},
    )
    with SafetensorsWriter(folder, files, False) as writer:
        for name, x in reversed(values.items()):
            flat = x.reshape(-1)
            for start in range(0, flat.numel(), 2):
                writer.write(name, flat[start : start + 2], offset=start)
        writer.commit()
    found: dict[str, Tensor] = {}
    for file in files:
        assert (folder / file.name).stat().st_size == file.nbytes
        with safe_open(folder / file.name, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt", "a": "é"}
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    assert_same(found, values)
    if limit is not None and len(files) > 1:
        for file in files:
            assert len(file.entries) == 1 or sum(entry.spec.nbytes for entry in file.entries) <= limit


def test_tensors_start_at_multiples_of_their_element_size() -> None:
    specs = [
        TensorSpec(str(i), (3,), dtype) for i, dtype in enumerate([torch.int8, torch.bfloat16, torch.float64, torch.float32])
    ]
    for entry in SafetensorsFile.of("x", specs, {}).entries:
        assert entry.start % entry.spec.dtype.itemsize == 0


# -- names, dtypes, buffers ----------------------------------------------------------------------------------------------


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tied = Tied()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("scratch", torch.ones(2), persistent=False)


def test_a_module_loads_its_export(tmp_path: Path) -> None:
    module = Buffered().to(torch.bfloat16)
    apply, params = fds.functional(module)
    wide = {name: p.float() for name, p in params.items()}
    fds.export(wide, tmp_path / "all.safetensors", module=apply, tied="all")
    fds.export(wide, tmp_path / "first.safetensors", module=module)
    assert load_file(tmp_path / "all.safetensors").keys() == module.state_dict().keys()
    assert load_file(tmp_path / "first.safetensors").keys() == module.state_dict().keys() - {"tied.head.weight"}
    fresh = Buffered().to(torch.bfloat16)
    fresh.load_state_dict(load_file(tmp_path / "all.safetensors"))
    assert_same(fresh.state_dict(), module.state_dict())
    fresh = Buffered().to(torch.bfloat16)
    load_model(fresh, tmp_path / "first.safetensors")
    assert_same(fresh.state_dict(), module.state_dict())


def test_buffers_are_as_the_calls_have_left_them(tmp_path: Path) -> None:
    apply, params = fds.functional(nn.BatchNorm1d(3))
    step = fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.1))
    state, _ = step(step.init(params), torch.randn(5, 3))
    fds.export(state, tmp_path, module=apply, buffers={"further": torch.arange(3)})
    found = load_file(tmp_path / "model.safetensors")
    assert found["num_batches_tracked"] == 1
    assert torch.equal(found["running_mean"], step.module_buffers(state)["running_mean"])
    assert found["further"].tolist() == [0, 1, 2]


def test_names_and_dtypes_can_be_chosen(tmp_path: Path) -> None:
    params = {"student": {"w": torch.tensor([1.0, 1 / 3])}, "teacher": {"w": torch.ones(1)}, "count": torch.tensor(3)}
    fds.export(
        params,
        tmp_path,
        rename=lambda path: None if path.startswith("teacher") else path.removeprefix("student."),
        dtype=torch.bfloat16,
        metadata={"made by": "a test"},
    )
    found = load_file(tmp_path / "model.safetensors")
    assert_same(found, {"w": params["student"]["w"].bfloat16(), "count": torch.tensor(3)})  # type: ignore[index]
    with safe_open(tmp_path / "model.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt", "made by": "a test"}


def hugging_face(folder: Path, config: Any) -> Tensor:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    apply, params = fds.functional(AutoModelForCausalLM.from_config(config))

    def loss(p: Any, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(apply(p, tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    step = T.zero(3)(fds.train_step(loss, fds.adamw(1e-2)))
    state, tokens = step.init(params), torch.arange(12).view(2, 6) + comm.world().rank
    for _ in range(2):
        state, _ = step(state, tokens)
    fds.export(state, folder, module=apply, shard_bytes=10_000)
    whole = step.params(state)
    with torch.no_grad():
        return apply(whole, torch.arange(12).view(2, 6)).logits


def test_transformers_loads_an_export(tmp_path: Path) -> None:
    """A tied Llama, trained on two ranks under ZeRO 3; ``from_pretrained`` of the sharded form gives the same logits."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    expected, _ = comm.simulate(hugging_face, tmp_path, config, world_size=2)
    config.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert "lm_head.weight" not in index["weight_map"]
    module, told = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert torch.equal(module(torch.arange(12).view(2, 6)).logits, expected)


# -- what is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "options", "message"),
    [
        ({"w": torch.ones(1, dtype=torch.complex128)}, {}, "'w' is torch.complex128"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, {}, "two leaves have the path 'a.b'"),
        (torch.ones(1), {}, "is to be called nothing"),
        ({"w": torch.ones(1)}, {"dtype": torch.int32}, "dtype=torch.int32: floating"),
        ({"w": torch.ones(1)}, {"tied": "some"}, "tied='some'"),
        ({"w": torch.ones(1)}, {"shard_bytes": 0}, "shard_bytes=0"),
        ({"w": torch.ones(1)}, {"buffers": {"w": torch.ones(1)}}, "'w', which is taken"),
        ({"w": torch.ones(1, device="meta")}, {}, "'w' has no values yet"),
        ({"weight": torch.ones(1), "wait": torch.ones(1)}, {"module": nn.Linear(1, 1)}, r"missing: 'bias'; extra: 'wait'"),
    ],
)
def test_bad_arguments_are_named(tmp_path: Path, params: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fds.export(params, tmp_path / "folder", **options)
    assert not (tmp_path / "folder").exists()


def test_a_single_file_is_not_sharded_and_leaves_are_tensors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a single file; name a folder"):
        fds.export({"w": torch.ones(1)}, tmp_path / "x.safetensors", shard_bytes=4)
    with pytest.raises(TypeError, match="the leaf at 'w' is int 1"):
        fds.export({"w": 1}, tmp_path)
    with pytest.raises(TypeError, match=r"neither an nn.Module nor"):
        fds.export({"w": torch.ones(1)}, tmp_path, module="gpt2")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="it must map strings to strings"):
        fds.export({"w": torch.ones(1)}, tmp_path, metadata={"epoch": 1})  # type: ignore[dict-item]


def test_a_name_that_is_no_text_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'w\\ud800' has half of a surrogate pair, .*; rename= gives another name"):
        fds.export({"w\ud800": torch.ones(1)}, tmp_path)
    assert not list(tmp_path.iterdir())


def test_nothing_is_replaced_unless_asked(tmp_path: Path) -> None:
    old, new = {f"{i}": torch.zeros(4) for i in range(4)}, {f"{i}": torch.ones(4) for i in range(4)}
    fds.export(old, tmp_path, shard_bytes=16)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(before) == 5
    for options in ({"shard_bytes": 16}, {"shard_bytes": 32}, {}):
        with pytest.raises(FileExistsError, match="pass overwrite=True"):
            fds.export(new, tmp_path, **options)  # type: ignore[arg-type]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    fds.export(new, tmp_path, shard_bytes=32, overwrite=True)  # other shards, and the old ones are gone
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    fds.export(old, tmp_path, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert_same(load_file(tmp_path / "model.safetensors"), old)


# -- what goes wrong -----------------------------------------------------------------------------------------------------


def failing(folder: Path, after: int, error: Exception) -> str:
    params, loss = CASES["blocks"].make()
    state = T.zero(3)(fds.train_step(loss, fds.adamw(1e-2))).init(params)
    calls = 0

    def write(self: SafetensorsWriter, name: str, values: Tensor, *, offset: int = 0) -> None:
        nonlocal calls
        calls += 1
        if calls > after:
            raise error

    with pytest.MonkeyPatch.context() as patch:
        if comm.world().rank == 0:
            patch.setattr(SafetensorsWriter, "write", write)
        with pytest.raises(type(error), match="No space left") as caught:
            fds.export(state, folder, overwrite=True)
    return str(caught.value)


@pytest.mark.parametrize(
    ("after", "error"),
    [
        (0, OSError(28, "No space left on device")),
        (3, OSError(28, "No space left on device")),
        (3, RuntimeError("No space left")),
    ],
)
def test_a_write_that_fails_is_raised_on_every_rank_and_leaves_nothing(tmp_path: Path, after: int, error: Exception) -> None:
    fds.export({"w": torch.ones(1)}, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    assert len(set(comm.simulate(failing, tmp_path, after, error, world_size=3))) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == before


KILLED = """
import os, signal, sys, torch
import functional_ds as fds
from functional_ds.interchange.safetensors_writer import SafetensorsWriter

whole = SafetensorsWriter.write

def write(self, name, values, *, offset=0):
    if name == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)
    whole(self, name, values, offset=offset)

SafetensorsWriter.write = write
fds.export({f"{i}": torch.ones(64) for i in range(8)}, sys.argv[1], shard_bytes=1024, overwrite=True)
"""


def test_a_killed_export_leaves_no_model(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path, "5"], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == -signal.SIGKILL
    left = [path.name for path in tmp_path.iterdir()]
    assert left
    assert all(name.startswith(".") and name.endswith(".tmp") for name in left)


# -- two programs ---------------------------------------------------------------------------------------------------------


def racing(folder: Path, rounds: int) -> list[str]:
    """Ranks 0 and 1 are two programs that export to one folder, and rank 2 reads it meanwhile."""
    rank, names = comm.world().rank, [f"{i}" for i in range(4)]
    publish, seen = SafetensorsWriter._publish, []

    def slowly(self: SafetensorsWriter, temporary: Path, name: str) -> None:
        time.sleep(0.003)
        publish(self, temporary, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SafetensorsWriter, "_publish", slowly)
        for count in range(rounds):
            place, overwrite = folder / str(count // 2), count % 2 == 1
            place.mkdir(exist_ok=True)
            comm.barrier()
            if rank < 2:
                params = {name: torch.full((4,), float(2 * count + rank)) for name in names}
                try:
                    fds.export(params, place, shard_bytes=16 * (1 + rank * (count // 2 % 2)), overwrite=overwrite)
                    seen.append(f"{count} written")
                except FileExistsError:
                    seen.append(f"{count} there")
            else:
                end = time.monotonic() + 0.05
                while time.monotonic() < end:
                    _model(place)
            comm.barrier()
            if rank == 2:
                assert _model(place) is not None
                files = {path.name for path in place.iterdir()} - {"model.safetensors.index.json"}
                index = json.loads((place / "model.safetensors.index.json").read_text())
                assert files == set(index["weight_map"].values())
    return seen


def _model(folder: Path) -> float | None:
    """The one value that all the model's leaves have; None if there is no whole model."""
    try:
        params = fds.load_params(folder, like={f"{i}": torch.zeros(4) for i in range(4)})
    except FileNotFoundError:
        return None
    except ValueError as error:
        if "was replaced" not in str(error):
            raise
        return None
    state = fds.train_step(lambda params, x: x, fds.sgd(0.1)).init(params)
    (value,) = {value for leaf in tree.leaves(state.params) for value in leaf.tolist()}
    return float(value)


def test_of_two_programs_one_exports_the_model(tmp_path: Path) -> None:
    first, second, _ = comm.spawn(racing, tmp_path, 8, world_size=3, backend="gloo")
    for count in range(8):
        found = sorted(seen[count].partition(" ")[2] for seen in (first, second))
        assert found == (["written", "written"] if count % 2 else ["there", "written"])


@pytest.mark.parametrize("when", ["before it is opened", "while its files are opened"])
def test_an_index_that_an_export_removes_meanwhile(when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No word of damage: the model is being replaced."""
    fds.export({"w": torch.ones(4), "v": torch.ones(4)}, tmp_path, shard_bytes=16)
    index = tmp_path / "model.safetensors.index.json"
    module = sys.modules["functional_ds.interchange.load_params"]
    name = "open_regular" if when == "before it is opened" else "_file"
    opens = getattr(module, name)

    def late(path: Path) -> Any:
        index.unlink(missing_ok=True)
        if name == "_file":
            path.unlink(missing_ok=True)
        return opens(path)

    monkeypatch.setattr(module, name, late)
    error, text = (FileNotFoundError, "any more") if name == "open_regular" else (ValueError, "was replaced")
    with pytest.raises(error, match=text):
        fds.load_params(tmp_path, like={"w": torch.zeros(4), "v": torch.zeros(4)})


# -- on processes --------------------------------------------------------------------------------------------------------

LEAF, LEAVES = 1024, 12  # 4 MiB each


def resident(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def on_processes(folder: Path) -> tuple[int, list[str]]:
    """By how many bytes this process grew at most while it exported; then what is left of an export onto a full disk."""
    import resource

    params = {f"blocks.{i}.w": torch.full((LEAF, LEAF), float(i)) for i in range(LEAVES)}
    step = T.zero(3)(fds.train_step(lambda p, x: p["blocks.0.w"].sum(), fds.sgd(0.1)))
    state = step.init(params)
    del params
    fds.export(step.init({"blocks.0.w": torch.ones(9, 9)}), folder / "warm.safetensors")  # so that code is there already
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    fds.export(state, folder / "out.safetensors")
    grown = resident("VmHWM") - before
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # as a full disk: files can grow no further
    with pytest.raises(OSError, match=r"File too large|No space"):
        fds.export(state, folder / "full")
    comm.barrier()
    return grown, [path.name for path in folder.iterdir()]


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's account of a process's memory")
def test_on_processes_no_rank_holds_more_than_two_of_the_largest_leaf(tmp_path: Path) -> None:
    """What ranks take at most while they export, beside the params, as the kernel counts it; and nothing stays of a failure."""
    found = comm.spawn(on_processes, tmp_path, world_size=2)
    for grown, left in found:
        assert grown <= 2 * LEAF * LEAF * 4 + 2**20, [g / 2**20 for g, _ in found]  # a MiB for the interpreter's own
        assert sorted(left) == ["out.safetensors", "warm.safetensors"]
    values = load_file(tmp_path / "out.safetensors")
    assert all((values[f"blocks.{i}.w"] == i).all() for i in range(LEAVES))
