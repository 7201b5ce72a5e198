"""Private names of other libraries, one library per file, and nowhere else (enforced by ruff's SLF001 and TID251).

A file says with which versions its names were read and run, and detects differences between them by feature.
"""
