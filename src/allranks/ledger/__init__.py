"""Where the time of a job went: the ledger of each rank's seconds, what slow ranks cost, nodes across jobs, advice.

Agents feed the ledger with what they sample anyway (`agent.py`); everything that decides is pure.
"""
