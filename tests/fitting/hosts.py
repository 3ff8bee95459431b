"""Two hosts on this one: network namespaces, joined by a cable that can be cut. Linux, and root's rights, are needed."""

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence

import attrs

__all__ = ["UNLIMITED", "Hosts", "joined", "shaping", "why_not"]

UNLIMITED = "unlimited"


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=True)


def why_not() -> str | None:
    """Why there can be no namespaces here; None where there can."""
    name = f"fds-try-{os.getpid()}"
    try:
        _run("ip", "netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces here: {getattr(error, 'stderr', None) or error}".strip()
    try:
        _run("ip", "-n", name, "link", "add", "name", "fds0", "type", "veth", "peer", "name", "fds1")
    except subprocess.CalledProcessError as error:
        return f"no cables between network namespaces here: {error.stderr.strip()}"
    finally:
        _run("ip", "netns", "del", name)
    return None


def shaping(rate: str) -> list[str]:
    """The command that gives a host's end of the cable a speed, such as "1gbit", by a token bucket; or ``UNLIMITED``."""
    if rate == UNLIMITED:
        return ["tc", "qdisc", "replace", "dev", "cable", "root", "noqueue"]
    return ["tc", "qdisc", "replace", "dev", "cable", "root", "tbf", "rate", rate, "burst", "5mb", "latency", "50ms"]


@attrs.frozen
class Hosts:
    """Names of two namespaces, and the addresses of each in the net between them."""

    names: tuple[str, str]
    addresses: tuple[str, str] = ("10.77.0.1", "10.77.0.2")

    def command(self, host: int, words: Sequence[str]) -> list[str]:
        """A command, run on a host."""
        return ["ip", "netns", "exec", self.names[host], *words]

    def cut(self) -> None:
        """Takes the cable out of the first host: nothing arrives any more, and nobody is told."""
        _run("ip", "-n", self.names[0], "link", "set", "cable", "down")

    def limit(self, host: int, rate: str) -> None:
        """Gives what the host sends a speed."""
        _run(*self.command(host, shaping(rate)))

    def mend(self) -> None:
        """Puts it back."""
        _run("ip", "-n", self.names[0], "link", "set", "cable", "up")


@contextlib.contextmanager
def joined() -> Iterator[Hosts]:
    """Two hosts with a cable between them; gone after the block."""
    hosts = Hosts((f"fds-a-{os.getpid()}", f"fds-b-{os.getpid()}"))
    made: list[str] = []
    try:
        for name in hosts.names:
            _run("ip", "netns", "add", name)
            made.append(name)
        first, second = hosts.names
        _run("ip", "-n", first, "link", "add", "name", "cable", "type", "veth", "peer", "name", "cable", "netns", second)
        for name, address in zip(hosts.names, hosts.addresses, strict=True):
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                _run("ip", "-n", name, "link", "set", device, "up")
        yield hosts
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
