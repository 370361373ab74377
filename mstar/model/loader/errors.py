"""What goes wrong with a checkpoint. Pure Python, any process."""


class CheckpointError(Exception):
    """A checkpoint cannot be found, fetched, read or used. The message says what was asked, what was found and what to
    change; the command line shows it without a traceback."""
