"""What a collective is: one record a row, with its meaning, its adjoint and its cost."""
