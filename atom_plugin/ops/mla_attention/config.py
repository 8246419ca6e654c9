"""Block sizes and split counts of the MLA Triton kernel: from the architecture, the shapes and the bounds only."""

from __future__ import annotations

from dataclasses import dataclass

_MOST_SPLITS = 128
_LDS_BYTES = {"gfx942": 64 << 10, "gfx950": 160 << 10}


@dataclass(frozen=True, kw_only=True)
class Config:
    """How a launch is cut.

    ``rows``: (query, head) pairs of a program. ``keys``: latent rows of a tile. ``keys_first``: compute the products
    transposed. ``splits``: programs that share the keys of a request. ``min_tiles``: a split takes at least as many
    tiles, so that a short request leaves splits empty instead of cutting itself to shreds.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    keys_first: bool
    splits: int
    min_tiles: int


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """The part of a Config that does not depend on the batch; ``per_multiprocessor``: programs that run at once."""

    rows: int
    keys: int
    warps: int
    stages: int
    keys_first: bool
    per_multiprocessor: int


def choose_tiles(arch: str, num_rows: int, itemsize: int) -> Tiles:
    """Return the tiles for ``num_rows`` rows a request whose products run in elements of ``itemsize`` bytes."""
    if itemsize == 4:
        return Tiles(rows=16, keys=16, warps=4, stages=1, keys_first=False, per_multiprocessor=1)
    if arch.startswith("gfx"):
        rows = 16 if num_rows <= 16 else 32
        keys = 32 if _LDS_BYTES.get(arch, 64 << 10) < 128 << 10 else 64
        return Tiles(rows=rows, keys=keys, warps=4, stages=2, keys_first=False, per_multiprocessor=1)
    if num_rows <= 16:
        return Tiles(rows=16, keys=32, warps=4, stages=3, keys_first=False, per_multiprocessor=2)
    if num_rows <= 32:
        return Tiles(rows=32, keys=32, warps=8, stages=3, keys_first=False, per_multiprocessor=1)
    return Tiles(rows=64, keys=32, warps=8, stages=3, keys_first=False, per_multiprocessor=1)


def choose_config(
    arch: str, *, num_requests: int, num_rows: int, itemsize: int, max_seq_len: int, num_multiprocessors: int
) -> Config:
    """Return the launch of ``num_requests`` requests of at most ``num_rows`` (query, head) pairs each."""
    tiles = choose_tiles(arch, num_rows, itemsize)
    programs = num_requests * -(-num_rows // tiles.rows)
    at_once = num_multiprocessors * tiles.per_multiprocessor
    min_tiles = max(1, 128 // tiles.keys)
    most = max(1, min(_MOST_SPLITS, -(-max_seq_len // (tiles.keys * min_tiles))))
    return Config(
        rows=tiles.rows,
        keys=tiles.keys,
        warps=tiles.warps,
        stages=tiles.stages,
        keys_first=tiles.keys_first,
        splits=max(1, min(most, at_once // programs)),
        min_tiles=min_tiles,
    )
