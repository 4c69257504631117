"""The agent: one per node. Starts the ranks, reads their black boxes, notices hangs, gathers evidence."""
