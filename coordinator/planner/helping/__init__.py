"""Who helps whom, where the planner chooses it."""
