"""Install the wheel into an empty environment and train with it, outside of any checkout."""
