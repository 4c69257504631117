"""Tests of allranks.stacks: captured cases, pure parts, and real victims."""
