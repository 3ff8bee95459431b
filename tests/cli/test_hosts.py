"""Hostfiles become torchrun's commands; filters are DeepSpeed's."""

import os
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from functional_ds.cli.hosts_command import HostSlots, _check_host, ssh_commands
from functional_ds.cli.words.errors_in_one_line import CommandError
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
    assert out.startswith("ssh -- worker-0 'cd ")
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
    [
        ("a slots=2\na slots=2\n", "line 2: the host 'a' occurs twice"),
        ("a 2\n", "line 1: 'a 2'"),
        ("#\n", "names no hosts"),
        ("a slots=00\n", "line 1: 'a slots=00' should be"),
        ("-oProxyCommand=touch${IFS}x slots=1\n", "line 1: '-oProxyCommand=touch${IFS}x' is not a host's name or address"),
        ("a\nb;ls slots=1\n", "line 1: 'a' should be"),
        ("b;ls slots=1\n", "'b;ls' is not a host's name"),
        ("me@a slots=1\n", "'me@a' is not a host's name or address"),
        ("a: slots=1\n", "'a:' is not a host's name"),
        ("a:22 slots=1\n", "a user or a port belongs into ssh's config"),
        ("a- slots=1\n", "'a-' is not a host's name"),
        (f"{'a' * 254} slots=1\n", "is not a host's name"),
        (f"a slots={10**12}\n", "line 1: slots=1000000000000: a host has at most 4096"),
        (f"a slots={'9' * 5000}\n", "slots=99999999999999999999: a host has at most 4096"),
    ],
)
def test_wrong_hostfiles(tmp_path: Path, text: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hostfile").write_text(text)
    assert says in refusal(capsys, "hosts", tmp_path / "hostfile")
    assert "there is no file" in refusal(capsys, "hosts", tmp_path / "none")


def test_a_hostfile_larger_than_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hostfile").touch()
    os.truncate(tmp_path / "hostfile", 1 << 42)
    assert "at most 67,108,864 are read" in refusal(capsys, "hosts", tmp_path / "hostfile")


@given(st.text() | st.from_regex(r"-?[a-z0-9.:@;_-]{1,9}", fullmatch=True))
def test_whatever_ssh_gets_is_a_host_and_a_quoted_command(name: str) -> None:
    """The words of each line are ssh, the end of its options, one host and one command."""
    try:
        _check_host(name, "here")
    except CommandError:
        return
    (line,) = ssh_commands([HostSlots(name, (0,), 1)], ["torchrun 'a b' $(ls)"], folder="/a b;ls")
    words = shlex.split(line)
    assert words == ["ssh", "--", name, "cd '/a b;ls' && torchrun 'a b' $(ls)"]
    assert not name.startswith("-")


@pytest.mark.parametrize("name", ["worker-0", "10.0.0.1", "fe80::1", "node_1.cluster.local", "a", "x" * 253])
def test_names_and_addresses_are_hosts(name: str) -> None:
    _check_host(name, "here")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--master-addr", "-x"], "--master-addr: '-x' is not a host's name"),
        (["--master-port", "70000"], "ports are 1 to 65535"),
    ],
)
def test_where_ranks_meet_is_a_host_and_a_port(
    hostfile: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refusal(capsys, "hosts", hostfile, *words)
