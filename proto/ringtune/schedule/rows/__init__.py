"""Which rows form which batch, drawn from the seed of the run."""
