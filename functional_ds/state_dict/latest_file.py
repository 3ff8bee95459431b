"""The file ``latest`` in DeepSpeed's folders of checkpoints, which names the newest."""

from pathlib import Path

from functional_ds.base.disk.files import read_regular

from .errors import DamagedError

_LONGEST = 1 << 12  # bytes; a path on Linux has no more


def latest_tag(folder: Path) -> str | None:
    """The tag in the file ``latest`` of a folder; None if there is no such file.

    Raises:
        DamagedError: it cannot be read, is too long, or is not text.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "latest").write_text("global_step10\\n")
    ...     latest_tag(Path(folder))
    'global_step10'
    """
    try:
        return read_regular(folder / "latest", limit=_LONGEST).decode().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DamagedError(f"path: {folder / 'latest'} cannot be read: {error.strerror}; pass tag=") from error
    except UnicodeDecodeError as error:
        raise DamagedError(f"path: {folder / 'latest'} is not text: {error}; pass tag=") from error
