"""Hostfiles become torchrun's commands; filters are DeepSpeed's."""

from pathlib import Path

import pytest

from tests.cli.running import answer, refusal, run

HOSTS = "worker-0 slots=4  # the first\n\n# none\nworker-1 slots=4\nworker-2 slots=2\n"


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    path = tmp_path / "hostfile"
    path.write_text(HOSTS)
    return path


def test_each_host_has_a_command(hostfile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "hosts", hostfile, "--", "train.py", "--lr", "1e-3", "a b")
    assert found.keys() == {"world_size", "hosts"}
    assert found["world_size"] == 10
    assert found["hosts"][2] == {
        "host": "worker-2",
        "slots": [0, 1],
        "command": "torchrun --nnodes=3 --node-rank=2 --master-addr=worker-0 --master-port=29500 --nproc-per-node=2 "
        "train.py --lr 1e-3 'a b'",
    }


@pytest.mark.parametrize(
    ("words", "slots"),
    [
        (["--include", "worker-1"], {"worker-1": [0, 1, 2, 3]}),
        (["--include", "worker-0@worker-2:1"], {"worker-0": [0, 1, 2, 3], "worker-2": [1]}),
        (["--exclude", "worker-0@worker-1:0,3"], {"worker-1": [1, 2], "worker-2": [0, 1]}),
        (["--exclude", "worker-2:0,1"], {"worker-0": [0, 1, 2, 3], "worker-1": [0, 1, 2, 3]}),
        (["--num-nodes", "1", "--num-gpus", "2"], {"worker-0": [0, 1]}),
    ],
)
def test_filters(hostfile: Path, words: list[str], slots: dict[str, list[int]], capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "hosts", hostfile, *words)
    assert {each["host"]: each["slots"] for each in found["hosts"]} == slots
    for each in found["hosts"]:
        whole = each["slots"] == list(range(2 if each["host"] == "worker-2" else 4))
        visible = f"CUDA_VISIBLE_DEVICES={','.join(map(str, each['slots']))} "
        assert each["command"].startswith("torchrun" if whole else visible)


def test_ssh_runs_it_there(hostfile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "hosts", hostfile, "--include", "worker-0", "--ssh", "--module", "--", "job")
    assert code == 0
    assert out.startswith("ssh worker-0 'cd ")
    assert out.endswith("&& torchrun --standalone --nproc-per-node=4 -m job'\n")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--include", "worker-9"], "no host 'worker-9'; it has worker-0, worker-1, worker-2"),
        (["--include", "worker-2:2"], "the host 'worker-2' has no slot 2"),
        (["--include", "worker-2:x"], "name:slot,slot"),
        (["--include", "worker-2@worker-2"], "occurs twice"),
        (["--include", "worker-2", "--exclude", "worker-0"], "give one of them"),
        (["--exclude", "worker-0@worker-1@worker-2"], "no slots are left"),
        (["--num-nodes", "4"], "not so many"),
        (["--num-gpus", "3"], "not so many"),
    ],
)
def test_wrong_filters(hostfile: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in refusal(capsys, "hosts", hostfile, *words)


@pytest.mark.parametrize(
    ("text", "says"),
    [("a slots=2\na slots=2\n", "line 2: the host 'a' occurs twice"), ("a 2\n", "line 1: 'a 2'"), ("#\n", "names no hosts")],
)
def test_wrong_hostfiles(tmp_path: Path, text: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hostfile").write_text(text)
    assert says in refusal(capsys, "hosts", tmp_path / "hostfile")
    assert "there is no file" in refusal(capsys, "hosts", tmp_path / "none")
