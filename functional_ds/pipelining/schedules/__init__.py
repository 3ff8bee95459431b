"""Pipeline schedules as data: actions, generators, dependencies and validation."""
