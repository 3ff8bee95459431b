"""Pipeline stages as functions, their shapes, and load balancing of layers."""
