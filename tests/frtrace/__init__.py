"""Tests of frtrace."""
