"""The one namespace in which the project's records are registered as pytrees."""

__all__ = ["NAMESPACE"]

NAMESPACE = "functional_ds"
