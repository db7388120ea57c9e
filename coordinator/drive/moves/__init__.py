"""Drive a run to another placement: as it is planned, as boards change their pace, or without nodes that are lost."""
