"""What the user asks for: layouts, levers of memory, precision, routing, and the environment of a launcher."""
