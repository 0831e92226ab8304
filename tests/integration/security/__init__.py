"""Attacks by other accounts of the machine on real jobs."""
