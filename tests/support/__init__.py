"""What tests share: tiny models, references, rings, fakes."""
