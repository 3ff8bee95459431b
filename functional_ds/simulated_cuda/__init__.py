"""A simulated CUDA device on the CPU, which names races, early frees and hidden synchronisation."""
