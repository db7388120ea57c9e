"""A demonstration that needs nothing but the package index: a real model and real sentences, on local nodes."""
