"""Observes the ranks of one node: samples, progress, exits, other nodes. Runs in the agent; decides nothing about incidents."""
