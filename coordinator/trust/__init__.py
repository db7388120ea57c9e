"""The coordinator's authority: who gets a certificate, and whose certificates hold no longer."""
