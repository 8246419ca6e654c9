"""The attention backend ``atom``."""
