"""What makes a slice fit its board: limits of memory, how activations are saved, how frozen weights are held."""
