"""Groups and worlds, pending calls, ledgers, and recorders of collectives."""
