"""Tests of tiered checkpoints, on real storage."""
