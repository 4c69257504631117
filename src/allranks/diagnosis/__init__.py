"""Dumps of all ranks in, the guilty rank and the cause out. Pure functions: no torch, files, sockets or clock.

verdict  diagnose(): all steps in order; the root cause first. Read this one first

What the job is:
align    RankTrace per rank → Job (job): groups as the whole job knows them, one lane per (group, rank), states that can be
job      the operations, and what ranks of one program share, worked out once

What does not fit, and who waits:
match    calls of one collective compared across ranks; p2p: sends and receives paired
waits    who waits in which call for whom, whether that is a hang, and where the waiting begins

Where calls differ:
alignment  the calls of a rank against the others' and its own earlier rounds: skipped, extra, swapped or changed
odd_rank   who is the odd one of a collective that does not fit

Why, as findings (context: what every rule may ask; kinds: every sentence, in one table):
absent, entered, cycles, setup  what a sink of the graph means
mismatches  calls that differ
weak_findings  what is worth saying when nothing hangs, and warnings

Besides the verdict:
divergence  calls that differ while the job runs; replay, replay_script: a recorded hang as a small program
"""

from allranks.diagnosis.verdict import DiagnoseOptions, diagnose

__all__ = ["DiagnoseOptions", "diagnose"]
