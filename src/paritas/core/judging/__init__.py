"""Observations and evidence in, findings out: compare, judge, explain."""
