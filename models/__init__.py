"""One architecture a file; what SGLang builds under `--model-impl atom`."""
