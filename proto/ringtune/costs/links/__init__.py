"""What links cost: assumed before they are measured, and corrected by what runs recorded."""
