"""What a coordinator has now, as tables and as JSON: its members, its runs, what it does."""
