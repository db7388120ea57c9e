"""How a run goes on to its next placement between two turns."""
