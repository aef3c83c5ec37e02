"""Seeded mistakes: each is put into a copy of the kernels, and the emulator has to notice.

A mutation replaces a text that occurs once in a file of ``kernels/`` and names a problem on which the mistake shows.
The kernels without it pass the same problem and seeds. Every kernel that lands brings five of its own: add them to
`MUTATIONS`, and tests/test_mutations.py finds them.
"""

import inspect
import mmap
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from cuflash import _variant, bounds, testing

from . import HERE, LIMITS, Emulator, EmulatorError

SEEDS = range(3)


def check_far_rows(attention, recipe, xp=np, path=None):
    """`testing.check_bound` with keys and values whose rows lie 2^24 bytes apart: offsets leave 32 bits."""
    q, *others = recipe.arrays()
    k, v = (_far_apart(x, 2**24) for x in others)
    testing.assert_attention_close(
        attention(q, k, v, return_lse=True, **recipe.keywords), q, k, v, path=path, **recipe.keywords
    )


def check_gradient_of_lse(attention, recipe, xp=np, path=None, gradients=None):
    """`testing.check_gradient_bound` with a gradient of lse."""
    arrays, dout = recipe.arrays(), recipe.dout()
    out, lse = attention(*arrays, return_lse=True, **recipe.keywords)
    dlse = recipe.normal(4, lse.shape).astype(lse.dtype)
    grads = gradients(dout, *arrays, out, lse, dlse=dlse, **recipe.keywords)
    worst = bounds.worst(grads, bounds.backward(dout, *arrays, path=path, dlse=dlse, **recipe.keywords))
    assert worst <= 1, f"error over bound {worst}"


def _far_apart(values, pitch):
    """A copy of a matrix in memory of which only its pages are ever there."""
    length, dim = values.shape[-2:]
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    buffer = mmap.mmap(-1, length * pitch, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    far = np.ndarray((1, length, dim), values.dtype, buffer, strides=(length * pitch, pitch, values.itemsize))
    far[...] = values
    return far


def replace_once(text, old, new, name):
    """The text with ``new`` where ``old`` stands, which it must in one place."""
    if text.count(old) != 1:
        raise ValueError(f"{name}: {text.count(old)} places have: {old}")
    return text.replace(old, new)


@dataclass(frozen=True)
class Mutation:
    """A mistake in a file of ``kernels/``, and where it shows.

    Attributes
    ----------
    name : str
        What is wrong.
    file, old, new : str
        The text ``old``, which occurs once in the file, becomes ``new``.
    recipe : cuflash.testing.Recipe
        The problem.
    check : function
        Of `cuflash.testing`, or of its kind.
    engine : str
        "portable" or "sm90".
    """

    name: str
    file: str
    old: str
    new: str
    recipe: testing.Recipe
    check: object = testing.check_bound
    engine: str = "portable"

    @property
    def backward(self):
        """Whether it is about gradients."""
        return "gradients" in inspect.signature(self.check).parameters

    def overlay(self, folder):
        """Write the kernels' files that the emulator and the mistake replace to a folder; return it."""
        text = replace_once((_variant.folder() / self.file).read_text(encoding="utf-8"), self.old, self.new, self.name)
        folder = Path(folder)
        for path in HERE.glob("*.cuh"):
            shutil.copy(path, folder)
        (folder / self.file).write_text(text, encoding="utf-8")
        return folder

    def emulator(self, overlay, seed=0):
        """One whose blocks, where they stay, have all tiles of rows to work on."""
        return Emulator(seed, replace(LIMITS, processors=1), overlay, self.engine)

    def run(self, overlay, seed):
        """What the check says about the kernels of an overlay: None where all is well."""
        emulator = self.emulator(overlay, seed)
        more = {"gradients": emulator.backward} if self.backward else {}
        try:
            self.check(emulator.forward, self.recipe, np, f"portable {self.recipe.dtype}", **more)
        except (AssertionError, EmulatorError) as error:
            return f"{'bound' if isinstance(error, AssertionError) else 'emulator'}: {str(error).splitlines()[0]}"
        return None

    def caught(self, overlay):
        """What the first seed that notices anything says; None where none does."""
        return next(filter(None, (self.run(overlay, seed) for seed in SEEDS)), None)


# Three tiles of keys, the last of them part of one, and rows that see some; heads that share keys.
CAUSAL = testing.Recipe(
    heads=2, key_heads=1, queries=140, keys=150, head_dim=32, value_dim=32, dtype="float16", causal=True
)
STEEP = replace(CAUSAL, scale=4.0)  # so that a later tile outweighs an earlier one
WINDOW = replace(CAUSAL, dtype="bfloat16", causal=False, window=(20, 3))
ONE_STAGE = replace(CAUSAL, heads=1, queries=70, head_dim=192, value_dim=192)
FAR = replace(CAUSAL, heads=1)
FLOAT32 = replace(CAUSAL, heads=1, queries=40, keys=50, dtype="float32", head_dim=24, value_dim=24, scale=4.0)

HOPPER = replace(CAUSAL, heads=3, keys=200)  # four tiles of keys, two of rows
BOXED = replace(HOPPER, key_heads=3)  # heads are not packed, so that out leaves as boxes

# Gradients. Rows that see no key are in a tile with others, as are keys that no row sees; heads share keys.
GRADIENT = replace(CAUSAL, value_dim=44, keys=130)
UNSEEN_KEYS = replace(GRADIENT, causal="top-left", queries=100)
SLIDING = replace(GRADIENT, queries=300, keys=300, heads=1, causal=False, window=(0, 0))

BARRIER = "sync_threads();  // what was copied is here for all warps, and all have left what is filled next\n"
PINS = "            pin(out);\n            pin(weights);\n"
KEYS = "facts.k = args.k + args.k_strides.offset(place.batch0, place.batch1, place.head"

MUTATIONS = (
    # Barriers and waits
    Mutation("barrier_before_a_tile_removed", "forward.cu", BARRIER, "", CAUSAL),
    Mutation(
        "barrier_before_values_removed", "forward.cu",
        "sync_threads();  // the values are here, and all have left the keys", "", ONE_STAGE,
    ),
    Mutation(
        "wait_one_group_short", "forward.cu",
        f"cp_async_wait_group<0>();\n        {BARRIER}", f"cp_async_wait_group<1>();\n        {BARRIER}", CAUSAL,
    ),
    Mutation(
        "queries_not_waited_for_without_a_tile", "forward.cu",
        "cp_async_wait_group<0>();  // q, where", "// q, where", replace(CAUSAL, keys=0),
    ),
    Mutation(
        "facts_read_without_sync_warp", "forward.cu",
        "        sync_warp();\n        load_queries", "        load_queries", CAUSAL,
    ),
    Mutation(
        "out_written_over_q_without_sync_warp", "forward.cu", "    sync_warp();\n\n    store(", "\n    store(", CAUSAL,
    ),
    # Lanes, rows and columns
    Mutation(
        "maximum_of_half_the_quad", "forward.cu", "top = maximum(top, shuffle_xor(top, 2));", "", STEEP,
    ),
    Mutation("sum_of_half_the_quad", "forward.cu", "row.finish<4>();", "row.finish<2>();", CAUSAL),
    Mutation(
        "vote_of_some_lanes", "forward.cu",
        "if (!any(moved)) return;", "if (!moved || !any(moved)) return;", STEEP,
    ),
    Mutation("rows_of_the_quads_swapped", "forward.cu", "8 * half + lane / 4;", "8 * (1 - half) + lane / 4;", CAUSAL),
    Mutation(
        "columns_of_the_quad_apart", "forward.cu",
        "8 * n + lane % 4 * 2 + e % 2;", "8 * n + lane % 4 + e % 2 * 4;", CAUSAL,
    ),
    Mutation(
        "operands_swapped", "tile.cuh",
        "mma_m16n8k16(Element{}, out[block][n], a[block], b[0], b[1]);",
        "mma_m16n8k16(Element{}, out[block][n], a[block], b[1], b[0]);", CAUSAL,
    ),
    # Addresses
    Mutation("swizzle_carries", "tile.cuh", "(lane ^ (right % SPAN))", "(lane + right % SPAN)", CAUSAL),
    Mutation(
        "stage_of_the_next_tile", "forward.cu",
        "KEY_START + tile % STAGES * KEY_BYTES", "KEY_START + (tile + 1) % STAGES * KEY_BYTES", CAUSAL,
    ),
    Mutation(
        "offset_in_32_bits", "forward.cu",
        "facts.k + static_cast<int64>(t) * TILE_K * args.k_strides.row",
        "facts.k + static_cast<int>(static_cast<uint32>(t) * TILE_K * static_cast<uint32>(args.k_strides.row))",
        FAR, check_far_rows,
    ),
    Mutation(
        "key_head_of_the_query_head", "forward.cu", f"{KEYS} / args.group);", f"{KEYS});", replace(CAUSAL, queries=200),
    ),
    Mutation(
        "rows_beyond_the_last_written", "forward.cu",
        "if (warp_row + r < place.rows() && chunk * CHUNK_ELEMENTS < args.value_dim) {",
        "if (chunk * CHUNK_ELEMENTS < args.value_dim) {", CAUSAL,
    ),
    Mutation(
        "tail_keys_not_zeroed", "tile.cuh",
        "int bytes = r >= first && r < end ? clamp", "int bytes = r >= first ? clamp", CAUSAL,
    ),
    # Masks
    Mutation("mask_one_key_too_far", "forward.cu", "j >= first && j < end", "j >= first && j <= end", CAUSAL),
    Mutation("mask_one_key_too_near", "forward.cu", "j >= first && j < end", "j > first && j < end", WINDOW),
    Mutation(
        "tile_taken_for_seen_by_all", "forward.cu",
        "key + TILE_K > facts.all_end) hide", "key + TILE_K > facts.all_end + 1) hide",
        replace(CAUSAL, queries=1, keys=127),
    ),
    Mutation(
        "hidden_values_not_noticed", "forward.cu",
        "ballot(inside && (", "ballot(false && (", CAUSAL, testing.check_hidden_keys_may_hold_anything,
    ),
    # Softmax
    Mutation("rescale_left_out", "forward.cu", "if (!any(moved)) return;", "return;", STEEP),
    Mutation("rescale_of_the_other_row", "forward.cu", "factor[block][e / 2];", "factor[block][1 - e / 2];", STEEP),
    Mutation("sum_not_rescaled", "softmax.cuh", "sum *= factor;", "", STEEP),
    Mutation(
        "guard_of_minus_infinity_removed", "softmax.cuh",
        "reference == -INFINITE ? Real(0) : reference", "reference", WINDOW,
    ),
    Mutation("lse_in_base_2", "softmax.cuh", "(reference + log2_of(sum)) * LN_2", "(reference + log2_of(sum))", CAUSAL),
    # float32 and float64
    Mutation(
        "fma_barrier_before_keys_removed", "forward_fma.cu",
        "sync_threads();  // all have left the tile of v", "", FLOAT32,
    ),
    Mutation(
        "fma_barrier_before_values_removed", "forward_fma.cu",
        "sync_threads();  // the weights are here, and all have left the tile of k", "", FLOAT32,
    ),
    Mutation(
        "fma_maximum_of_some_threads", "forward_fma.cu",
        "lanes < ROW_THREADS; lanes *= 2) top", "lanes < 4; lanes *= 2) top", FLOAT32,
    ),
    Mutation("fma_hidden_weight_summed", "forward_fma.cu", "if (weight == HIDDEN) continue;", "", FLOAT32),
    Mutation("fma_rescale_left_out", "forward_fma.cu", "out[n] *= factor;", "out[n] *= 1;", FLOAT32),
    # Hopper
    Mutation(
        "keys_released_before_their_product_ends", "forward_sm90.cu",
        "wgmma_wait_group<1>();\n            pin(scores);\n            release(KEYS_EMPTY, KEYS);",
        "release(KEYS_EMPTY, KEYS);\n            wgmma_wait_group<1>();\n            pin(scores);", HOPPER,
        engine="sm90",
    ),
    Mutation(
        "parity_of_values_not_flipped", "forward_sm90.cu", "if (VALUES == 1) value.parity ^= 1;", "", HOPPER,
        engine="sm90",
    ),
    Mutation(
        "weights_rewritten_under_their_product", "forward_sm90.cu",
        f"wgmma_wait_group<0>();\n{PINS}            release(VALUES_EMPTY, VALUES);",
        "release(VALUES_EMPTY, VALUES);", HOPPER, engine="sm90",
    ),
    Mutation(
        "proxy_fence_removed", "forward_sm90.cu", "        fence_proxy_async();\n", "", BOXED, engine="sm90",
    ),
    Mutation(
        "staging_filled_before_it_has_left", "forward_sm90.cu",
        "if (lane == 0) cp_async_bulk_wait_group_read<0>();  // the rows before have left", "", BOXED, engine="sm90",
    ),
    Mutation(
        "rows_of_the_first_consumer_for_all", "forward_sm90.cu",
        "place.row + consumer * args.rows, args.pack), place.batch0", "place.row, args.pack), place.batch0", HOPPER,
        engine="sm90",
    ),
    Mutation(
        "tiles_of_other_consumers_not_skipped", "forward_sm90.cu", "        skip(uniform(done.before));\n", "",
        replace(HOPPER, causal=False, window=(20, 3)), engine="sm90",
    ),
    Mutation(
        "hopper_tile_taken_for_plain", "forward_sm90.cu", "if (tile >= plain_end) hide", "if (tile > plain_end) hide",
        HOPPER, engine="sm90",
    ),
    Mutation(
        "hopper_rescale_left_out", "forward_sm90.cu", "                raise(rows, out, scores, score);\n", "",
        replace(HOPPER, scale=4.0), engine="sm90",
    ),
    Mutation(
        "hopper_hidden_values_not_noticed", "forward_sm90.cu", "ballot(inside && (", "ballot(false && (", HOPPER,
        testing.check_hidden_keys_may_hold_anything, engine="sm90",
    ),
    # Gradients: before, behind, and the order between
    Mutation(
        "delta_of_half_the_threads", "backward_rows.cu", "lanes < ROW_THREADS; lanes *= 2) delta",
        "lanes < 4; lanes *= 2) delta", GRADIENT, testing.check_gradient_bound,
    ),
    Mutation(
        "delta_without_the_end_of_a_row", "backward_rows.cu", "for (; d < columns; ++d) sum =",
        "for (; d < columns - 4; ++d) sum =", GRADIENT, testing.check_gradient_bound,
    ),
    Mutation(
        "gradient_of_lse_added", "backward_rows.cu", "delta -= load_global", "delta += load_global", GRADIENT,
        check_gradient_of_lse,
    ),
    Mutation(
        "dq_of_other_rows", "backward_finish.cu", "const int r = row + 8 * half,",
        "const int r = row + 8 * (1 - half),", GRADIENT, testing.check_gradient_bound,
    ),
    Mutation(
        "dq_read_without_barrier", "backward_finish.cu", "    sync_threads();\n\n    const int chunks",
        "    const int chunks", GRADIENT, testing.check_gradient_bound,
    ),
    Mutation(
        "dq_of_spoilt_rows_kept", "backward_finish.cu", "return found != 0;", "return false;", UNSEEN_KEYS,
        testing.check_unseen_have_zero_gradient,
    ),
    Mutation(
        "spoilt_dv_kept", "backward_finish.cu", "finish_item<false>(args, item);", "", GRADIENT,
        testing.check_unseen_have_zero_gradient,
    ),
    Mutation(
        "spoilt_dv_of_one_head", "careful_gradients.cuh", "head < (key_head + 1) * args.group",
        "head < key_head * args.group + 1", GRADIENT, testing.check_unseen_have_zero_gradient,
    ),
    Mutation(
        "last_rows_that_see_a_tile_left_out", "visits.cuh", "mask.end_query(last_key, args.queries)",
        "mask.end_query(item.key_tile * TILE_K, args.queries)", SLIDING, testing.check_gradient_bound,
    ),
    Mutation(
        "dk_of_the_first_head_alone", "visits.cuh", "item.key_head = linear % key_heads;", "item.key_head = 0;",
        replace(GRADIENT, key_heads=2), testing.check_gradient_bound,
    ),
)  # fmt: skip
