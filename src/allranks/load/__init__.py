"""Dumps of every kind → the model: black boxes, torch pickles and JSON, torchcomms. All version tests live here.

    result = load_paths(["dumps/"], LoadOptions())
    result.traces   # one RankTrace per rank, in rank order; they share the tables of names, sizes and stacks
    result.files    # what became of every file

A file that cannot be read is a note in `files`, never an exception. InputError only for a path that does not exist
and for an attempt that is not there.
"""

from allranks.load.loading import load_paths
from allranks.load.sources import LoadOptions, LoadResult

__all__ = ["LoadOptions", "LoadResult", "load_paths"]
