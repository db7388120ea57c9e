"""Whether this machine is fit to be a node or a coordinator: checks that start nothing and load nothing heavy."""
