"""What nodes send each other beside the hidden states of an item: parcels of helpers, gradients of replicas."""
