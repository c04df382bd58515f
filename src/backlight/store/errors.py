"""Errors that the store raises on purpose; each message names the way out."""

from __future__ import annotations


class StoreError(Exception):
    """Base of the store's errors."""


class RunFormatError(StoreError):
    """A folder or file is foreign, damaged, truncated or of another format version."""


class RunExistsError(StoreError):
    """The folder cannot take this run: it holds something else, or a living process writes it."""


class RunHeldError(RunExistsError):
    """The folder holds a run of the same script, which is continued only on request."""


class RunWriteError(StoreError):
    """The file system refuses a change."""


class RunPathError(RunWriteError):
    """The path of a run cannot be that of a folder, on any disk."""


class ExportError(StoreError):
    """An export cannot be made: unknown file type, a missing library, or a target that exists."""
