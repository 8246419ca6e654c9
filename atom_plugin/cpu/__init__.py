"""What SGLang needs to serve on a CPU without its own CPU build: a platform class and a few hooks."""
