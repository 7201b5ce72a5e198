"""Estimate what a run costs: models of bytes and seconds, and the tools that use them."""
