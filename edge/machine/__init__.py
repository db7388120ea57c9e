"""The device of an agent: memory, processor, accelerator, and the numeric libraries."""
