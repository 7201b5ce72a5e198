"""Features that plain training runs do not need: one package each, imported by no code outside this folder."""
