"""Progress of roles without collectives: an engine's metrics, CPU and logs, and how long phases usually last."""

from __future__ import annotations

from allranks.watch.role_progress import EngineMetrics, PhaseHistory, RoleWork, parse_metrics

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:generation_tokens_total{engine="0",model_name="m"} 1.5e+03
vllm:prompt_tokens_total{engine="0",model_name="m"} 40.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 7.0
vllm:time_to_first_token_seconds_bucket{le="0.001"} 9.0
"""


def test_requests_and_tokens_of_an_engine_are_read() -> None:
    assert parse_metrics(VLLM) == EngineMetrics(served=1547.0, open=3.0)
    sglang = 'sglang:num_running_reqs{tp_rank="0"} 4\nsglang:generation_tokens_total{tp_rank="0"} 12\n'
    assert parse_metrics(sglang) == EngineMetrics(served=12.0, open=4.0)
    assert parse_metrics("python_gc_objects_collected_total 3\n") is None


def test_an_engine_with_requests_moves_when_it_serves_and_an_idle_one_says_nothing() -> None:
    first = RoleWork().after(0.0, (0, 0), 0, EngineMetrics(10, 2))
    assert (first.moves, first.certain) == (0, True)
    served = first.after(2.0, (0, 0), 0, EngineMetrics(12, 2))
    stuck = served.after(4.0, (900, 9000), 0, EngineMetrics(12, 2))  # it polls, and that does not count
    assert (served.moves, stuck.moves) == (1, 1)
    assert not stuck.after(6.0, (0, 0), 0, EngineMetrics(12, 0)).certain


def test_without_metrics_cpu_switches_or_log_lines_are_work() -> None:
    start = RoleWork().after(0.0, (100, 100), 50, None)
    assert start.after(2.0, (101, 102), 50, None).moves == 0  # woke up now and then
    assert start.after(2.0, (110, 100), 50, None).moves == 1
    assert start.after(2.0, (100, 120), 50, None).moves == 1
    assert start.after(2.0, (100, 100), 90, None).moves == 1
    assert start.after(1.0, (900, 900), 90, None) == start  # too soon to tell


def _phases(*lengths: float) -> tuple[PhaseHistory, float]:
    """A rollout engine that goes through rollout and sync; the last rollout has lasted the last length so far."""
    history, now = PhaseHistory(), 0.0
    for length in lengths:
        history = history.after(now, {7: ("rollout engine", "rollout")})
        now += length
        if length is not lengths[-1]:
            history = history.after(now, {7: ("rollout engine", "weight sync")})
            now += 1
    return history, now


def test_a_phase_that_lasts_much_longer_than_usual_is_said_once() -> None:
    history, now = _phases(360.0, 350.0, 372.0, 2460.0)
    history, lines = history.unusual(now)
    assert lines == ("rollout engine (pid 7): rollout has lasted 41 min, usually 6 min",)
    assert history.unusual(now + 60)[1] == ()


def test_a_usual_phase_and_one_without_a_history_are_not_mentioned() -> None:
    for lengths in ((360.0, 350.0, 372.0, 500.0), (360.0, 9000.0)):
        history, now = _phases(*lengths)
        assert history.unusual(now)[1] == ()
