"""Reductions in memory that the ranks of one machine share."""
