"""What is decided or counted for each turn: depths, operations, scores, rows that were kept."""
