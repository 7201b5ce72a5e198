"""Define the user's choices: layouts, memory, precision, routing, and the launcher's environment."""
