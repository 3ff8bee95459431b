"""Tensor, sequence (context) and expert parallelism of a model: functions of tensors that hold slices, sequences or experts."""
