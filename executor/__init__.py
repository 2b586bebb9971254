"""PyTorch only here: layout, collectives, modules, pipeline, gradient sync, checkpoints, training."""
