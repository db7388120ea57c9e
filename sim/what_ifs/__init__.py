"""Questions to the simulator: other speeds, other members, many of them at once, and where helpers begin to pay."""
