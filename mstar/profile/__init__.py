"""Measuring inside a process: stage times of the worker's loop. Standard library only."""
