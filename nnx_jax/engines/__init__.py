"""Engines: adapters of one framework each to the one loop."""
