"""Run store: the only code that touches the disk for a run (directory, history, checkpoints, commit, lease, resume)."""
