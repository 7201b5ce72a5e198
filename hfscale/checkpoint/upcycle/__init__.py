"""Upcycle a dense model to a mixture of experts."""
