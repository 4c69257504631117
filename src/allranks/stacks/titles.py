"""Reads process titles of serving and training frameworks. Pure.

`sglang::scheduler_TP1_PP0_DP2_EP3` is a rank with parallel coordinates; `sglang::detokenizer` and routers are not.
"""

from __future__ import annotations

import re

#: Titles that are ranks. The first group that matches wins; coordinates are read from the rest of the title.
RANK_TITLES = (
    r"^sglang::scheduler",
    r"^VLLM::(Worker|EngineCore)",
    r"^vllm::(worker|engine)",
    r"^VllmWorker",
    r"^ray::(?!IDLE|Dashboard|StatsActor|JobSupervisor|ServeController|ProxyActor|HTTPProxy)\w",
    r"^TensorRT-?LLM::|^trtllm::",
    r"\b(pretrain_gpt|pretrain_bert|pretrain_t5|pretrain_vlm|megatron[\w/.-]*/pretrain\w*)\.py",
)
#: Titles and command lines that are never ranks: they only pass requests on.
NOT_RANKS = (
    r"^sglang::(router|http_server|tokenizer|detokenizer|data_parallel_controller|multi_tokenizer)",
    r"^VLLM::(APIServer|DPCoordinator|Router)",
    r"sglang_router|launch_router|vllm[-_]router|nginx|envoy",
    # Tools, known by the program that runs; the same word in a path or an argument says nothing.
    r"^(\S*/)?(python[\d.]*\s+(-\w+\s+)*(\S*/)?)?(py-spy|cuda-gdb|allranks(\.[\w.]+\.(liveness_proxy|spare_process))?)(\s|$)",
)
#: When nothing else is found.
FALLBACK = r"python.*sglang"
_COORDINATE = re.compile(
    r"[_:\s-](TP|PP|DP|EP|CP|SP|ETP|ATTN_TP|ATTN_DP|MOE_EP|MOE_DP)[_-]?(\d+)", re.IGNORECASE
)


def is_rank_title(title: str, patterns: tuple[str, ...] = RANK_TITLES) -> bool:
    """Whether a process of this title is a rank."""
    return any(re.search(one, title) for one in patterns) and not is_frontend(title)


def is_frontend(title: str) -> bool:
    """Whether a process of this title only passes requests on, or is a tool."""
    return any(re.search(one, title) for one in NOT_RANKS)


def coordinates(title: str) -> tuple[tuple[str, int], ...]:
    """(("tp", 1), ("pp", 0)) from a title; () when there are none."""
    words = title.split(" ")[0] if "::" in title else ""
    return tuple((name.lower(), int(number)) for name, number in _COORDINATE.findall(words))


def number_ranks(coords: list[tuple[tuple[str, int], ...]]) -> list[int]:
    """A rank number for each set of coordinates: by (dp, pp, tp) where that is unique, else in sorted order."""
    rows = [dict(one) for one in coords]
    width = {name: max((row.get(name, 0) for row in rows), default=0) + 1 for name in ("tp", "pp", "dp")}
    numbers = [
        (row.get("dp", 0) * width["pp"] + row.get("pp", 0)) * width["tp"] + row.get("tp", 0) for row in rows
    ]
    if len(set(numbers)) == len(numbers) and all(rows):
        return numbers
    order = sorted(range(len(rows)), key=lambda i: (numbers[i], sorted(rows[i].items()), i))
    result = [0] * len(rows)
    for rank, index in enumerate(order):
        result[index] = rank
    return result
