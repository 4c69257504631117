"""Three small dumps of torch's flight recorder, to try things with: `allranks.diagnose(allranks.examples.missing_rank)`."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent

#: One rank of four never enters an all_reduce.
missing_rank = _HERE / "missing_rank"
#: One rank stops in a tensor parallel group, and ranks of other groups wait behind it.
cascade = _HERE / "cascade"
#: A healthy pipeline: nothing is wrong.
pipeline_healthy = _HERE / "pipeline_healthy"
