"""Compilation of a module's blocks by torch.compile, and reports of what was compiled and why again."""
