"""Loads dumps of every kind: black boxes, dumps of torch and torchcomms.

    result = load_paths(["dumps/"], LoadOptions())
    result.traces   # one RankTrace per rank, in rank order; they share the tables of names, sizes and stacks
    result.files    # a note on every file

An unreadable file is a note in `files` and not an exception. See `load_paths` for errors.
"""

from allranks.load.loading import load_paths
from allranks.load.sources import LoadOptions, LoadResult

__all__ = ["LoadOptions", "LoadResult", "load_paths"]
