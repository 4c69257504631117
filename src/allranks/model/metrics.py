"""Numbers in Prometheus' text format: one writer for the lighthouse's page and for a rank's own metrics. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

METRICS_KIND = "text/plain; version=0.0.4; charset=utf-8"
#: name, type, help ("": none), and the samples: one value, or one for each set of labels
Metric = tuple[str, str, str, float | Mapping[str, float]]
#: Rank-seconds by what ranks did, from the ledger of this process' agent: for /metrics and the page of the job.
SPENT: list[Callable[[], Mapping[str, float]]] = []
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def labels(**values: str) -> str:
    """A set of labels as it is written between braces."""
    return ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in values.items())


def render(metrics: Iterable[Metric]) -> Iterator[str]:
    """One line per sample, each metric with its help; names begin with `allranks_`."""
    for name, kind, text, samples in metrics:
        if text:
            yield f"# HELP allranks_{name} {text}"
        yield f"# TYPE allranks_{name} {kind}"
        for where, value in samples.items() if isinstance(samples, Mapping) else (("", samples),):
            yield f"allranks_{name}{f'{{{where}}}' if where else ''} {value}"
