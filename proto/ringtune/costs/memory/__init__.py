"""What a node needs of memory, in terms that planner, refusals and simulator add up."""
