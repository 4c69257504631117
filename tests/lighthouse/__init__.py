"""Tests of the lighthouse."""
