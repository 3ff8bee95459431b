"""Cutting any module into stages: its graph, where to cut, and what each part runs."""
