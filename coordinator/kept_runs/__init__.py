"""The runs of a coordinator on its disk: what is known of each, and its events until they are fetched."""
