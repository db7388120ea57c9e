"""Connections between processes: channels, retries, status, codecs, TLS, identities and permissions."""
