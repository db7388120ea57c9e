"""A ring of real nodes with certificates, and a process that attacks one of them while it trains."""
