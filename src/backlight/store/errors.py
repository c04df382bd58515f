"""What can go wrong with a run directory, each as one class with a message that names the way out."""

from __future__ import annotations


class StoreError(Exception):
    """Base of what the store raises on purpose."""


class RunFormatError(StoreError):
    """A folder or file is not what it should be: foreign, damaged, truncated or too new."""


class RunExistsError(StoreError):
    """The folder cannot take this run: it holds something else, or a living process writes it."""


class RunWriteError(StoreError):
    """The file system does not let us create or change what was asked for."""


class ExportError(StoreError):
    """An export cannot be made: unknown kind of file, a missing library, or a target that exists."""
