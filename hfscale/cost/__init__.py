"""Estimate the bytes that ranks hold and the seconds of a step, without running the model, and search for layouts with
these estimates.
"""
