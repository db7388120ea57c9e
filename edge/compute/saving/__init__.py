"""What a forward keeps for its backward: the whole graph, or only the input of a block, or projections of inputs."""
