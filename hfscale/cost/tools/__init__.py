"""Estimate a layout, search for the fastest one, count the bytes of a simulated step, and report the memory of a
rank.
"""
