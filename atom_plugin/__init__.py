"""Model definitions and an AITER-backed attention backend for an unmodified SGLang (`--model-impl atom`)."""

from pathlib import Path

for _link in ("models", "configs"):
    if not (Path(__file__).parent / _link / "__init__.py").is_file():
        raise ImportError(
            f"atom_plugin/{_link} is not a folder: in a checkout it is a relative link to ../{_link}, which zip "
            f"downloads and some Windows checkouts lose. Clone with git, or run: ln -sfn ../{_link} atom_plugin/{_link}"
        )
