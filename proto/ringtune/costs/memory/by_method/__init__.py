"""Memory that is a method's own: groups of all parameters, helpers, and copies of the ends of turns."""
