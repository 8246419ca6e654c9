"""Block sizes and split counts of the MLA Triton kernel: from the architecture, the shapes and the bounds only.

What was tried on an H200 beside the sweep (``benchmarks/mla_decode.py --sweep``), expected and found, microseconds:

- 12 heads, 8,192 keys: scores in two chains of products and four warps, so that Q is read half as often. Expected
  50 -> 43 at batch 16; found 50.5 -> 49.1, and 163 -> 152 at batch 64, which is 0.90 of the limit.
- A request's bounds read at once, all splits reduced at once, the reduction launched early: expected 16.6 -> 12.5 at
  batch 1, found 14.7; expected 49 -> 46.5 at batch 16, found nothing.
- 64 rows, 2 tiles in shared memory, which leaves no room for a third: the next tile asked into the L2 in bulk. Expected
  180 -> 140 (loads would be hidden), found 183: the products and the softmax between them are what takes the time.
- 64 rows, 32 keys and 3 or 4 tiles, which hides the loads: expected 180 -> 140, found 200.
- 32 rows in four warps instead of eight: found 102 -> 67.
- Keys as the rows of both products: their operands need 242 KB of shared memory at 64 rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_MOST_SPLITS = 128
_FEWEST_KEYS_OF_A_SPLIT = 128
_MOST_WAVES = 4
_GOOD_ENOUGH = 0.95


@dataclass(frozen=True, kw_only=True)
class Config:
    """How a launch is cut.

    ``rows``: (query, head) pairs of a program. ``keys``: latent rows of a tile. ``per_multiprocessor``: programs that
    fit on one at a time. ``splits``: programs that share the keys of a request. ``min_tiles``: a split takes at least
    as many, so that a short request leaves splits empty instead of being cut to shreds.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    per_multiprocessor: int
    splits: int = 1
    min_tiles: int = 1


def choose_tiles(arch: str, num_rows: int, q_itemsize: int, kv_itemsize: int) -> Config:
    """Return the unsplit launch for requests of at most ``num_rows`` (query, head) pairs.

    Those of sm90 were the fastest of a sweep on an H200. Each choice compiles without spills for latent rows of 512 +
    64 columns, but for an FP8 cache and 64 rows on sm90: under 200 bytes a thread, and still the fastest (12 heads,
    query length 4, 16 x 8,192 keys: 126 against 138 us).
    """
    if q_itemsize == 4:
        warps = 4 if arch.startswith("gfx") else 8
        return Config(rows=16, keys=16, warps=warps, stages=1, per_multiprocessor=1)
    if arch.startswith("gfx"):
        rows, keys = (16, 32) if num_rows <= 16 else (32, 16)
        return Config(rows=rows, keys=keys, warps=4, stages=2, per_multiprocessor=1)
    if arch != "sm90":
        return Config(rows=16, keys=32, warps=4, stages=3, per_multiprocessor=2)
    if num_rows <= 16 and kv_itemsize == 1:
        return Config(rows=16, keys=32, warps=4, stages=4, per_multiprocessor=2)
    if num_rows <= 16:
        return Config(rows=16, keys=64, warps=4, stages=3, per_multiprocessor=1)
    if num_rows <= 32 and kv_itemsize == 2:
        return Config(rows=32, keys=32, warps=4, stages=3, per_multiprocessor=2)
    return Config(rows=64, keys=64, warps=8, stages=2, per_multiprocessor=1)


def split(tiles: Config, *, num_requests: int, num_rows: int, max_seq_len: int, num_multiprocessors: int) -> Config:
    """Return ``tiles`` with a split count that fills ``num_multiprocessors``; lengths are known as a bound only."""
    min_tiles = max(1, _FEWEST_KEYS_OF_A_SPLIT // tiles.keys)
    most = max(1, min(_MOST_SPLITS, -(-max_seq_len // (tiles.keys * min_tiles))))
    programs = max(1, num_requests * -(-num_rows // tiles.rows))
    at_once = num_multiprocessors * tiles.per_multiprocessor
    if programs * most <= at_once:
        return replace(tiles, splits=most, min_tiles=min_tiles)
    candidates = range(1, min(most, max(1, _MOST_WAVES * at_once // programs)) + 1)
    busy = [programs * splits / (-(-programs * splits // at_once) * at_once) for splits in candidates]
    enough = _GOOD_ENOUGH * max(busy)
    splits = next(splits for splits, share in zip(candidates, busy, strict=True) if share >= enough)
    return replace(tiles, splits=splits, min_tiles=min_tiles)
