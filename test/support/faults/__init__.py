"""Faults that tests put into a real instance. `declared` is the vocabulary; `instance_faults` the door."""
