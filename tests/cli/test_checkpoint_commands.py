"""``inspect`` and ``convert``: every kind that is read, every kind that is written, and what cannot be read."""

import os
import pickle
import warnings
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.cli.entry import main
from functional_ds.cli.stored.kinds import open_checkpoint
from functional_ds.cli.stored.writing import written_as
from tests.cli.running import answer, refusal, run
from tests.interchange.full_disk import full_disk
from tests.interchange.zero_layout import Layout, values_of

pytest.importorskip("safetensors")

SHAPES = {"a.w": (6, 4), "b": (5,)}
KEYS = {
    *("path", "kind", "tag", "tags", "step", "ranks", "stage", "extra", "elements", "bytes", "groups", "params", "tensors"),
    *("left_out", "verified", "damage"),
}


def params() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def save_of_two_ranks(folder: Path) -> dict[str, Tensor]:
    """Writes a checkpoint of bf16 params with fp32 masters in shards, and gives the masters."""

    def program() -> None:
        loss = lambda p, x: (x @ p["a.w"]).square().mean() + p["b"].square().sum()  # noqa: E731
        step = fds.compose(T.mixed_precision("bf16"), T.zero(3))(fds.train_step(loss, fds.adamw(1e-2)))
        state = step.init(params())
        for tag in ("one", "two"):
            state, _ = step(state, torch.ones(2, 6))
            fds.save(state, folder / "run", tag=tag, extra={"rows": 4})
        fds.export(state, folder / "export.safetensors", dtype=torch.float32)

    comm.simulate(program, world_size=2)
    return open_checkpoint(str(folder / "export.safetensors")).read(list(SHAPES))


def masters_are_converted(folder: Path) -> None:
    masters = save_of_two_ranks(folder)
    found = open_checkpoint(str(folder / "run"))
    for name, x in found.read(list(found.params.values())).items():
        assert torch.equal(x, masters[name.partition("/")[2]])


@pytest.fixture
def run_of_two_ranks(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    masters = save_of_two_ranks(tmp_path)
    return tmp_path / "run", masters


def test_what_a_checkpoint_holds(run_of_two_ranks: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = run_of_two_ranks
    found = answer(capsys, "inspect", path, "--verify")
    assert found.keys() == KEYS
    assert (found["kind"], found["tag"], found["tags"], found["step"], found["ranks"]) == (
        "functional-ds",
        "two",
        ["one", "two"],
        2,
        2,
    )
    assert found["groups"]["masters"] == {"tensors": 2, "elements": 29, "bytes": 116}
    assert found["verified"] is True
    assert answer(capsys, "inspect", path, "--tag", "one")["step"] == 1
    assert answer(capsys, "inspect", path / "one")["tag"] == "one"
    out = run(capsys, "inspect", path, "--tensors", "--verify")[1]
    assert all(word in out for word in ("optimizer.exp_avg/a.w", "[6, 4]", "every byte is as it was written"))


def test_damage_is_found(run_of_two_ranks: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = run_of_two_ranks
    file = path / "two" / "00000.bin"
    data = bytearray(file.read_bytes())
    data[3] ^= 1
    file.write_bytes(data)
    found = answer(capsys, "inspect", path, "--verify", code=1)
    assert found["verified"] is False
    assert "00000.bin" in found["damage"]
    assert "cannot be read" in refusal(capsys, "convert", path, path.parent / "x.safetensors")
    (path / "two" / "manifest.json").write_text("{}")
    assert "manifest.json" in refusal(capsys, "inspect", path / "two")


@pytest.mark.parametrize("command", [["inspect"], ["convert"]])
def test_a_tag_of_what_has_none(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    words = [*command, tmp_path / "w.pt", *([tmp_path / "x.pt"] if command == ["convert"] else [])]
    assert "is one checkpoint and has no tags" in refusal(capsys, *words, "--tag", "1")


@pytest.mark.parametrize("kind", ["safetensors", "functional-ds", "dcp", "torch"])
def test_any_kind_to_any_kind(run_of_two_ranks: Any, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: the values are the masters', whatever lies between, bit for bit."""
    path, masters = run_of_two_ranks
    first = tmp_path / ("first.pt" if kind == "torch" else "first")
    found = answer(capsys, "convert", path, first, "--to", kind)
    assert found.keys() == {"source", "from", "target", "to", "tensors", "elements", "bytes", "left_out"}
    assert (found["from"], found["to"]) == ("functional-ds", kind)
    if kind == "functional-ds":
        assert found["left_out"] == []
    else:
        assert (found["tensors"], found["elements"]) == (2, 29)
        assert "optimizer.exp_avg/b" in found["left_out"]
        assert "params/b" not in found["left_out"]  # its master was written
    assert answer(capsys, "inspect", first)["kind"] == kind
    answer(capsys, "convert", first, tmp_path / "last.safetensors")
    last = open_checkpoint(str(tmp_path / "last.safetensors"))
    for name, x in last.read(list(SHAPES)).items():
        assert x.dtype == torch.float32
        assert torch.equal(x, masters[name])


def test_a_conversion_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file may be the one that is converted."""
    path = tmp_path / "model.pt"
    torch.save(params(), path)
    before = path.read_bytes()
    monkeypatch.setattr(torch, "save", full_disk)
    assert "No space left" in refusal(capsys, "convert", path, path, "--overwrite", "--dtype", "bf16")
    assert path.read_bytes() == before


def test_a_converted_checkpoint_starts_a_step(tmp_path: Path) -> None:
    written_as("functional-ds", {f"params/{name}": x for name, x in params().items()}, tmp_path / "run")
    step = fds.compose(T.mixed_precision("bf16"), T.zero(2))(fds.train_step(lambda p, x: p["b"].sum(), fds.adamw(1e-2)))
    state = fds.load(
        tmp_path / "run", like=step.init({name: torch.zeros(shape) for name, shape in SHAPES.items()}), only="params"
    )
    for name, x in step.params(state).items():
        assert torch.equal(x, params()[name])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeeds_checkpoints(stage: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = values_of(SHAPES)
    mean = torch.tensor([0.5, 2.0])
    path = Layout(stage, 2, [["a.w", "b"]], values, buffers={"norm.mean": mean}).write(tmp_path / "ds")
    found = answer(capsys, "inspect", path)
    assert (found["kind"], found["stage"], found["ranks"], found["step"]) == ("deepspeed", stage, 2, 3)
    assert found["groups"].keys() == {"masters", "optimizer.exp_avg", "optimizer.exp_avg_sq", "optimizer.steps", "others"}
    answer(capsys, "convert", path / "global_step3", tmp_path / "m.safetensors")
    read = open_checkpoint(str(tmp_path / "m.safetensors")).read([*SHAPES, "norm.mean"])
    assert torch.equal(read.pop("norm.mean"), mean)
    for name, x in read.items():
        assert torch.equal(x, values[name]["master"])


def fresh(*strategy: Any) -> tuple[fds.Step, fds.State]:
    """A step with AdamW, and a state of zeros."""
    step = fds.compose(*strategy)(fds.train_step(lambda p, x: p["a.w"].sum() + p["b"].sum(), fds.adamw(1e-2)))
    return step, step.init({name: torch.zeros(shape) for name, shape in SHAPES.items()})


@pytest.mark.parametrize("between", [None, "dcp"])
def test_a_whole_state_is_converted(run_of_two_ranks: Any, between: str | None, tmp_path: Path) -> None:
    """Law: load ∘ convert = load, on another mesh, optimizer, counts, key, settings and extra included."""
    path, _ = run_of_two_ranks
    found = open_checkpoint(str(path))
    source = path
    if between:
        assert main(["convert", str(path), str(tmp_path / "between"), "--to", between, "--all"]) == 0
        source = tmp_path / "between"
    assert main(["convert", str(source), str(tmp_path / "ours"), "--to", "functional-ds"]) == 0
    _, like = fresh(T.ema(0.9), T.mixed_precision("bf16"))
    one = fds.load(path, like=like, allow_missing="averages")
    two = fds.load(tmp_path / "ours", like=like, allow_missing="averages")
    for a, b in zip(fds.tree.leaves(one), fds.tree.leaves(two), strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))
    assert two.step == 2 == open_checkpoint(str(tmp_path / "ours")).notes["step"]
    if not between:
        assert open_checkpoint(str(tmp_path / "ours")).notes["extra"] == found.notes["extra"] == {"rows": 4}


def averages_are_converted(folder: Path) -> None:
    step, like = fresh(T.ema(0.5))
    state, _ = step(like, torch.ones(1))
    fds.save(state, folder / "run")
    assert main(["convert", str(folder / "run"), str(folder / "ours"), "--to", "functional-ds"]) == 0
    loaded = fds.load(folder / "ours", like=fresh(T.ema(0.5))[1])
    for a, b in zip(fds.tree.leaves(state), fds.tree.leaves(loaded), strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


def test_averages_are_converted(tmp_path: Path) -> None:
    averages_are_converted(tmp_path)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_deepspeed_run_goes_on_here(stage: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Law: the state is that of ``fds.from_deepspeed``; what a state has no place for is named."""
    buffers = {"mean": torch.tensor([0.5, 2.0]), "count": torch.tensor(7)}
    path = Layout(stage, 2, [["a.w"], ["b"]], values_of(SHAPES), buffers=buffers).write(tmp_path / "ds")
    found = answer(capsys, "convert", path, tmp_path / "ours", "--to", "functional-ds")
    assert {"lr_scheduler", "client_state"} <= set(found["left_out"])
    step, _ = fresh(T.zero(1))
    module = torch.nn.Module()
    for name, value in buffers.items():
        module.register_buffer(name, torch.zeros_like(value))
    like = step.init({name: torch.zeros(shape) for name, shape in SHAPES.items()}, modules=fds.functional(module)[0])
    one = fds.interchange.from_deepspeed(path, like=like)
    two = fds.load(tmp_path / "ours", like=like, allow_missing="key*")
    assert {name: x.tolist() for name, x in step.module_buffers(two).items()} == {"mean": [0.5, 2.0], "count": 7}
    assert two.step == 3
    for a, b in zip(fds.tree.leaves(one), fds.tree.leaves(two), strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


def test_a_dcp_of_torchs_optimizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What ``torch.distributed.checkpoint.state_dict`` names goes to its params, and numbered tensors nowhere."""
    from torch.distributed.checkpoint import save as dcp_save
    from torch.distributed.checkpoint.state_dict import get_state_dict

    module = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(module.parameters())
    for _ in range(2):
        module(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    model, optim = get_state_dict(module, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_save(
            {"model": model, "optim": optim, "epoch": 3, "old": {"state": {0: {"exp_avg": torch.ones(2)}}}},
            checkpoint_id=tmp_path / "a",
        )
    found = answer(capsys, "convert", tmp_path / "a", tmp_path / "ours", "--to", "functional-ds")
    assert {"epoch", "old.state.0.exp_avg"} <= set(found["left_out"])
    step = fds.train_step(lambda p, x: p["weight"].sum(), fds.adamw(1e-2))
    like = step.init({"weight": torch.zeros(3, 4), "bias": torch.zeros(3)})
    state = fds.load(tmp_path / "ours", like=like, allow_missing="key*")
    assert state.step == 2
    assert torch.equal(step.params(state)["weight"], module.weight)
    moments = dict(zip(("weight", "bias"), zip(state.optimizer.exp_avg, state.optimizer.exp_avg_sq, strict=True), strict=True))
    for name, param in module.named_parameters():
        mean, square = optimizer.state[param]["exp_avg"], optimizer.state[param]["exp_avg_sq"]
        assert any(torch.equal(mean, m) and torch.equal(square, s) for m, s in moments.values()), name


def test_options(run_of_two_ranks: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, masters = run_of_two_ranks
    answer(capsys, "convert", path, tmp_path / "x.pt", "--only", "a.*", "--dtype", "bf16")
    found = open_checkpoint(str(tmp_path / "x.pt")).read(["a.w"])["a.w"]
    assert torch.equal(found, masters["a.w"].bfloat16())
    assert answer(capsys, "convert", path, tmp_path / "all", "--to", "dcp", "--all")["left_out"] == []
    assert "optimizer.exp_avg/b" in open_checkpoint(str(tmp_path / "all")).tensors
    assert answer(capsys, "convert", path, tmp_path / "hf", "--to", "safetensors", "--shard-bytes", "100B")["tensors"] == 2
    assert (tmp_path / "hf" / "model.safetensors.index.json").is_file()
    assert answer(capsys, "inspect", tmp_path / "hf")["elements"] == 29
    for words, says in [
        ((tmp_path / "x.pt",), "pass --overwrite to replace it"),
        ((tmp_path / "y",), "suffix"),
        ((tmp_path / "y", "--to", "onnx"), "'onnx' is not one of"),
        ((tmp_path / "y.pt", "--only", "c.*"), "no name of"),
        ((tmp_path / "y.pt", "--dtype", "int8"), "'int8' is not one of"),
        ((tmp_path / "y.pt", "--shard-bytes", "1kB"), "folder of safetensors files"),
        ((tmp_path / "y.pt", "--tag", "three"), "no checkpoint 'three'"),
    ]:
        assert says in refusal(capsys, "convert", path, *words)
    assert not (tmp_path / "y").exists()


class Harmful:
    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.mark,)


class Reaching:
    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (Path, "cwd")


def test_an_enum_by_name_in_a_dcp(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Python before 3.11.4 pickles it as a call of ``getattr``."""
    by_name = partialmethod(lambda member, protocol: (getattr, (type(member), member.name)))
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path)
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    assert answer(capsys, "inspect", tmp_path)["elements"] == 3


def test_no_file_runs_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    harmful = Harmful(tmp_path / "ran")
    torch.save({"w": harmful}, tmp_path / "x.pt")
    assert "could run code" in refusal(capsys, "inspect", tmp_path / "x.pt")
    (tmp_path / "dcp").mkdir()
    for content in (harmful, {"a": harmful}, Reaching()):
        (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(content))
        assert "could run code" in refusal(capsys, "inspect", tmp_path / "dcp")
    assert not (tmp_path / "ran").exists()
    (tmp_path / "dcp" / ".metadata").write_bytes(b"junk")
    assert "metadata" in refusal(capsys, "inspect", tmp_path / "dcp")


def test_what_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no file or folder" in refusal(capsys, "inspect", tmp_path / "none")
    assert "a folder without a checkpoint" in refusal(capsys, "inspect", tmp_path)
    (tmp_path / "x.bin").write_bytes(b"text")
    assert "cannot be read" in refusal(capsys, "inspect", tmp_path / "x.bin")
    (tmp_path / "x.safetensors").write_bytes(b"text")
    assert "cannot be read" in refusal(capsys, "inspect", tmp_path / "x.safetensors")
    torch.save([1, 2], tmp_path / "list.pt")
    assert "no tensors by name" in refusal(capsys, "inspect", tmp_path / "list.pt")
    torch.save({"module": {"w": torch.ones(2)}, "epoch": 3}, tmp_path / "nested.pt")
    assert answer(capsys, "inspect", tmp_path / "nested.pt")["elements"] == 2
