"""Update what trains, a unit at a time, and keep the state of inactive ones."""
