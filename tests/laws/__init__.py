"""What holds for every feature of a run: one file a law, each carried out with the features of ``tests.features``."""
