"""What a step computes over its ranks from the mesh axes of its transforms: sums, norms, shards of batches."""
