"""Objectives of known papers over torch modules, with the names and settings of `objectives.paradigms`."""
