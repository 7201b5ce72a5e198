"""Define the user's options (layouts, memory, precision, routing of tokens to experts), and read the launcher's
environment variables.
"""
