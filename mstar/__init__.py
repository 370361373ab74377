"""M*: one runtime that serves composite models. This module holds the version and imports nothing, in every process."""

__version__ = "0.1.0"
