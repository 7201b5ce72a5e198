"""Bytes of a rank by kind, and seconds of a step by what they go to, from a plan. Nothing runs."""
