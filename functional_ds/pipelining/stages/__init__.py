"""Pipeline stages as functions, their shapes, and the balance of layers among them."""
