"""``fds.from_deepspeed``.

Tests with ``Layout`` read folders that our own code (``zero_layout.py``) writes in DeepSpeed's layout; they run everywhere.
``test_deepspeeds_own_checkpoints`` has DeepSpeed train, save and go on, and needs it installed (the extra ``bench``).
"""

import importlib.util
import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.checkpointing import CheckpointError, DamagedError, NoCheckpointError, StructureError
from functional_ds.interchange.deepspeed_files import ZeroFiles, load_pickle
from functional_ds.state_dict.describe import describe
from functional_ds.testing import assert_same
from tests.interchange.zero_layout import DynamicLossScaler, Layout, ZeroStageEnum, values_of
from tests.planting import Bug, planted
from tests.tools.deepspeed_checkpoint import ADAMW, STEPS, batch, loss_of, model

ROLES = {"params": "master", "masters": "master", "optimizer.exp_avg": "exp_avg", "optimizer.exp_avg_sq": "exp_avg_sq"}


def loss(params: Any, x: Tensor) -> Tensor:
    total: Tensor = sum(leaf.float().sum() for leaf in params.values() if leaf.is_floating_point()) * x.sum()  # type: ignore[assignment]
    return total


def begun(params: Any, transforms: tuple[fds.Transform, ...], optimizer: Any = None) -> tuple[fds.Step, fds.State]:
    step = fds.compose(*transforms)(fds.train_step(loss, optimizer or fds.adamw(0.1)))
    return step, step.init(params)


def stretches(state: fds.State) -> list[tuple[str, str, int, Tensor]]:
    return [(*held.name.partition("/")[::2], held.offset, held.view.clone()) for held in describe(state) if "/" in held.name]


def imported(path: Path, layout: Layout, stage: int, precision: str) -> tuple[list[tuple[str, str, int, Tensor]], Any, int]:
    shapes = {name: entry["master"].shape for name, entry in layout.values.items()}
    params: dict[str, Any] = {name: torch.zeros(shape) for name, shape in shapes.items()}
    params |= {name: nn.Parameter(torch.zeros_like(x), requires_grad=False) for name, x in layout.frozen.items()}
    mixed = (T.mixed_precision(precision),) if precision != "fp32" else ()
    step, state = begun(params, (*mixed, T.zero(stage)))
    before = stretches(state)
    state = fds.from_deepspeed(path, like=state, order=layout.groups)
    assert len(before) == len(stretches(state))
    return stretches(state), dict(step.params(state)), int(state.step)


SHAPES = st.lists(st.integers(1, 5), max_size=2)


@pytest.mark.law(37)
@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=5),
    cut=st.integers(0, 5),
    stages=st.tuples(st.sampled_from([0, 1, 2, 3]), st.sampled_from([0, 1, 2, 3])),
    ranks=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    frozen=st.none() | SHAPES,
    precision=st.sampled_from(["fp32", "bf16"]),
    padding=st.integers(1, 4),
    saved=st.sampled_from([(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]),
)
def test_masters_and_moments_are_taken_over_from_any_ranks_to_any_ranks(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[list[int]],
    cut: int,
    stages: tuple[int, int],
    ranks: tuple[int, int],
    frozen: list[int] | None,
    precision: str,
    padding: int,
    saved: tuple[torch.dtype, bool],
) -> None:
    """params ∘ from_deepspeed = DeepSpeed's masters, bitwise, and so are moments; Layout's folders."""
    values = values_of({f"layers.{i}.w": shape for i, shape in enumerate(shapes)})
    names = list(values)
    groups = [group for group in (names[:cut], names[cut:]) if group]
    still = {} if frozen is None else {"still": torch.full(frozen, 5.0)}
    dtype, flat = saved if stages[0] == 0 else (torch.bfloat16, False)
    layout = Layout(stages[0], ranks[0], groups, values, still, padding=padding, dtype=dtype, flat=flat)
    path = layout.write(tmp_path_factory.mktemp("ds"))
    for found, params, step in comm.simulate(imported, path, layout, stages[1], precision, world_size=ranks[1]):
        assert step == 3
        assert_same(params, {**{name: entry["master"] for name, entry in values.items()}, **still})
        for role, leaf, offset, view in found:
            if role == "optimizer.steps":
                assert view.item() == 3
            elif leaf in values:
                whole = values[leaf][ROLES[role]].reshape(-1)
                assert_same(view, whole[offset : offset + view.numel()].to(view.dtype))


def piped(path: Path) -> list[tuple[str, str, int, Tensor]]:
    """Each rank has its own leaves, as in a pipeline."""
    mine = ["a", "b"] if comm.world().rank == 0 else ["c"]
    _, state = begun({name: torch.zeros(3) for name in mine}, ())
    return stretches(fds.from_deepspeed(path, like=state))


def test_ranks_may_have_other_leaves(tmp_path: Path) -> None:
    values = values_of({"a": [3], "b": [3], "c": [3]})
    Layout(3, 2, [["a", "b", "c"]], values).write(tmp_path)
    for rank in comm.simulate(piped, tmp_path, world_size=2):
        for role, leaf, _, view in rank:
            if role in ROLES:
                assert_same(view, values[leaf][ROLES[role]])


@pytest.mark.parametrize(
    ("optimizer", "options", "roles"),
    [
        (fds.lion(0.1), {"allow_extra": "optimizer.exp_avg_sq"}, {"params", "optimizer.exp_avg"}),
        (fds.sgd(0.1), {"allow_extra": "optimizer.*"}, {"params"}),
        (fds.param_groups({"a": fds.sgd(0.1)}, fds.adamw(0.1)), {}, {"params", "optimizer.exp_avg", "optimizer.exp_avg_sq"}),
        (fds.adamw(0.1, decay="a"), {}, {"params", "optimizer.exp_avg", "optimizer.exp_avg_sq"}),
    ],
)
def test_other_optimizers_take_what_they_have(tmp_path: Path, optimizer: Any, options: Any, roles: set[str]) -> None:
    values = values_of({"a": [3], "b": [2, 2]})
    Layout(2, 2, [["a", "b"]], values).write(tmp_path)
    _, state = begun({name: torch.zeros(entry["master"].shape) for name, entry in values.items()}, (), optimizer)
    found = [entry for entry in stretches(fds.from_deepspeed(tmp_path, like=state, **options)) if entry[0] in ROLES]
    assert {role for role, *_ in found} == roles
    for role, leaf, _, view in found:
        assert_same(view, values[leaf][ROLES[role]].reshape(-1))


def test_names_may_differ_and_like_stays_unless_donated(tmp_path: Path) -> None:
    values = values_of({"model.a": [3]})
    Layout(1, 2, [["model.a"]], values, shared={"model.tied": "model.a"}).write(tmp_path)
    step, state = begun({"a": torch.zeros(3)}, (T.ema(0.5),))
    found = fds.from_deepspeed(tmp_path, like=state, rename=lambda path: f"model.{path}")
    assert_same(found.params["a"], values["model.a"]["master"])
    assert_same(T.averaged(step, found)["a"], values["model.a"]["master"])
    assert state.params["a"].tolist() == [0, 0, 0]
    found = fds.from_deepspeed(tmp_path, like=state, rename=lambda path: "model.tied", donate=True)
    assert_same(found.params["a"], values["model.a"]["master"])
    with pytest.raises(fds.DonatedStateError):
        _ = state.params


def of_stage_0(path: Path, **more: Any) -> Any:
    """Two parameters, one of them under two names, and a buffer; what takes it over has the first alone."""
    values = values_of({"a": [3], "b": [2, 2]})
    entries = {"global_samples": 12, "epoch": 4}
    layout = Layout(0, 2, [["a", "b"]], values, shared={"tied": "a"}, buffers={"count": torch.ones(1)}, entries=entries, **more)
    layout.write(path)
    return values, begun({name: torch.zeros(entry["master"].shape) for name, entry in values.items()}, (T.ema(0.5),))[1]


@pytest.mark.parametrize(("dtype", "flat"), [(torch.float32, False), (torch.float16, False), (torch.float16, True)])
def test_one_group_of_stage_0_has_the_modules_order(tmp_path: Path, dtype: torch.dtype, flat: bool) -> None:
    values, state = of_stage_0(tmp_path, dtype=dtype, flat=flat)
    found = fds.from_deepspeed(tmp_path, like=state)
    for role, leaf, _, view in stretches(found):
        if role in ROLES:
            assert_same(view, values[leaf][ROLES[role]].reshape(-1))
    assert int(found.step) == 3
    files = ZeroFiles.open(tmp_path)
    assert (files.stage, files.aliases, [*files.buffers], files.client_state()) == (0, {"tied": "a"}, ["count"], {"epoch": 4})
    assert (files.counts["global_samples"], files.groups[0]["lr"]) == (12, 0.1)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([["b", "a"]], r"group 0 has a tensor of another shape than 'b', \[2, 2\]"),
        ([["a"], ["b"]], r"groups have \[2\] parameters, and order= has \[1, 1\]"),
        ([["a", "c"]], "it has no 'c'"),
        ([["a"]], r"groups have \[2\] parameters, and order= has \[1\]"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_order_that_does_not_fit_stage_0_is_an_error(tmp_path: Path, order: Any, message: str, dtype: torch.dtype) -> None:
    _, state = of_stage_0(tmp_path, dtype=dtype)
    with pytest.raises(StructureError, match=message):
        fds.from_deepspeed(tmp_path, like=state, order=order)


def test_stage_0_without_an_optimizer_and_half_a_state(tmp_path: Path) -> None:
    """Parameters that no update has reached have moments of zero; without an optimizer all are values alone."""
    values, state = of_stage_0(tmp_path, dtype=torch.float32)
    file = tmp_path / "global_step3/mp_rank_00_model_states.pt"
    content = torch.load(file, weights_only=True)
    del content["optimizer"]["state"][1]
    torch.save(content, file)
    for role, leaf, _, view in stretches(fds.from_deepspeed(tmp_path, like=state)):
        if role in ROLES:
            reached = role == "params" or leaf == "a"
            assert_same(view, values[leaf][ROLES[role]].reshape(-1) * reached)
        elif role == "optimizer.steps":
            assert view.item() == (3 if leaf == "a" else 0)
    torch.save({**content, "optimizer": None}, file)
    found = fds.from_deepspeed(tmp_path, like=state, only="params")
    assert_same(found.params["b"], values["b"]["master"])
    with pytest.raises(StructureError, match=r"optimizer\.exp_avg"):
        fds.from_deepspeed(tmp_path, like=state)


def test_a_pipelines_folder_of_stage_0_and_one_that_lacks_states_are_errors(tmp_path: Path) -> None:
    _, state = of_stage_0(tmp_path)
    file = tmp_path / "global_step3/mp_rank_00_model_states.pt"
    content = torch.load(file, weights_only=True)
    for new, message in (({"module": None}, "pipeline parallel"), ({"param_shapes": [{"a": [3]}]}, "has no files")):
        torch.save({**content, **new}, file)
        with pytest.raises(CheckpointError, match=message):
            fds.from_deepspeed(tmp_path, like=state)


LAYOUT = "interchange.deepspeed_layout"


@pytest.mark.parametrize(
    "bug",
    [
        Bug(
            "a group's vector begins anew for each parameter",
            "interchange.deepspeed_layout:whole_params",
            "FlatRange(0, size, 0, len(flats) - 1, begin)",
            "FlatRange(0, size, 0, len(flats) - 1, 0)",
        ),
        Bug(
            "tied names count twice",
            "interchange.deepspeed_layout:whole_params",
            "(x.data_ptr(), x.shape) if x.numel() else name",
            "name",
            StructureError,
        ),
    ],
    ids=lambda bug: bug.name,
)
def test_bugs_of_stage_0_are_seen(tmp_path: Path, bug: Bug) -> None:
    with planted(bug), pytest.raises(bug.shows):
        test_one_group_of_stage_0_has_the_modules_order(tmp_path, torch.float16, True)


def test_weights_alone(tmp_path: Path) -> None:
    Layout(3, 2, [["a"]], values_of({"a": [3]})).write(tmp_path)
    _, state = begun({"a": torch.zeros(3)}, (T.mixed_precision("bf16"),))
    found = fds.from_deepspeed(tmp_path, like=state, only="params")
    assert found.params["a"].tolist() == [0, 1, 2]
    assert found.step == 0
    assert found.optimizer.exp_avg[0].tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="only='weights' matches nothing in like"):
        fds.from_deepspeed(tmp_path, like=state, only="weights")


@pytest.mark.parametrize("params", [None, "disk"])
@pytest.mark.parametrize("donate", [False, True])
def test_states_that_lie_on_a_disk(tmp_path: Path, params: Any, donate: bool) -> None:
    values = values_of({"a": [3]})
    Layout(3, 2, [["a"]], values).write(tmp_path)
    step, state = begun({"a": torch.zeros(3)}, (T.offload("disk", params, path=tmp_path), T.zero(3)))
    found = fds.from_deepspeed(tmp_path, like=state, donate=donate)
    assert_same(step.params(found)["a"], values["a"]["master"])
    assert found.optimizer.exp_avg[0].read().tolist()[:3] == values["a"]["exp_avg"].tolist()


@given(history=st.lists(st.booleans(), max_size=12), following=st.lists(st.booleans(), max_size=12), window=st.integers(1, 4))
def test_a_dynamic_loss_scale_goes_on_as_deepspeeds_would(
    tmp_path_factory: pytest.TempPathFactory, history: list[bool], following: list[bool], window: int
) -> None:
    """DeepSpeed's rule, until the first overflow after the import; Layout's folders, with an attribute-for-attribute scaler."""
    scaler = DynamicLossScaler(cur_scale=2.0**10, cur_iter=0, last_overflow_iter=-1, cur_hysteresis=1, scale_window=window)
    scaler.dynamic, scaler.delayed_shift = True, 1
    for overflow in history:
        _deepspeeds_rule(scaler, overflow)
    path = Layout(2, 1, [["a"]], values_of({"a": [1]}), scaler=scaler, dtype=torch.float16).write(tmp_path_factory.mktemp("ds"))
    scale = T.DynamicScale(2.0**10, window=window, hysteresis=1, minimum=2.0**-20)
    _, state = begun({"a": torch.zeros(1)}, (T.mixed_precision("fp16", scale),))
    scale = fds.from_deepspeed(path, like=state).slots["mixed_precision"].loss_scale
    for overflow in following:
        assert scale.value.item() == scaler.cur_scale
        if overflow:
            break
        scale = scale.adjust(torch.tensor(True))
        _deepspeeds_rule(scaler, False)


def _deepspeeds_rule(scaler: Any, overflow: bool) -> None:
    """What DeepSpeed's DynamicLossScaler does with a hysteresis of one, in our own words."""
    if overflow:
        scaler.cur_scale /= 2
        scaler.last_overflow_iter = scaler.cur_iter
    else:
        stable = scaler.cur_iter - scaler.last_overflow_iter - 1
        if stable > 0 and stable % scaler.scale_window == 0:
            scaler.cur_scale *= 2
    scaler.cur_iter += 1


# -- what is refused; Layout's folders -----------------------------------------------------------------------------------


def small(path: Path, stage: int = 2) -> fds.State:
    Layout(stage, 2, [["a", "b"]], values_of({"a": [3], "b": [2]})).write(path)
    return begun({"a": torch.zeros(3), "b": torch.zeros(2)}, ())[1]


def test_differences_are_listed(tmp_path: Path) -> None:
    small(tmp_path)
    _, state = begun({"a": torch.zeros(4), "c": torch.zeros(2)}, ())
    with pytest.raises(StructureError) as caught:
        fds.from_deepspeed(tmp_path, like=state)
    for words in ("params/c", "optimizer.exp_avg/c", "params/b", r"params/a ([3] there, [4] here)"):
        assert words in str(caught.value)
    fds.from_deepspeed(tmp_path, like=begun({"a": torch.ones(3)}, ())[1], allow_extra="params/b")
    found = fds.from_deepspeed(
        tmp_path, like=begun({"a": torch.ones(3), "b": torch.ones(2), "c": torch.ones(2)}, ())[1], allow_missing="*/c"
    )
    assert found.params["c"].tolist() == [1, 1]
    with pytest.raises(StructureError, match=r"optimizer\.momentum"):
        fds.from_deepspeed(tmp_path, like=begun({"a": torch.ones(3), "b": torch.ones(2)}, (), fds.sgd(0.1, momentum=0.5))[1])
    with pytest.raises(TypeError, match="like=dict"):
        fds.from_deepspeed(tmp_path, like={})  # type: ignore[arg-type]


@pytest.mark.parametrize("tag", ["../elsewhere", "..", "", "a/b", "/etc"])
def test_a_tag_does_not_walk_out_of_the_folder(tmp_path: Path, tag: str) -> None:
    state = small(tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(ValueError, match="is not a plain name"):
        fds.from_deepspeed(tmp_path / "run", like=state, tag=tag)
    (tmp_path / "run" / "latest").write_text(tag)
    with pytest.raises(ValueError, match="is not a plain name"):
        fds.from_deepspeed(tmp_path / "run", like=state)


def test_a_tag_is_a_string(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="tag=3 must be a string; pass tag='3'"):
        fds.from_deepspeed(tmp_path, like=small(tmp_path), tag=3)  # type: ignore[arg-type]


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    state = small(tmp_path)
    with pytest.raises(NoCheckpointError, match="no checkpoint 'global_step9'"):
        fds.from_deepspeed(tmp_path, like=state, tag="global_step9")
    with pytest.raises(NoCheckpointError, match="no file 'latest'"):
        fds.from_deepspeed(tmp_path / "global_step3", like=state)
    (tmp_path / "global_step3" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(DamagedError, match="was written by 2 ranks, and has the files of 1"):
        fds.from_deepspeed(tmp_path, like=state)
    (tmp_path / "global_step3" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(NoCheckpointError, match="it is not a checkpoint of ZeRO"):
        fds.from_deepspeed(tmp_path, like=state)


def test_models_that_were_cut_otherwise_are_refused(tmp_path: Path) -> None:
    state = small(tmp_path)
    file = tmp_path / "global_step3" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    file.rename(file.with_name("bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt"))
    with pytest.raises(CheckpointError, match="tensor or pipeline parallel"):
        fds.from_deepspeed(tmp_path, like=state)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("content", [b"", b"junk" * 9, None])
def test_damaged_files_are_refused(tmp_path: Path, stage: int, content: bytes | None) -> None:
    state = small(tmp_path, stage)
    for file in sorted((tmp_path / "global_step3").iterdir()):
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2] if content is None else content)
        with pytest.raises(DamagedError, match=file.name):
            fds.from_deepspeed(tmp_path, like=state)
        file.write_bytes(whole)
    fds.from_deepspeed(tmp_path, like=state)


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harmed",)


class Reaching:
    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (OrderedDict, "fromkeys")


def test_stages_by_name_are_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python before 3.11.4 pickles an enum as a call of ``getattr``, which reaches nothing else."""
    by_name = partialmethod(lambda stage, protocol: (getattr, (type(stage), stage.name)))
    monkeypatch.setattr(ZeroStageEnum, "__reduce_ex__", by_name)
    state = small(tmp_path)
    assert b"getattr" in pickle.dumps(ZeroStageEnum.gradients)
    assert load_pickle(tmp_path / "global_step3" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")
    fds.from_deepspeed(tmp_path, like=state)
    torch.save(Reaching(), tmp_path / "reaching.pt")
    with pytest.raises(CheckpointError, match=r"unpickling them could run code: builtins.getattr"):
        load_pickle(tmp_path / "reaching.pt")


def test_a_name_of_no_member_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = "isinstance(kind, EnumType) and name in kind.__members__"
    bug = Bug("getattr reaches all names", "interchange.deepspeed_files:enum_member", members, "name")
    with planted(bug), pytest.raises(pytest.fail.Exception):
        test_stages_by_name_are_numbers(tmp_path, monkeypatch)


def test_a_file_cannot_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = small(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"):
        file = tmp_path / "global_step3" / name
        whole = file.read_bytes()
        torch.save({"optimizer_state_dict": {}, "client": Harmful()}, file)
        with pytest.raises(CheckpointError, match=r"unpickling them could run code.*mkdir"):
            fds.from_deepspeed(tmp_path, like=state)
        file.write_bytes(whole)
    assert not (tmp_path / "harmed").exists()


def test_flat_tensors_that_are_too_short_are_refused(tmp_path: Path) -> None:
    state = small(tmp_path)
    file = tmp_path / "global_step3" / "mp_rank_00_model_states.pt"
    content = torch.load(file)
    content["param_shapes"][0]["b"] = torch.Size([50])
    torch.save(content, file)
    with pytest.raises(DamagedError, match="'b' ends at 53 of 5 elements"):
        fds.from_deepspeed(tmp_path, like=state)


def places(content: Any, where: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The keys on the way to each part of a file's content."""
    if isinstance(content, dict):
        inner = [places(value, (*where, key)) for key, value in content.items()]
    elif isinstance(content, (list, tuple)):
        inner = [places(value, (*where, index)) for index, value in enumerate(content)]
    else:
        inner = []
    return [*([where] if where else []), *(place for each in inner for place in each)]


GONE = object()
OTHERS: tuple[Any, ...] = (
    GONE,
    None,
    -1,
    7,
    2**70,
    0.5,
    float("nan"),
    "text",
    [],
    {},
    [None],
    {"a": None},
    torch.zeros(()),
    torch.zeros(1, 2),
)


@given(stage=st.sampled_from([1, 2, 3]), scaled=st.booleans(), data=st.data())
def test_malformed_files_are_named(
    tmp_path_factory: pytest.TempPathFactory, stage: int, scaled: bool, data: st.DataObject
) -> None:
    """Whatever part of a file is gone or something else: the state is read, or an error of this library's names the folder."""
    scaler = DynamicLossScaler(cur_scale=2.0, cur_iter=3, last_overflow_iter=-1, cur_hysteresis=1, scale_window=2, dynamic=True)
    layout = Layout(
        stage, 2, [["a"], ["b"]], values_of({"a": [3], "b": [2]}), {"c": torch.ones(2)}, scaler=scaler if scaled else None
    )
    path = layout.write(tmp_path_factory.mktemp("ds"))
    mixed = (T.mixed_precision("fp16", T.DynamicScale(2.0)),) if scaled else ()
    params = {"a": torch.zeros(3), "b": torch.zeros(2), "c": nn.Parameter(torch.zeros(2), requires_grad=False)}
    _, state = begun(params, mixed)
    file = data.draw(st.sampled_from(sorted((path / "global_step3").iterdir())), label="file")
    content = load_pickle(file)
    where = data.draw(st.sampled_from(places(content)), label="where")
    holder = content
    for key in where[:-1]:
        holder = holder[key]
    new = data.draw(st.sampled_from(OTHERS), label="new")
    if isinstance(holder, tuple):
        return
    if new is GONE:
        del holder[where[-1]]
    else:
        holder[where[-1]] = new
    torch.save(content, file.with_suffix(".new"))  # the tensors are mapped from the old file
    file.with_suffix(".new").replace(file)
    try:
        fds.from_deepspeed(path, like=state)
    except CheckpointError as error:
        assert str(path) in str(error)  # noqa: PT017


# -- DeepSpeed itself ----------------------------------------------------------------------------------------------------

POLICIES: dict[str, tuple[fds.Transform, ...]] = {
    "fp32": (),
    "bf16": (T.mixed_precision("bf16"),),
    "fp16": (T.mixed_precision("fp16", T.DynamicScale(16.0)),),
}


def goes_on(path: Path, stage: int, dtype: str, ranks: int) -> tuple[list[tuple[str, str, int, Tensor]], Any, Any]:
    apply, params = fds.functional(model())
    params = {name: nn.Parameter(torch.zeros_like(p), requires_grad=p.requires_grad) for name, p in params.items()}
    matrices = lambda path: params[path].dim() > 1  # noqa: E731
    base = fds.train_step(lambda p, tokens: loss_of(apply(p, tokens), tokens), fds.adamw(**ADAMW, decay=matrices))
    step = fds.compose(*POLICIES[dtype], T.zero(stage))(base)
    named = [[name for name, p in params.items() if p.requires_grad and matrices(name) == big] for big in (True, False)]
    state = fds.from_deepspeed(path, like=step.init(params), order=named)
    found, saved = stretches(state), dict(step.params(state))
    here = comm.world()
    tokens = torch.cat([batch(STEPS, rank) for rank in range(ranks)]).tensor_split(here.size)[here.rank]
    state, _ = step(state, tokens)
    return found, saved, dict(step.params(state))


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed: the extra bench")
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeeds_own_checkpoints(tmp_path: Path, stage: int, dtype: str) -> None:
    """Masters and moments are those of DeepSpeed's engine, bitwise; and our next step is its next step, within rounding."""
    tool = Path(__file__).parents[1] / "tools" / "deepspeed_checkpoint.py"
    path = tmp_path / "run"
    command = [sys.executable, str(tool), str(path), "--stage", str(stage), "--dtype", dtype]
    subprocess.run(command, check=True, capture_output=True)
    truth = torch.load(path / "truth.pt")
    for size in (1, 2, 4):
        for ours in (1, 3):
            for found, saved, after in comm.simulate(goes_on, path, ours, dtype, 2, world_size=size):
                for name, entry in truth["saved"].items():
                    assert_same(saved[name], entry["master"])
                for role, leaf, offset, view in found:
                    if leaf in truth["saved"] and role != "optimizer.steps":
                        whole = truth["saved"][leaf][ROLES[role]].reshape(-1)
                        assert_same(view, whole[offset : offset + view.numel()].to(view.dtype))
                # A step moves by lr at most, about; half precision gradients carry 8 or 11 bits.
                rounding = {"fp32": 1e-5, "bf16": 2**-4, "fp16": 2**-7}[dtype] * ADAMW["lr"]
                if (stage, dtype) == (0, "fp16"):  # DeepSpeed 0.19.8 divides by its scale there, and multiplies no loss by it
                    continue
                for name, entry in truth["after"].items():
                    torch.testing.assert_close(after[name], entry["master"], atol=rounding, rtol=0)
