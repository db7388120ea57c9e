"""What a run costs: profiles of nodes and links, seconds, bytes of memory."""
