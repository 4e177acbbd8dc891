"""The one training loop: lifecycle, clocks, callbacks, monitors and progress, for every engine."""
