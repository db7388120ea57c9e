"""What messages of the control plane say, as types of the rules, and the other way round."""
