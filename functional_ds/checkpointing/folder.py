"""A folder of checkpoints: what is in it, and which is the newest."""

from pathlib import Path

__all__ = ["latest", "tags", "verify"]


def tags(path: str | Path) -> list[str]:
    """The tags of the checkpoints in a folder that can be opened, oldest first; none where there is no folder."""
    raise NotImplementedError


def latest(path: str | Path) -> str | None:
    """The tag that ``load`` would try first, None where there is no checkpoint. Local: reads manifests only."""
    raise NotImplementedError


def verify(path: str | Path, tag: str | None = None) -> None:
    """Reads every byte of a checkpoint and raises DamagedError, which names the file, where one is wrong. Local."""
    raise NotImplementedError
