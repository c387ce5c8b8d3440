"""Measurements behind `treedraft bench`."""
