"""What the user gives in place of what the planner would choose: a plan, a profile."""
