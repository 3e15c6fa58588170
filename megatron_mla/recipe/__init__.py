"""Training runs: strict YAML -> configuration -> model, optimiser, data, loop, checkpoints."""
