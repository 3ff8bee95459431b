"""``fds.load_params``: into any step's shards, no rank holding the whole; and files that are not what they should be."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.testing import assert_same
from tests.transforms.models import CASES, Tied


def stepped(case: str, stage: int) -> tuple[fds.Step, Any]:
    params, loss = CASES[case].make()
    return T.zero(stage)(fds.train_step(loss, fds.adamw(1e-2))), params


def written(case: str, stage: int, folder: Path) -> None:
    step, params = stepped(case, stage)
    fds.export(step.init(params), folder, shard_bytes=500)


def read(case: str, stage: int, folder: Path, meta: bool) -> tuple[Any, list[torch.dtype]]:
    step, params = stepped(case, stage)
    like = fds.tree.map(lambda x: torch.empty_like(x, device="meta") if meta else torch.zeros_like(x), params)
    like = {**like, "blocks.0.weight": nn.Parameter(like["blocks.0.weight"], requires_grad=False)} if case == "lora" else like
    state = step.init(fds.load_params(folder, like=like))
    return step.params(state), [leaf.dtype for leaf in state.params]


@pytest.mark.law(37)
@given(
    case=st.sampled_from(["tied", "lora", "recurrent", "odd leaves"]),
    stages=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    meta=st.booleans(),
)
def test_what_was_exported_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, case: str, stages: tuple[int, int], sizes: tuple[int, int], meta: bool
) -> None:
    """params_M ∘ init_M ∘ load_params ∘ export_N = params_N, bitwise, for any stages and any N and M."""
    folder = tmp_path_factory.mktemp("model")
    comm.simulate(written, case, stages[0], folder, world_size=sizes[0])
    params, _ = CASES[case].make()
    for found, _ in comm.simulate(read, case, stages[1], folder, meta, world_size=sizes[1]):
        assert_same(dict(fds.tree.named(found)), {name: x.detach() for name, x in fds.tree.named(params)})


def counted(folder: Path) -> tuple[int, list[tuple[int, int]]]:
    """What a rank sent while a step began, and which elements it read."""
    asked: list[tuple[int, int]] = []
    step, params = stepped("blocks", 3)
    loaded = fds.load_params(folder, like=params)

    class Spy:
        def read(self, path: str, start: int, stop: int) -> Tensor:
            asked.append((start, stop))
            origin = loaded[path]._fds_origin
            found: Tensor = origin.source.read(path, start, stop)
            return found

    with comm.ledger() as book:
        step.init(fds.from_source(loaded, Spy()))
    return sum(row.bytes for row in book.rows), asked


def test_each_rank_reads_its_own_shards_and_nothing_is_sent_but_a_check(tmp_path: Path) -> None:
    params, _ = CASES["blocks"].make()
    fds.export(params, tmp_path)
    numel = sum(x.numel() for x in params.values())
    for sent, asked in comm.simulate(counted, tmp_path, world_size=4):
        assert sent <= 100  # that all ranks have the same structure
        assert sum(stop - start for start, stop in asked) <= numel / 2  # the layout's padding makes it no exact quarter


def test_values_are_cast_between_floating_dtypes_alone(tmp_path: Path) -> None:
    fds.export({"w": torch.tensor([1.0, 1 / 3])}, tmp_path)
    step = fds.train_step(lambda p, x: p["w"].sum(), fds.sgd(0.1))
    state = step.init(fds.load_params(tmp_path, like={"w": torch.zeros(2, dtype=torch.bfloat16)}))
    assert_same(step.params(state)["w"], torch.tensor([1.0, 1 / 3]).bfloat16())
    with pytest.raises(ValueError, match=r"'w' is torch.float32\[2\] in the file and torch.int64\[2\] in like"):
        fds.load_params(tmp_path, like={"w": torch.zeros(2, dtype=torch.int64)})


def test_any_name_of_a_tied_parameter_will_do(tmp_path: Path) -> None:
    module = Tied()
    apply, params = fds.functional(module)
    values = {name: x.detach() for name, x in module.state_dict().items()}
    last = {name: x for name, x in values.items() if name != "embed.weight"}
    save_file(last, tmp_path / "last.safetensors")
    fds.export(params, tmp_path / "first.safetensors", module=apply)
    fds.export(params, tmp_path / "all.safetensors", module=apply, tied="all")
    for name in ("last", "first", "all"):
        found = fds.load_params(tmp_path / f"{name}.safetensors", like=params, module=apply)
        state = fds.train_step(lambda p, x: p["embed.weight"].sum(), fds.sgd(0.1)).init(found)
        assert_same({n: x.detach() for n, x in state.params.items()}, {n: x.detach() for n, x in params.items()})
    fds.load_params(tmp_path / "first.safetensors", like={"head.weight": 0 * params["embed.weight"]}, allow_extra="*")


def test_names_that_do_not_fit_are_listed_with_the_nearest(tmp_path: Path) -> None:
    fds.export({"blocks.0.weight": torch.ones(2), "head": torch.ones(1)}, tmp_path)
    with pytest.raises(ValueError, match=r"missing: 'block.0.weight' \(nearest: 'blocks.0.weight'\).*extra: 'blocks.0.weight'"):
        fds.load_params(tmp_path, like={"block.0.weight": torch.ones(2), "head": torch.ones(1)})
    with pytest.raises(ValueError, match=r"'head' is torch.float32\[1\] in the file and torch.float32\[2\] in like"):
        fds.load_params(tmp_path, like={"blocks": [{"weight": torch.ones(2)}], "head": torch.ones(2)})
    with pytest.raises(TypeError, match="the leaf at 'head' is int 3"):
        fds.load_params(tmp_path, like={"head": 3})


def test_partial_loads_are_asked_for_by_name(tmp_path: Path) -> None:
    fds.export({"model.w": torch.full((2,), 5.0), "old.head": torch.ones(1)}, tmp_path)
    like = {"w": torch.zeros(2), "head": torch.full((3,), 7.0)}
    options: dict[str, Any] = {"like": like, "rename": lambda path: f"model.{path}"}
    with pytest.raises(ValueError, match=r"missing: 'head'.*extra: 'old.head'"):
        fds.load_params(tmp_path, **options)
    found = fds.load_params(tmp_path, allow_missing="head", allow_extra=["old.*"], **options)
    state = fds.train_step(lambda p, x: p["w"].sum(), fds.sgd(0.1)).init(found)
    assert state.params["w"].tolist() == [5.0, 5.0]
    assert state.params["head"].tolist() == [7.0, 7.0, 7.0]


# -- files that are not what they should be ------------------------------------------------------------------------------

LIKE = {f"{i}": torch.full((4,), float(i)) for i in range(3)}


@given(place=st.floats(0, 1, exclude_max=True), filler=st.sampled_from([b"", b"PK\x03\x04", b"\xff"]))
def test_a_truncated_file_is_refused(tmp_path_factory: pytest.TempPathFactory, place: float, filler: bytes) -> None:
    folder = tmp_path_factory.mktemp("cut")
    fds.export(LIKE, folder)
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    cut = whole[: int(place * len(whole))] + filler
    path.write_bytes(cut if len(cut) != len(whole) else cut[:-1])
    with pytest.raises(ValueError, match="is damaged, or not a safetensors file"):
        fds.load_params(folder, like=LIKE)


@pytest.mark.parametrize("content", [b"", b"{}", b"not a model" * 100, b"\x10" + bytes(7) + b"{" * 16, b"\xff" * 8])
def test_a_foreign_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="is damaged, or not a safetensors file"):
        fds.load_params(tmp_path, like=LIKE)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no file"):
        fds.load_params(tmp_path / "nothing", like=LIKE)
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        fds.load_params(tmp_path, like=LIKE)


def indexed(folder: Path) -> tuple[Path, dict[str, Any]]:
    fds.export(LIKE, folder, shard_bytes=16)
    index = folder / "model.safetensors.index.json"
    return index, json.loads(index.read_text())


@pytest.mark.parametrize("outside", ["../other.safetensors", "/etc/passwd", "a/../../b", "..\\b", "C:\\b", "C:b", ""])
def test_an_index_does_not_walk_out_of_its_folder(tmp_path: Path, outside: str) -> None:
    index, content = indexed(tmp_path / "model")
    save_file({"1": LIKE["1"]}, tmp_path / "other.safetensors")
    content["weight_map"]["1"] = outside
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="which is not in its folder; nothing was opened"):
        fds.load_params(tmp_path / "model", like=LIKE)


def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path: Path) -> None:
    index, content = indexed(tmp_path)
    fds.load_params(index, like=LIKE)
    shard = tmp_path / content["weight_map"]["1"]
    fds.export({"other": torch.ones(1)}, shard, overwrite=True)
    with pytest.raises(ValueError, match="names tensors that its files do not have; missing: '1'"):
        fds.load_params(tmp_path, like=LIKE)
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=r"names the file 'model-00002-of-00003.safetensors', which is not there"):
        fds.load_params(tmp_path, like=LIKE)
    for text in ["", "{", "[]", "[" * 50_000, '{"weight_map": []}', '{"weight_map": {"1": 2}}', "\udcff"]:
        index.write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(ValueError, match="is damaged, or not an index"):
            fds.load_params(tmp_path, like=LIKE)
    index.unlink()
    index.mkdir()
    with pytest.raises(ValueError, match="is damaged, or not an index"):
        fds.load_params(tmp_path, like=LIKE)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match="not a file of bytes"):
        fds.load_params(tmp_path, like={"a": torch.zeros(2)})
