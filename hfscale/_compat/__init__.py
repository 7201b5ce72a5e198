"""Private names of other libraries, one library per file. No other room uses such names (ruff's SLF001 and TID251).

Each file states the versions with which its names were read and run, and detects other versions by their features.
"""
