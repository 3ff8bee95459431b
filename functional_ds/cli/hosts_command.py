"""``functional-ds hosts``: torchrun commands from DeepSpeed hostfiles."""

import ipaddress
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import attrs
import typer

from functional_ds.base.disk.files import read_text

from .words.errors_in_one_line import CommandError, refused
from .words.options import existing
from .words.pages import emit

_LINE = re.compile(r"^(\S+)\s+slots=([0-9]+)$")
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")  # of a host; it never begins as an option does
_LONGEST = 253  # characters of a host's name
_MOST_SLOTS = 4096


@attrs.frozen
class HostSlots:
    """A host, and which of its devices are used.

    Attributes:
        name: as ssh and torchrun know it.
        slots: numbers of devices.
        there: how many the hostfile says that it has.
    """

    name: str
    slots: tuple[int, ...]
    there: int


def read_hostfile(path: str) -> list[HostSlots]:
    """The hosts of a file with lines ``name slots=N``, in order; ``#`` begins a comment.

    Raises:
        CommandError: no such file; a line of another form; a name that no host has; more than 4,096 slots; a host that
            occurs twice; no hosts.
    """
    file = existing(path, option="HOSTFILE")
    hosts: dict[str, HostSlots] = {}
    with refused(f"HOSTFILE: {path} cannot be read", OSError, UnicodeDecodeError):
        lines = read_text(file).splitlines()
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _LINE.match(text)
        if match is None or not match[2].strip("0"):
            raise CommandError(f"HOSTFILE: {path}, line {number}: {text!r} should be 'name slots=N'")
        if len(match[2]) > len(str(_MOST_SLOTS)) or int(match[2]) > _MOST_SLOTS:
            raise CommandError(f"HOSTFILE: {path}, line {number}: slots={match[2][:20]}: a host has at most {_MOST_SLOTS}")
        _check_host(match[1], f"HOSTFILE: {path}, line {number}")
        if match[1] in hosts:
            raise CommandError(f"HOSTFILE: {path}, line {number}: the host {match[1]!r} occurs twice")
        hosts[match[1]] = HostSlots(match[1], tuple(range(int(match[2]))), int(match[2]))
    if not hosts:
        raise CommandError(f"HOSTFILE: {path} names no hosts")
    return list(hosts.values())


def _check_host(name: str, where: str) -> None:
    """Raises an error for an invalid host name or address: ssh and torchrun would take it for an option, or for a user."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        if len(name) > _LONGEST or _NAME.fullmatch(name) is None:
            raise CommandError(
                f"{where}: {name[:80]!r} is not a host's name or address: letters, digits, '.', '-' and '_', a letter or digit "
                "first and last; a user or a port belongs into ssh's config"
            ) from None


def filtered(hosts: Sequence[HostSlots], *, include: str = "", exclude: str = "") -> list[HostSlots]:
    """The hosts and slots that filters leave: ``worker-0@worker-1:0,2`` is all of one host and two slots of another.

    Args:
        hosts: all of them.
        include: only these; empty for all.
        exclude: all but these.

    Raises:
        CommandError: both filters; a host or slot that is not there; nothing is left.

    >>> there = [HostSlots("a", (0, 1), 2), HostSlots("b", (0, 1), 2)]
    >>> [(host.name, host.slots) for host in filtered(there, exclude="a:0")]
    [('a', (1,)), ('b', (0, 1))]
    """
    if include and exclude:
        raise CommandError("--include and --exclude: give one of them")
    named = _filter("--include" if include else "--exclude", include or exclude, hosts)
    if include:
        chosen = [attrs.evolve(host, slots=named[host.name]) for host in hosts if host.name in named]
    else:
        remaining = ((host, tuple(s for s in host.slots if s not in named.get(host.name, ()))) for host in hosts)
        chosen = [attrs.evolve(host, slots=slots) for host, slots in remaining if slots]
    if not chosen:
        raise CommandError(f"--exclude {exclude}: no slots are left")
    return chosen


def _filter(option: str, text: str, hosts: Sequence[HostSlots]) -> dict[str, tuple[int, ...]]:
    known = {host.name: host for host in hosts}
    slots: dict[str, tuple[int, ...]] = {}
    for part in filter(None, text.split("@")):
        name, colon, numbers = part.partition(":")
        if name not in known:
            raise CommandError(f"{option}: the hostfile has no host {name!r}; it has {', '.join(known)}")
        if name in slots:
            raise CommandError(f"{option}: the host {name!r} occurs twice")
        if colon and not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", numbers):
            raise CommandError(f"{option}: {part!r} should be name:slot,slot")
        chosen = tuple(sorted({int(slot) for slot in numbers.split(",")})) if colon else known[name].slots
        absent = [slot for slot in chosen if slot not in known[name].slots]
        if absent:
            raise CommandError(f"{option}: the host {name!r} has no slot {absent[0]}; it has {known[name].there}")
        slots[name] = chosen
    return slots


def commands_of(
    hosts: Sequence[HostSlots],
    script: Sequence[str],
    *,
    master_addr: str | None = None,
    master_port: int = 29500,
    module: bool = False,
) -> list[str]:
    """torchrun's command for each host.

    Args:
        hosts: in the order of their ranks.
        script: the program and its arguments.
        master_addr: where ranks meet; None for the first host.
        master_port: the port there.
        module: whether the program is a module's name.

    Raises:
        CommandError: no host is called ``master_addr``; there is no such port.
    """
    if master_addr is not None:
        _check_host(master_addr, "--master-addr")
    if not 0 < master_port < 1 << 16:
        raise CommandError(f"--master-port {master_port}: ports are 1 to 65535")
    commands = []
    for place, host in enumerate(hosts):
        words = ["torchrun"]
        if len(hosts) == 1 and master_addr is None:
            words += ["--standalone"]
        else:
            words += [f"--nnodes={len(hosts)}", f"--node-rank={place}"]
            words += [f"--master-addr={master_addr or hosts[0].name}", f"--master-port={master_port}"]
        words += [f"--nproc-per-node={len(host.slots)}", *(["-m"] if module else []), *script]
        some = host.slots != tuple(range(host.there))
        commands.append((f"CUDA_VISIBLE_DEVICES={','.join(map(str, host.slots))} " if some else "") + shlex.join(words))
    return commands


def ssh_commands(hosts: Sequence[HostSlots], commands: Sequence[str], *, folder: str) -> list[str]:
    """The commands by which ssh runs one command on each host, in a folder there.

    >>> print(*ssh_commands([HostSlots("worker-0", (0,), 1)], ["torchrun train.py"], folder="/runs"))
    ssh -- worker-0 'cd /runs && torchrun train.py'
    """
    inner = (f"cd {shlex.quote(folder)} && {command}" for command in commands)
    return [shlex.join(["ssh", "--", host.name, line]) for host, line in zip(hosts, inner, strict=True)]


def hosts(
    hostfile: Annotated[str, typer.Argument(metavar="HOSTFILE", help="Lines of the form 'name slots=N'.")],
    script: Annotated[list[str] | None, typer.Argument(metavar="[--] SCRIPT [ARGS]...", help="What to run.")] = None,
    include: Annotated[str, typer.Option(help="Only these: host, host:slot,slot, joined by @.")] = "",
    exclude: Annotated[str, typer.Option(help="The hosts or slots to leave out, in the same form.")] = "",
    num_nodes: Annotated[int, typer.Option(min=0, help="Only the first so many hosts; 0 for all.")] = 0,
    num_gpus: Annotated[int, typer.Option(min=0, help="Only the first so many slots of each host; 0 for all.")] = 0,
    master_addr: Annotated[str | None, typer.Option(help="Where ranks meet; the first host by default.")] = None,
    master_port: Annotated[int, typer.Option(help="The port there.")] = 29500,
    module: Annotated[bool, typer.Option("--module", help="SCRIPT is a module's name.")] = False,
    ssh: Annotated[bool, typer.Option("--ssh", help="Print commands that ssh runs in this folder.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Print the torchrun command of each host of a DeepSpeed hostfile.

    \b
    Examples:
      functional-ds hosts hostfile -- train.py --epochs 3
      functional-ds hosts hostfile --include worker-0@worker-1:0,2 -- train.py
      functional-ds hosts hostfile --ssh -- train.py | parallel
    """
    chosen = filtered(read_hostfile(hostfile), include=include, exclude=exclude)
    if num_nodes > len(chosen) or (num_gpus and num_gpus > min(len(host.slots) for host in chosen)):
        raise CommandError(f"--num-nodes {num_nodes}, --num-gpus {num_gpus}: there are not so many")
    chosen = chosen[: num_nodes or None]
    chosen = [attrs.evolve(host, slots=host.slots[: num_gpus or None]) for host in chosen]
    lines = commands_of(chosen, script or ["SCRIPT"], master_addr=master_addr, master_port=master_port, module=module)
    if ssh:
        lines = ssh_commands(chosen, lines, folder=str(Path.cwd()))
    ranks = sum(len(host.slots) for host in chosen)
    data: dict[str, Any] = {
        "world_size": ranks,
        "hosts": [
            {"host": host.name, "slots": list(host.slots), "command": line} for host, line in zip(chosen, lines, strict=True)
        ],
    }
    emit(["\n".join(lines)], data, as_json=as_json)
    return 0
