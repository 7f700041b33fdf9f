"""kvport inside other people's software. Each module needs its own extra and is imported by name only."""
