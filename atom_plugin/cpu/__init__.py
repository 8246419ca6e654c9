"""What SGLang needs to serve on a CPU without its own CPU build: a platform class and a few hooks."""

# SGLang resolves its platform while it is imported, and that imports ``srt_platform``. Whoever asks for that module
# first would start SGLang's import from the middle of it; here it runs to its end before.
import sglang  # noqa: F401
