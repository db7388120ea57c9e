"""Files and their text: read strictly, written durably, sent in chunks."""
