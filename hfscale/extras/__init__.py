"""Features that plain training runs do not need: one package per extension, which no other room imports."""
