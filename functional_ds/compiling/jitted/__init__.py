"""Steps that run as graphs: which graph, agreed on by the ranks, as which code."""
