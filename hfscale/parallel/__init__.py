"""Implement the parallel axes (tensor, pipeline, data ...), one folder each; no folder imports another one."""
