"""Features that plain training runs do not need: one package each. No code outside imports them."""
