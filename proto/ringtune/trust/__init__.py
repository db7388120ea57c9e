"""Who somebody is and what they may ask for: names in certificates, tokens, permissions. Nothing here connects."""
