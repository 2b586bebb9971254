"""The supervisor of `plait train`: it starts workers, watches them, and goes on when some are lost."""
