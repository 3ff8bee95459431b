"""A simulated CUDA device on the CPU that detects races, early frees and hidden synchronisation."""
