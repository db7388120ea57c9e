"""How a node or a user gets a certificate and keeps it."""
