"""A profile's figures respect their bounds, and what it writes can be read."""

import json
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.comm.record.ledger import Row
from functional_ds.profiling import Flops, Profile, Profiling, RankProfile, peak_flops
from functional_ds.testing import simulated_cuda


def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
    return ((x @ params["a"]).tanh() @ params["b"]).square().mean()


def profiled_run(*transforms: fds.Transform, calls: int = 6, rows: int = 4, **settings: Any) -> Any:
    step = fds.compose(*transforms)(fds.train_step(loss_fn, fds.adamw(0.1)))
    found = fds.profile(step, **{"skip": 1, "every": 2, **settings})
    state = step.init({"a": torch.ones(3, 4), "b": torch.ones(4, 2)})
    for _ in range(calls):
        state, _ = found(state, torch.ones(rows, 3))
    return found


@cache
def two_ranks() -> Profile:
    def program() -> Profile:
        found: Profile = profiled_run(T.zero(2), peak=1e9, tokens=torch.numel).result()
        return found

    return comm.simulate(program, world_size=2)[0]


def test_the_figures_respect_their_bounds() -> None:
    found = two_ranks()
    for rank in found.ranks:
        assert (rank.detailed, rank.plain) == (2, 2)
        assert sum(rank.places.values()) == pytest.approx(rank.detailed_seconds)
        assert 0 < rank.waiting < rank.detailed_seconds
        assert 0 <= rank.outside_seconds < rank.plain_seconds == rank.seconds
        assert rank.mfu == rank.all_flops.model / rank.seconds / 1e9
        assert rank.all_flops.model == 2 * (2 * 4 * 3 * 4) + 3 * (2 * 4 * 4 * 2)
        assert rank.hfu is not None
        assert rank.hfu >= rank.mfu
        assert sum(rank.stage(stage) for stage in fds.profiling.STAGES) == pytest.approx(rank.detailed_seconds)
    assert found.seconds == max(rank.seconds for rank in found.ranks)
    assert (found.samples, found.tokens) == (8, 24)
    assert found.numbers()["tokens_per_second"] == pytest.approx(24 / found.seconds)
    assert (tuple(found.offsets), found.clock_error) == ((0.0, 0.0), 0.0)  # simulated ranks share a clock


def both_are_inside(found: Profile) -> None:
    """Law: on one clock, all ranks of an all-reduce are inside of it at one time."""
    calls = [[each for each in rank.events if each.collective == "all_reduce"] for rank in found.ranks]
    assert calls[0]
    for same in zip(*calls, strict=True):
        pairs = list(zip(same, found.offsets, strict=True))
        assert max(each.began + ahead for each, ahead in pairs) < min(each.ended + ahead for each, ahead in pairs)
        assert len({(each.collective, each.group, each.payload) for each in same}) == 1


def test_ranks_are_on_one_clock() -> None:
    both_are_inside(two_ranks())


def _spawned(folder: str) -> Profile:
    found: Profile = profiled_run(T.zero(3), calls=4).result()
    if comm.world().rank == 0:
        found.save(folder)
    return found


def test_processes_are_on_one_clock(tmp_path: Path) -> None:
    found = comm.spawn(_spawned, str(tmp_path), world_size=2)[1]
    both_are_inside(found)
    assert {path.name for path in tmp_path.iterdir()} == {"profile.txt", "profile.json", "trace.json", "trace.html"}
    assert json.loads((tmp_path / "profile.json").read_text()) == json.loads(json.dumps(found.as_dict()))


@pytest.mark.parametrize("axes", [{"dp": 2, "tp": 2}, {"dp": 2, "sp": 2}, {"dp": 2, "pp": 2}, {"dp": 4}], ids=str)
def test_samples_and_tokens_count_once(axes: dict[str, int]) -> None:
    """Ranks that share a batch, along tp, sp or pp, count it once; those of dp add theirs up."""
    shared_batches_count_once(axes)


def shared_batches_count_once(axes: dict[str, int]) -> None:
    from functional_ds import pipelining as pp

    def program() -> Profile:
        mesh = comm.mesh(**axes)
        params: Any = {"a": torch.ones(4, 4), "b": torch.ones(4, 4)}
        transforms, batch = [T.zero(1, mesh["dp"])], torch.ones(6, 4)
        loss: Any = loss_fn
        if "tp" in axes:
            apply, params = fds.functional(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
            loss = lambda params, x: apply(params, x).square().mean()  # noqa: E731
            transforms.append(T.tensor_parallel({"0": "colwise", "1": "rowwise"}, mesh["tp"]))
        if "sp" in axes:
            loss = lambda params, x: fds.Weighted((x * params["a"].sum()).sum(), x.numel())  # noqa: E731
            transforms[0] = T.zero(1, mesh["dp", "sp"])
            transforms.append(T.sequence(mesh["sp"], dims={"": 1}, tokenwise=True))
        if "pp" in axes:
            functions = [lambda p, x: (x @ p["a"]).tanh(), lambda p, x: x @ p["b"]]
            loss = pp.stages(functions, [params, params], loss=lambda y, batch: y.square().mean())
            transforms.append(T.pipeline(pp.one_f_one_b(2, 2), loss, mesh["pp"]))
        step = fds.compose(*transforms)(fds.train_step(loss, fds.sgd(0.1)))
        found = fds.profile(step, skip=0, every=1, flops=False, tokens=lambda batch: fds.tree.leaves(batch)[0].numel())
        state = step.init([params, params] if "pp" in axes else params)
        found(state, (batch,) if "pp" in axes else batch)
        return found.result()

    for found in comm.simulate(program, world_size=4)[:1]:
        assert (found.samples, found.tokens) == (6 * axes["dp"], 24 * axes["dp"])


FACTORS = {  # of nccl-tests, by n
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1,
    "reduce": lambda n: 1,
}


@settings(max_examples=settings.default.max_examples // 2)
@given(
    n=st.integers(2, 4), calls=st.lists(st.tuples(st.sampled_from(sorted(FACTORS)), st.integers(1, 3)), min_size=1, max_size=6)
)
def test_bandwidths_are_those_of_nccl_tests(n: int, calls: list[tuple[str, int]]) -> None:
    """By collective and size: algbw is size over time, busbw that times the factor; together the rows are the ledger's."""
    bandwidths_agree(n, calls)


def bandwidths_agree(n: int, calls: list[tuple[str, int]]) -> None:
    def program() -> tuple[list[Row], list[Row]]:
        with comm.ledger(times=True) as book:
            for name, size in calls:
                x = torch.ones(size * n)
                getattr(comm, name)(x, **({"dst": 0} if name in ("reduce", "gather") else {"src": 0} if "cast" in name else {}))
        return book.by_size(), book.rows

    for rows, whole in comm.simulate(program, world_size=n):
        assert len(rows) == len(set(calls))
        for row in rows:
            size = row.payload // row.calls
            assert any(
                row.collective == name and size == 4 * count * n * (n if "gather" in name else 1) for name, count in calls
            )
            assert row.algorithmic_bandwidth == pytest.approx(size * row.calls / row.seconds)
            assert row.bus_bandwidth == pytest.approx(row.algorithmic_bandwidth * FACTORS[row.collective](n))
        for name in ("calls", "elements", "bytes", "payload", "timed", "seconds"):
            for each in whole:
                parts = [row for row in rows if row.collective == each.collective]
                assert sum(getattr(row, name) for row in parts) == pytest.approx(getattr(each, name))


def test_off_is_the_step_itself() -> None:
    """A plain step runs as it is: no phase is wrapped and no ledger is open."""
    step = fds.train_step(loss_fn, fds.sgd(0.1))
    found = fds.profile(step, skip=1, every=3)
    state, kinds = step.init({"a": torch.ones(3, 4), "b": torch.ones(4, 2)}), []
    for _ in range(8):
        with found.call(state, torch.ones(2, 3)) as given:
            kinds.append((given is step, len(comm.world().world.ledgers)))
            state, _ = given(state, torch.ones(2, 3))
    off, counts, detail = (True, 0), (False, 0), (False, 1)
    assert kinds == [off, counts, detail, off, off, detail, off, off]


def test_a_failed_step_is_no_step() -> None:
    """Nothing of it counts, no ledger stays open, and the next is measured."""
    found = profiled_run(calls=4, every=1)
    before = found.own()
    state = found.step.init({"a": torch.ones(3, 4), "b": torch.ones(4, 2)})
    with pytest.raises(RuntimeError):
        found(state, torch.ones(2, 5))
    assert comm.world().world.ledgers == []
    assert found.own().detailed == before.detailed
    assert found.own().places == before.places
    found(state, torch.ones(2, 3))
    assert found.own().detailed == before.detailed + 1


def test_a_failed_plain_step_is_no_time_between_two() -> None:
    found = profiled_run(calls=4, every=9, flops=False)
    before = found.own()
    state = found.step.init({"a": torch.ones(3, 4), "b": torch.ones(4, 2)})
    with pytest.raises(RuntimeError):
        found(state, torch.ones(2, 5))
    after = found.own()
    kept = (before.plain, before.plain_seconds, before.outside_seconds, before.samples)
    assert (after.plain, after.plain_seconds, after.outside_seconds, after.samples) == kept


def test_a_trace_has_all_ranks(tmp_path: Path) -> None:
    two_ranks().to_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {lane for (_, _), lane in lanes.items()} >= {"step", "world"}
    for rank in (0, 1):
        steps = [e for e in events if e["ph"] == "X" and e["pid"] == rank and e["name"] == "step"]
        phases = [e for e in events if e["ph"] == "X" and e["pid"] == rank and lanes[rank, e["tid"]] == "step"]
        assert len(steps) == 2
        assert all(any(s["ts"] <= e["ts"] and e["ts"] + e["dur"] <= s["ts"] + s["dur"] + 1e-3 for s in steps) for e in phases)


def test_the_text_has_all_parts() -> None:
    text = str(two_ranks())
    for words in (
        "-> zero(2, world)",
        "MFU, and HFU",
        "forward",
        "in reduce_scatter world",
        "busbw GB/s",
        "MFLOP",
        "on the host",
    ):
        assert words in text, words


def test_only_what_was_measured_is_said() -> None:
    found = profiled_run(calls=1).result()
    assert (found.ranks[0].detailed, found.ranks[0].plain, found.tokens) == (0, 0, None)
    assert {"mfu", "tflops", "tokens_per_second", "cost"}.isdisjoint(found.numbers())
    assert "ranks" in str(found)
    with pytest.raises(ValueError, match="no step was timed in detail yet; make more steps"):
        found.to_trace("nowhere.json")


def test_bad_arguments_are_refused() -> None:
    step = fds.train_step(loss_fn, fds.sgd(0.1))
    for name, value in {"skip": -1, "every": 0, "keep": 0, "every ": True}.items():
        with pytest.raises(ValueError, match=f"{name.strip()}={value}: pass a whole number"):
            fds.profile(step, **{name.strip(): value})
    with pytest.raises(TypeError, match=r"profile: step=<function loss_fn.* is not a Step; pass what"):
        fds.profile(loss_fn)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"size=0, seconds=0\.2: pass positive numbers"):
        peak_flops(size=0)


def test_another_threads_steps_are_refused() -> None:
    found, errors = profiled_run(calls=1), list[str]()

    def run() -> None:
        try:
            found(found.step.init({"a": torch.ones(3, 4), "b": torch.ones(4, 2)}), torch.ones(2, 3))
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "call fds.profile(step) on each rank" in errors[0]


def test_fit_logs_and_writes_a_profile(tmp_path: Path) -> None:
    def program(folder: str) -> None:
        step = T.zero(1)(fds.train_step(loss_fn, fds.sgd(0.1)))
        logger = fds.fitting.CsvLog(Path(folder, "log.csv"))
        measure = Profiling(skip=1, every=2, folder=Path(folder), tokens=torch.numel)
        state = step.init({"a": torch.ones(3, 4), "b": torch.ones(4, 2)})
        logging = fds.Logging([logger], every=2, profile=measure)
        evaluation = fds.Evaluation(lambda state: {"validation": 0.0}, every=3)
        fds.fit(
            step, state, lambda _: torch.ones(4, 3), steps=6, logging=logging, evaluation=evaluation, stop=threading.Event()
        )

    comm.simulate(program, str(tmp_path), world_size=2)
    rows = [line.split(",") for line in (tmp_path / "log.csv").read_text().splitlines()[1:]]
    names = {name for step, name, _ in rows if step == "6"}
    assert names >= {"loss", "seconds_per_step", "profile/tokens_per_second", "profile/backward_seconds", "profile/bytes_sent"}
    found = json.loads((tmp_path / "profile.json").read_text())
    assert [rank["detailed"] + rank["plain"] for rank in found["ranks"]] == [4, 4]
    assert len(found["all_ranks"]) >= 4
    with pytest.raises(TypeError, match=r"profile=3: pass fds\.profiling\.Profiling"):
        fds.Logging(profile=3)  # type: ignore[arg-type]


def test_sums_of_flops() -> None:
    assert sum([Flops(1, 2, 3, 4), Flops(5)], Flops()) == Flops(6, 2, 3, 4)
    assert Flops(6, 2, 3, 4).total == 15
    rank: RankProfile = two_ranks().ranks[0]
    assert rank.flops_below("missing") == Flops()


def test_plain_steps_do_not_wait_for_a_device() -> None:
    """Once before the first of them; a detailed step waits wherever the place changes."""
    with simulated_cuda() as gpu:
        step = fds.train_step(loss_fn, fds.sgd(0.1))
        found = fds.profile(step, skip=1, every=4)
        state = step.init({"a": torch.ones(3, 4, device="cuda"), "b": torch.ones(4, 2, device="cuda")})
        waits = []
        for _ in range(7):
            before = len(gpu.waits)
            state, _ = found(state, torch.ones(2, 3, device="cuda"))
            waits.append(len(gpu.waits) - before)
    skipped, counted, detailed, first, second, third, again = waits
    assert (skipped, first, second, third) == (0, 1, 0, 0)
    assert min(counted, detailed) > 10
    assert again == detailed + 1  # and the end of the plain steps
