"""Ask and set up this device: processor, memory, threads, libraries."""
