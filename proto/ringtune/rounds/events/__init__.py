"""What the rules of rounds are told, and what they say in answer."""
