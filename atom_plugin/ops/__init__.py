"""Kernels behind dispatch tables; nothing here knows SGLang, and AITER is reached through aiter_lib alone."""
