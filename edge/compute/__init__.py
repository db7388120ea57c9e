"""What a node computes: hosted blocks and the actions on them."""
