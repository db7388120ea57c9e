"""Record what a helper needs to fit adapters elsewhere, and put in what it sends back."""
