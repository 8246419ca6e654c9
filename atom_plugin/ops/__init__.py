"""Kernels behind dispatch tables; nothing here knows SGLang or AITER."""
