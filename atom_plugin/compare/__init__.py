"""``atom-plugin compare``: accuracy, agreement and speed of two variants of one model, and what follows."""
