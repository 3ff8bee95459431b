"""CSV files that torch reads, and those that it writes."""

from pathlib import Path

import pytest
from hypothesis import given
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime, _simulate_comms_compute

from functional_ds.pipelining import Schedule, from_csv, lower, to_csv, zbv
from functional_ds.testing import schedules
from tests.pipelining.cases import everyone, generated


class Theirs(_PipelineScheduleRuntime):
    """torch's reader and writer, without the modules and process groups that its constructor wants."""

    def __init__(self, schedule: Schedule) -> None:
        self.pipeline_order = {}
        self.pp_group_size = schedule.ranks
        self._num_stages, self._n_microbatches = schedule.stages, schedule.microbatches
        self._stages, self._defer_pp_recv = [], False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tables")


@given(schedule=schedules() | generated())
def test_a_file_loses_nothing(folder: Path, schedule: Schedule) -> None:
    """from_csv ∘ to_csv = id, lowered or not."""
    for each in (schedule, lower(schedule, gathers=True)):
        to_csv(each, folder / "mine.csv")
        assert from_csv(folder / "mine.csv", placement=schedule.placement) == each


@given(schedule=generated())
def test_torch_reads_and_writes_compute_actions(folder: Path, schedule: Schedule) -> None:
    """Through torch's own _load_csv, with its validator, and back through its _dump_csv; every cell is its _Action's text."""
    to_csv(schedule, folder / "mine.csv")
    theirs = Theirs(schedule)
    theirs._load_csv(str(folder / "mine.csv"))
    assert theirs.stage_index_to_group_rank == dict(enumerate(schedule.placement))
    for rank, row in enumerate(schedule):
        assert [str(action) for action in theirs.pipeline_order[rank]] == [str(action) for action in row]
    theirs._dump_csv(str(folder / "theirs.csv"), format="compute_only")
    assert from_csv(folder / "theirs.csv", placement=schedule.placement) == schedule
    theirs._dump_csv(str(folder / "theirs.csv"), format="compute_comms")  # lowered by torch
    assert from_csv(folder / "theirs.csv", placement=schedule.placement).compute_only() == schedule


def test_torch_reads_lowered_schedules(folder: Path) -> None:
    """Its simulation of messages gets through ours."""
    for schedule in everyone(3, 6):
        lowered = lower(schedule)
        to_csv(lowered, folder / "mine.csv")
        theirs = Theirs(schedule)
        theirs._load_csv(str(folder / "mine.csv"), format="compute_comms")
        assert _simulate_comms_compute(theirs.pipeline_order_with_comms, schedule.placement.__getitem__, schedule.stages)
    to_csv(lower(zbv(3, 6), gathers=True), folder / "mine.csv")
    theirs = Theirs(zbv(3, 6))
    theirs._load_csv(str(folder / "mine.csv"), format="compute_comms")
    kinds = {action.computation_type.name for row in theirs.pipeline_order_with_comms.values() for action in row}
    assert {"UNSHARD", "RESHARD", "REDUCE_GRAD", "SEND_F", "RECV_B"} <= kinds


def test_idle_slots_and_pairs(folder: Path) -> None:
    """Empty cells are left out, overlapped pairs are two actions, spaces do not count."""
    cells = ["0F0", "", " 0F1", "(1F0;0B0)OVERLAP_F_B", "0UNSHARD"]
    assert [_Action.from_str(cell) is None for cell in cells] == [False, True, False, False, False]  # as torch reads them
    (folder / "pair.csv").write_text(",".join(cells))
    assert str(from_csv(folder / "pair.csv")).endswith("rank 0: 0F0 0F1 1F0 0B0 0GATHER")


@pytest.mark.parametrize("cell", ["0X1", "F0", "0F", "1SEND0", "(0F1;0Y0)OVERLAP_F_B", "(0F1", "0F1x", "0GATHER2"])
def test_a_bad_cell_is_named(folder: Path, cell: str) -> None:
    """With its row, its column and its text."""
    (folder / "bad.csv").write_text(f"0F0,0F1\n1F0,,{cell},1F1\n")
    with pytest.raises(ValueError, match=r"bad.csv, row 2, column 3: '.*' is not an action"):
        from_csv(folder / "bad.csv")


@pytest.mark.parametrize("cell", ["0F99999999999", "9999999999F0"])
def test_a_number_out_of_range_is_named(folder: Path, cell: str) -> None:
    """With its row, its column and its text."""
    (folder / "large.csv").write_text(f"0F0,0F1\n{cell}\n")
    with pytest.raises(ValueError, match=rf"large.csv, row 2, column 1: '{cell}' is out of range"):
        from_csv(folder / "large.csv")


def test_files_that_are_no_text(folder: Path) -> None:
    """They are refused by name; a mark at the beginning, as spreadsheets write it, is none of the first cell."""
    (folder / "picture.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"picture.csv is not text in UTF-8: .*can't decode byte 0xff"):
        from_csv(folder / "picture.csv")
    (folder / "marked.csv").write_text("0F0,0B0\n", encoding="utf-8-sig")
    assert from_csv(folder / "marked.csv") == Schedule.of(["0F0 0B0"])


def test_an_empty_file(folder: Path) -> None:
    """It is refused."""
    (folder / "empty.csv").write_text("")
    with pytest.raises(ValueError, match="has no rows"):
        from_csv(folder / "empty.csv")
