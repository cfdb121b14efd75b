"""The version of lowtide. In a file of its own, so that what is below the public surface can name it."""

__version__ = "0.2.0"
