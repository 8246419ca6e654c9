"""Runs rows of the dispatch tables against their op's reference on this machine, each in a process of its own."""
