"""Check whether this machine is fit to be a node or a coordinator, without starting or loading anything heavy."""
