"""Hypothesis profiles: ``default`` for every run, ``laws`` (HYPOTHESIS_PROFILE=laws) with many more examples."""

import os

from hypothesis import HealthCheck, settings

# Drawing trees of tensors is slow at first, when torch warms up; that says nothing about the strategies.
_COMMON = {"deadline": None, "derandomize": "CI" in os.environ, "suppress_health_check": [HealthCheck.too_slow]}

settings.register_profile("default", max_examples=10, **_COMMON)
settings.register_profile("laws", max_examples=500, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
