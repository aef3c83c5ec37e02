"""Seeded mistakes in the small Hopper kernels: the emulator, or the numbers, have to notice.

A mutation replaces a text that occurs once in what one case of ``kernels/run.py`` compiles. The case without it passes
on the same seeds.
"""

from dataclasses import dataclass

import numpy as np

from . import HERE, EmulatorError
from .kernels import run
from .mutations import replace_once

SEEDS = range(4)


@dataclass(frozen=True)
class Mutation:
    """A mistake, and where it shows.

    Attributes
    ----------
    name : str
        What is wrong.
    case : run.Case
        The kernel and its numbers.
    old, new : str
        The text ``old``, which occurs once in the case's, becomes ``new``.
    """

    name: str
    case: run.Case
    old: str
    new: str = ""

    def text(self):
        """The text with the mistake."""
        return replace_once(self.case.text(str(HERE)), self.old, self.new, self.name)


def caught(case, text=None):
    """What the first seed that notices anything says of a case, whose text may have a mistake; None where none does."""
    for seed in SEEDS:
        try:
            results = run.emulate(case, seed, text)
        except EmulatorError as error:
            return f"emulator: {' '.join(str(error).split())}"
        for name, wanted in case.results.items():
            if not np.array_equal(results[name], wanted):
                return f"numbers: {np.count_nonzero(results[name] != wanted)} of {wanted.size} of {name} are wrong"
    return None


RING = run.ring(7)
CHAIN = run.chain(5)
WIDE = run.chain(4, 96, 128, 128, element="float16")  # two panels each of q, k, v
SHARED = run.chain(4, in_shared=True)
TILES = run.tiles()
REDUCE = run.reduce(4, 16)
ROUNDED = run.reduce(5, 16, integers=False)
CLUSTER = run.cluster(4)
ORDERED = run.cluster(4, integers=False)
LEAVING = run.cluster(4, leaver=1, arrives=True)

MUTATIONS = (
    # Barriers
    Mutation("full_not_waited_for", RING, "mbarrier_wait(shared + FULL + 8 * place.stage, place.parity);"),
    Mutation("empty_not_waited_for", RING, "mbarrier_wait(shared + EMPTY + 8 * place.stage, place.parity ^ 1);"),
    Mutation("phase_not_flipped", RING, "parity ^= stage == 0;"),
    Mutation("producer_waits_for_the_other_parity", RING, "place.parity ^ 1", "place.parity"),
    Mutation("parity_of_the_iteration", CHAIN, "KEYS_FULL + 8 * stage, t / STAGES % 2", "KEYS_FULL + 8 * stage, t % 2"),
    Mutation("too_few_arrivals_wanted", RING, "EMPTY + 8 * stage, 4 * CONSUMERS", "EMPTY + 8 * stage, CONSUMERS"),
    Mutation("too_many_arrivals_wanted", RING, "EMPTY + 8 * stage, 4 * CONSUMERS", "EMPTY + 8 * stage, 5 * CONSUMERS"),
    Mutation("barriers_not_fenced", RING, "fence_mbarrier_init();\n    }\n    sync", "}\n    sync"),
    Mutation("barriers_not_synchronised", RING, "    sync_threads();\n    const int warpgroup",
             "    const int warpgroup"),
    Mutation("registers_not_given_away", RING, "setmaxnreg_dec<PRODUCER_REGISTERS>();"),
    # Tensor copies
    Mutation("half_the_bytes_announced", WIDE, "(barrier, COUNT * box_bytes)", "(barrier, COUNT * box_bytes / 2)"),
    Mutation("clipped_bytes_announced", TILES, "(barrier, COUNT * box_bytes)", "(barrier, COUNT * box_bytes - 128)"),
    Mutation("row_off_by_one", CHAIN, "KEYS_FULL + 8 * stage, {0, t * TILE_K,",
             "KEYS_FULL + 8 * stage, {0, t * TILE_K + 1,"),
    Mutation("swizzle_bit_wrong", SHARED, "(chunk % 8 ^ row % 8) * 16", "(chunk % 8 ^ row % 4) * 16"),
    Mutation("store_without_fence", TILES, "fence_proxy_async();\n        sync_threads();", "sync_threads();"),
    Mutation("buffer_written_before_its_store_is_read", TILES, "cp_async_bulk_wait_group_read<BUFFERS - 1>()",
             "cp_async_bulk_wait_group_read<BUFFERS>()"),
    Mutation("block_ends_before_its_stores", TILES, "if (thread == 0) cp_async_bulk_wait_group_read<0>();"),
    # Sums in turn
    Mutation("tile_bytes_wrong", REDUCE, "expect_tx(shared + SOURCE_FULL, TILE_BYTES)",
             "expect_tx(shared + SOURCE_FULL, IMAGE_BYTES)"),
    Mutation("buffers_not_fenced", REDUCE, "        fence_proxy_async();\n        bar_arrive", "        bar_arrive"),
    Mutation("buffers_fenced_after_the_arrival", REDUCE,
             "        fence_proxy_async();\n        bar_arrive(FULL, THREADS);",
             "        bar_arrive(FULL, THREADS);\n        fence_proxy_async();"),
    Mutation("full_expected_by_too_few", REDUCE, "bar_arrive(FULL, THREADS);", "bar_arrive(FULL, WARPGROUP);"),
    Mutation("full_buffers_not_waited_for", REDUCE, "bar_sync(FULL, THREADS);"),
    Mutation("free_not_told", REDUCE, "if (step + 1 < BLOCKS) bar_arrive(FREE, THREADS);"),
    Mutation("free_told_at_the_other_barrier", REDUCE, "bar_arrive(FREE, THREADS);", "bar_arrive(FULL, THREADS);"),
    Mutation("free_not_waited_for", REDUCE, "if (step > 0) bar_sync(FREE, THREADS);"),
    Mutation("buffers_freed_before_they_are_read", REDUCE, "            cp_async_bulk_wait_group_read<0>();\n"),
    Mutation("released_when_read", ROUNDED, "            cp_async_bulk_wait_group<0>();\n"),
    Mutation("released_before_the_wait", ROUNDED,
             "            cp_async_bulk_wait_group<0>();\n"
             "            fence_proxy_async_global();  // what it has added before the release\n"
             "            add_release(args.turns + tile * 4, 1);\n",
             "            add_release(args.turns + tile * 4, 1);\n"
             "            cp_async_bulk_wait_group<0>();\n"),
    Mutation("sums_not_committed", REDUCE, "            cp_async_bulk_commit_group();\n"),
    Mutation("turn_not_waited_for", ROUNDED, "while (load_acquire(args.turns + tile * 4) != step) {\n            }"),
    Mutation("turn_one_too_early", ROUNDED, "tile * 4) != step)", "tile * 4) + 1 < step)"),
    Mutation("turn_one_too_late", REDUCE, "tile * 4) != step)", "tile * 4) != step + 1)"),
    Mutation("turn_of_those_that_add_not_waited_for", ROUNDED, "tile * 4) != step)", "tile * 4) < (step > 0))"),
    Mutation("released_twice", REDUCE, "add_release(args.turns + tile * 4, 1)",
             "add_release(args.turns + tile * 4, 2)"),
    Mutation("first_adds", REDUCE, "if (step == 0) {", "if (step < 0) {"),
    Mutation("second_stores", REDUCE, "if (step == 0) {", "if (step < 2) {"),
    Mutation("image_not_transposed", REDUCE, "stmatrix_x4_trans(shared", "stmatrix_x4(shared"),
    Mutation("blocks_go_the_same_way", REDUCE, "    int tile = block;", "    int tile = 0;"),
    # Clusters
    Mutation("cluster_not_waited_for", CLUSTER, "        cluster_wait();\n        const int other",
             "        const int other"),
    Mutation("cluster_waited_for_too_late", CLUSTER, "        cluster_wait();\n    }\n",
             "    }\n    cluster_wait();\n"),
    Mutation("numbers_left_after_the_arrival", CLUSTER,
             "        store_shared(shared + thread * 16, mine);\n        cluster_arrive();",
             "        cluster_arrive();\n        store_shared(shared + thread * 16, mine);"),
    Mutation("blocks_leave_before_all_is_read", CLUSTER, "        cluster_arrive();  // it has read",
             "        if (turn + 1 == args.turns) return;\n        cluster_arrive();"),
    Mutation("ranks_in_another_order", ORDERED, "(shared + other * 16, n)", "(shared + other * 16, n ^ 1)"),
    Mutation("rank_beyond", CLUSTER, "(shared + other * 16, n)", "(shared + other * 16, n + 1)"),
    Mutation("other_half_read", CLUSTER, "* 16 + 8, n)", "* 16 + 4, n)"),
    Mutation("block_read_that_has_left", LEAVING, "            if (n == leaver) continue;\n"),
    # Products
    Mutation("stage_released_early", RING, "if (t > 0) release(before);", "release(place.stage);"),
    Mutation("wait_one_group_short", CHAIN, "wgmma_wait_group<1>();", "wgmma_wait_group<2>();"),
    Mutation("last_wait_left_out", RING, "wgmma_wait_group<0>();"),
    Mutation("fence_of_products_left_out", CHAIN, "        pin(weights);\n        wgmma_fence();",
             "        pin(weights);"),
    Mutation("operand_rewritten_in_flight", CHAIN, "        halve();\n        wgmma_wait_group<0>();",
             "        halve();\n        round();\n        wgmma_wait_group<0>();"),
    Mutation("operand_in_shared_memory_not_fenced", SHARED, "            fence_proxy_async();\n"),
    Mutation("operand_in_shared_memory_not_synchronised", SHARED, "            bar_sync(1, WARPGROUP);\n"),
    Mutation("leading_bytes_wrong", WIDE, "matrix_descriptor(place, PANEL_BYTES, 1024)",
             "matrix_descriptor(place, 1024, 1024)"),
    Mutation("stride_bytes_wrong", CHAIN, "matrix_descriptor(place, 16, 1024)", "matrix_descriptor(place, 16, 512)"),
    Mutation("step_in_bytes_wrong", CHAIN, "step % 4 * 2; }", "step % 4; }"),
    Mutation("operands_transposed_wrongly", RING, "ss<0, 1>(d, a", "ss<1, 0>(d, a"),
    Mutation("accumulates_where_it_should_not", CHAIN, "k + Keys::right(step), step > 0)",
             "k + Keys::right(step), true)"),
    Mutation("halves_swapped", CHAIN, "scores[8 * step + 2 * i], scores[8 * step + 2 * i + 1]",
             "scores[8 * step + 2 * i + 1], scores[8 * step + 2 * i]"),
)  # fmt: skip
