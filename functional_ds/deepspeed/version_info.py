"""Which version of DeepSpeed's names are here."""

__all__ = ["git_branch", "git_hash", "installed_ops", "version"]

version = "0.19.8"
git_hash: str | None = None
git_branch: str | None = None
installed_ops: tuple[str, ...] = ()
