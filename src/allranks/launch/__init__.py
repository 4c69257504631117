"""Starts the ranks of one node: torchrun, replicas, spares, Slurm, etcd. Runs in the agent."""
