"""Values followed through a program: what each is along groups of ranks, by its bits and by the operations that made it."""
