"""The axes of a layout, a folder each; none imports another."""
