"""Where ranks live: threads of a simulator, processes over Gloo or NCCL, shapes alone, or a world of one."""
