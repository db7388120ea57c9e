"""What helpers cost: bytes of pairs and of sets of adapters, bytes on links, and seconds."""
