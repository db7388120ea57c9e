"""Who may look at pages and figures."""
