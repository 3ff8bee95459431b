"""Costs and timelines of a schedule, drawings, and the search for a faster schedule."""
