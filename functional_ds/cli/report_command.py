"""``functional-ds report``: a summary of this machine and installation, to paste into an issue."""

import os
import platform
import resource
import shutil
import sys
from collections.abc import Mapping
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from .words.pages import OutputTable, bytes_of, emit

_PACKAGES = (
    *("torch", "numpy", "attrs", "optree", "safetensors", "transformers"),
    *("tensorboard", "wandb", "matplotlib", "hjson", "deepspeed", "triton"),
)
_READ = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_LAUNCH_BLOCKING", "DEEPSPEED_LOG_LEVEL", "FUNCTIONAL_DS_TRACEBACK"),
)
_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "TORCHELASTIC_", "PYTORCH_", "UCX_", "FI_")
_IGNORED = ("DS_", "DEEPSPEED_", "ACCELERATE_", "NVTE_")  # read by other libraries, and by nothing here
_SECRET = ("TOKEN", "SECRET", "PASSWORD", "KEY", "CREDENTIAL")
_LIMITS = {"open files": "RLIMIT_NOFILE", "processes": "RLIMIT_NPROC", "locked memory": "RLIMIT_MEMLOCK", "core": "RLIMIT_CORE"}
_CPU = Path("/proc/cpuinfo")
_SHARED, _FILES = 1 << 30, 4096  # less of either stops data loaders or many ranks


def environment(given: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The variables that this library or its dependencies read, with their values, and names that nothing reads.

    >>> environment({"NCCL_DEBUG": "INFO", "DS_SKIP_CUDA_CHECK": "1", "NCCL_AUTH_TOKEN": "x", "HOME": "/root"})
    ({'NCCL_AUTH_TOKEN': '(set)', 'NCCL_DEBUG': 'INFO'}, ['DS_SKIP_CUDA_CHECK'])
    """
    read = {name for name in given if name in _READ or name.startswith(_PREFIXES)}
    shown = {name: "(set)" if any(word in name for word in _SECRET) else given[name] for name in sorted(read)}
    return shown, sorted(name for name in given if name.startswith(_IGNORED) and name not in read)


def warnings_of(facts: Mapping[str, Any]) -> list[str]:
    """What in a report is likely to cost time or to fail."""
    words, env = [], facts["environment"]["set"]
    shm = facts["memory"]["shm_total"]
    if shm is not None and shm < _SHARED:
        words.append(f"/dev/shm has {bytes_of(shm)}: data loaders with workers and NCCL want 1 GB or more (--shm-size)")
    files = facts["limits"]["open files"]
    if files != "unlimited" and files < _FILES:
        words.append(f"{files} open files are allowed: raise it with ulimit -n")
    if int(env.get("WORLD_SIZE", "1") if env.get("WORLD_SIZE", "1").isdigit() else 1) > 1 and "OMP_NUM_THREADS" not in env:
        words.append("OMP_NUM_THREADS is not set, so each rank starts a thread for each core")
    if env.get("CUDA_LAUNCH_BLOCKING") == "1":
        words.append("CUDA_LAUNCH_BLOCKING=1: nothing overlaps")
    if "RANK" in env and "LOCAL_RANK" not in env:
        words.append("RANK is set and LOCAL_RANK is not: ranks of one host would share a device")
    if not facts["devices"] and facts["versions"].get("cuda"):
        words.append("torch was built for CUDA, and sees no device: driver, or CUDA_VISIBLE_DEVICES")
    if facts["memory"]["bf16"] is False and not facts["devices"]:
        words.append("this CPU has no bf16 arithmetic: use fp32 here")
    if facts["environment"]["ignored"]:
        words.append(f"nothing here reads {', '.join(facts['environment']['ignored'])}")
    return words


def _versions() -> dict[str, str | None]:
    installed = {str(distribution.name).lower(): distribution.version for distribution in distributions()}
    where = platform.system(), platform.release().partition("-")[0], platform.machine(), *platform.libc_ver()
    nccl = torch.cuda.is_available() and dist.is_available() and dist.is_nccl_available()
    return {
        "functional-ds": version("functional-ds"),
        "python": platform.python_version(),
        **{name: installed.get(name) for name in _PACKAGES},
        "cuda": torch.version.cuda,
        "platform": " ".join(where).strip(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,
    }


def _devices() -> list[dict[str, Any]]:
    devices = []
    for index in range(torch.cuda.device_count()):
        its = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        devices.append(
            {"index": index, "name": its.name, "capability": f"{its.major}.{its.minor}", "memory": total, "free": free}
        )
    return devices


def _memory() -> dict[str, Any]:
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    bf16 = bool({"avx512_bf16", "amx_bf16"} & _cpu_flags()) if _cpu_flags() else None
    return {
        "host_total": pages * size,
        "shm_total": shm.total if shm else None,
        "shm_free": shm.free if shm else None,
        "cores": os.cpu_count(),
        "cores_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "bf16": bf16,
    }


def _cpu_flags() -> set[str]:
    """What the processor can; empty where the system does not say."""
    if not _CPU.is_file():
        return set()
    text = _CPU.read_text(encoding="utf-8", errors="replace")
    return {word for line in text.splitlines() if line.startswith(("flags", "Features")) for word in line.split()}


def _limits() -> dict[str, int | str]:
    limits: dict[str, int | str] = {}
    for name, constant in _LIMITS.items():
        soft = resource.getrlimit(getattr(resource, constant))[0]
        limits[name] = "unlimited" if soft == resource.RLIM_INFINITY else soft
    return limits


def report(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> int:
    """Print versions, devices, backends, memory, limits, environment variables and warnings.

    \b
    Examples:
      functional-ds report
      functional-ds report --json > report.json
    """
    shown, ignored = environment(os.environ)
    there = dist.is_available()
    facts: dict[str, Any] = {
        "versions": _versions(),
        "devices": _devices(),
        "backends": {
            "gloo": there and dist.is_gloo_available(),
            "nccl": there and dist.is_nccl_available(),
            "mpi": there and dist.is_mpi_available(),
        },
        "memory": _memory(),
        "limits": _limits(),
        "environment": {"set": shown, "ignored": ignored},
        "executable": sys.executable,
    }
    facts["warnings"] = warnings_of(facts)
    memory = facts["memory"]
    sizes = [
        (name, bytes_of(memory[name]) if memory[name] is not None else "-") for name in ("host_total", "shm_total", "shm_free")
    ]
    counts = [(name, str(memory[name])) for name in ("cores", "cores_usable", "threads", "bf16")]
    devices = [
        (str(d["index"]), d["name"], d["capability"], bytes_of(d["memory"]), bytes_of(d["free"])) for d in facts["devices"]
    ]
    emit(
        [
            OutputTable("versions", ("", ""), [(name, value or "-") for name, value in facts["versions"].items()]),
            OutputTable("devices", ("", "name", "capability", "memory", "free"), devices)
            if devices
            else "devices: none but the CPU",
            "backends: " + ", ".join(f"{name} {'yes' if yes else 'no'}" for name, yes in facts["backends"].items()),
            OutputTable("host", ("", ""), [*sizes, *counts, *((name, str(value)) for name, value in facts["limits"].items())]),
            OutputTable("environment", ("", ""), list(shown.items())) if shown else "environment: nothing is set",
            "warnings\n" + "\n".join(f"  {word}" for word in facts["warnings"]) if facts["warnings"] else "warnings: none",
        ],
        facts,
        as_json=as_json,
    )
    return 0
