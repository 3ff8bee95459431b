"""Tensor, sequence and expert parallelism on the model's side: functions of tensors that hold slices, sequences or experts."""
