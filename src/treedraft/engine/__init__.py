"""Decides what runs: requests, scheduling and text, in host integers only."""
