"""The parallel axes, one folder each; none imports another."""
