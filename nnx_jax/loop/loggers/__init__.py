"""Loggers: callbacks that write what a run measures to where other tools look for it."""
