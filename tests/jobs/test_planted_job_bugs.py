"""Silent bugs of jobs, planted here: each breaks a test."""

from pathlib import Path
from typing import Any

import pytest

from tests.jobs import test_job_data as texts
from tests.jobs import test_job_file as files
from tests.jobs import test_run_job as runs
from tests.jobs.test_run_job import job, text
from tests.planting import Bug, planted

__all__ = ["job", "text"]  # fixtures

FILE_BUGS = [
    (
        files.test_what_is_wrong_is_named_with_its_line,
        ("[data]\nrows = 2\ncontxt = 4", 6, "there is no such entry"),
        [
            Bug(
                "unknown entries have no name",
                "jobs.entries.job_reader:_refused",
                "detail['type'] == 'extra_forbidden'",
                "False",
                Exception,
            ),
            Bug(
                "the header's line is taken",
                "jobs.entries.job_text:line_of",
                "head.count('\\n') + 1 if mark else line",
                "line or head.count('\\n') + 1",
            ),
        ],
    ),
    (
        files.test_what_is_wrong_is_named_with_its_line,
        ("strategy = [{zero = {stagee = 3}}]", 4, "there is no such argument"),
        [
            Bug(
                "unknown arguments pass",
                "jobs.entries.call_entry:check_arguments",
                "name not in parameters",
                "False",
                Exception,
            )
        ],
    ),
]


@pytest.mark.parametrize(
    ("test", "arguments", "bug"),
    [(test, arguments, bug) for test, arguments, bugs in FILE_BUGS for bug in bugs],
    ids=[bug.name for _, _, bugs in FILE_BUGS for bug in bugs],
)
def test_bugs_of_files(test: Any, arguments: tuple[Any, ...], bug: Bug, tmp_path: Path) -> None:
    test(tmp_path, *arguments)
    with planted(bug), pytest.raises((bug.shows, pytest.fail.Exception)):
        test(tmp_path, *arguments)


def test_a_default_that_is_left_out_is_the_default() -> None:
    bug = Bug(
        "the folder is left out",
        "jobs.entries.job_reader:Entries._written",
        "defaults or always or value != field.get_default(call_default_factory=True)",
        "defaults or value != field.get_default(call_default_factory=True)",
    )
    with planted(bug), pytest.raises(AssertionError):
        assert 'folder = "."' in files.Job(model="a:B", steps=1, optimizer={"sgd": 0.1}).to_toml()


RUN_BUGS = [
    Bug("all ranks take the first rows", "jobs.prepare:PreparedJob.batch", "place * rows", "0"),
    Bug("rows do not depend on the seed", "jobs.prepare:PreparedJob.batch", "self.job.seed", "0"),
    Bug("params do not depend on the seed", "jobs.job_subject:subject_of", "_seeded(job.seed)", "_seeded(0)"),
    Bug(
        "the schedule is forgotten", "jobs.strategy:strategy_of", "if job.schedule is not None:\n    ...", "if False:\n    ..."
    ),
    Bug("transforms are forgotten", "jobs.strategy:strategy_of", "job.strategy", "()"),
    Bug(
        "it is evaluated on what is trained on",
        "jobs.prepare:PreparedJob.validation",
        "self.batch('validation', index)",
        "self.batch('train', index)",
    ),
    Bug("targets are tokens", "jobs.job_data:TokenText.batch", "windows[:, 1:]", "windows[:, :-1]"),
    Bug(
        "the generator moves",
        "jobs.job_subject:_seeded",
        "with torch.random.fork_rng(devices=[]):\n    ...",
        "if True:\n    ...",
    ),
]


@pytest.mark.parametrize("bug", RUN_BUGS, ids=[bug.name for bug in RUN_BUGS])
def test_bugs_of_runs(bug: Bug, job: Any) -> None:
    def test() -> None:
        if "first rows" in bug.name:
            runs.test_losses_do_not_depend_on_ranks_or_strategy(job, [{"zero": 0}, {"clip": runs.LIMIT}], {"ranks": 2})
        elif "targets" in bug.name:
            texts.test_rows_do_not_depend_on_the_number_of_ranks.hypothesis.inner_test(0, 0, 2, "train")  # type: ignore[attr-defined]
        else:
            runs.test_a_job_has_plain_pytorchs_losses(job)

    with planted(bug), pytest.raises(AssertionError):
        test()


def test_a_resume_that_starts_anew_is_seen(job: Any, tmp_path: Path) -> None:
    keep = "saved['keep_last'] or None"
    old, new = f"{{'keep_last': {keep}}}", f"{{'keep_last': {keep}, 'resume': False}}"
    bug = Bug("checkpoints are not gone on from", "jobs.prepare:PreparedJob.checkpoints", old, new)
    with planted(bug), pytest.raises(AssertionError):
        runs.test_a_resumed_job_is_one_that_ran_through(job, tmp_path, 1)
