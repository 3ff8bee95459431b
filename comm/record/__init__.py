"""Collectives as records, the table of them, groups, permutations, reductions, ledgers and errors."""
