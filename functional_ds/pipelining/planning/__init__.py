"""Costs and timelines of schedules, plots, and the search for faster schedules."""
