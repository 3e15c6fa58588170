"""What several tests share: comparison of tensors, launching of ranks, golden cases."""
