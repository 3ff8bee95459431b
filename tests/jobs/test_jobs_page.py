"""docs/command-line.md says of each entry what the records say."""

import functional_ds as fds
from tests.jobs.jobs_page import PAGE, written


def test_the_page_is_the_records() -> None:
    """`python -m tests.jobs.jobs_page --write` renews it."""
    page = PAGE.read_text(encoding="utf-8")
    assert written(page) == page


def test_the_main_job_is_a_file_that_is_written_back() -> None:
    job = fds.load_job(PAGE.parents[1] / "examples/train_gpt.toml")
    assert eval(repr(job), {name: getattr(fds.jobs, name) for name in fds.jobs.__all__}) == job
    assert (job.ranks, job.strategy[1].arguments) == (2, {"stage": 3})
    fds.jobs.check_job(job)
