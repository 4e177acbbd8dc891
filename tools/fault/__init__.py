"""Fault injection for the run store: a preload shim, a driver that forks one child a point, a power-loss model."""
