"""Private names of other libraries: one library per file, and nowhere else (ruff's SLF001 and TID251 hold it).

A file says which versions its names were read in and run with, and asks for what differs between them.
"""
