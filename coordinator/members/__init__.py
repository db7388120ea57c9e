"""Who is a member, under which address, and who takes part in a run."""
