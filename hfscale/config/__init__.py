"""Define the user's options: layouts, memory, precision and routing; and read the launcher's environment variables."""
