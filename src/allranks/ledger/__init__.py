"""Where the time of a job went: the ledger of each rank's seconds, the cost of slow ranks, nodes across jobs, advice.

The agent writes the ledger from its samples (`agent.py`). Every decision is a pure function.
"""
