"""Tests of the recorder: real ranks over gloo, real deaths, the black box read from outside."""
