"""torchfrtrace's Python API, by the same names, on our own loading and matching. Never prints, never exits.

args = JobConfig().parse_args(["dumps/"])
details, version = read_dir(args)
database = build_db(details, args, version)
for collective in database.collectives:
    if not collective.pass_check:
        print(collective.profiling_name, collective.missing_ranks)
"""

from allranks.frtrace.api import Details, JobConfig, build_db, read_dir, transform_ft
from allranks.frtrace.types import (
    Collective,
    Database,
    Group,
    MatchInfo,
    MatchState,
    Membership,
    NCCLCall,
    Traceback,
    types,
)

__all__ = [
    "Collective",
    "Database",
    "Details",
    "Group",
    "JobConfig",
    "MatchInfo",
    "MatchState",
    "Membership",
    "NCCLCall",
    "Traceback",
    "build_db",
    "read_dir",
    "transform_ft",
    "types",
]
