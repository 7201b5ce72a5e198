"""Compute the bytes of a rank by kind and the seconds of a step by term, from a plan alone."""
