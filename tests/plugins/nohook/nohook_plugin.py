"""A module that announces nothing."""
