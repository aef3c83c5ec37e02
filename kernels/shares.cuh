// Which block of decode has which keys, where lengths differ.
//
// The grid is the host's, and lengths are the device's. Where the host has fixed the splits, or lengths are alike,
// every sequence has as many splits as any other. Else the longest would decide when all is done, so blocks share out
// the tiles of keys of all sequences together, each of which finds out for itself:
//
//   share   tiles of keys of a block, from the sum over all: as many as make a few waves of blocks, but usual_share at
//           least; fewer than that where one wave would not be full, but short_share at least; and fewer than that
//           where a multiprocessor would have no block, but least_share at least
//   splits  of a sequence: as many shares as it has begun, one at least, of equal length
//   blocks  those of sequences with long splits first, of RANKS ranks, for a short one to come last; then in the order
//           of sequences, so that those of a sequence lie side by side
//
// A sequence has at most one split more than whole shares, which is what bounds the grid. Every warp of every block
// reads all lengths: they are few, and the same for all.
#pragma once

#include "cache.cuh"
#include "place.cuh"
#include "ptx.cuh"

namespace cuflash {

constexpr int RANKS = 4;

// Tiles of keys that a sequence's rows see; 0 beyond the last.
template <typename Args>
__device__ __forceinline__ int tiles_of(const Args& args, int sequence) {
    if (sequence >= args.sequences) return 0;
    const Mask mask = mask_against(args, length_of(args, sequence, args.capacity));
    const int first_key = mask.first_key(0), end_key = mask.end_key(args.queries - 1);
    return first_key < end_key ? (end_key - 1) / TILE_K + 1 - first_key / TILE_K : 0;
}

__device__ __forceinline__ int parts_of(int whole, int part) { return (whole + part - 1) / part; }

// Which block of which sequence's a block is, and how many splits that has.
struct Turn {
    int sequence, splits, fewest, block;
    bool idle;   // there is none for it
    bool fixed;  // its splits are as many as the host has said
};

template <typename Args>
__device__ __forceinline__ Turn turn_of(const Args& args, int block) {
    const int lane = lane_index(), items = args.key_heads * args.tiles;  // of a sequence
    const Turn none = {0, 1, 1, 0, true, false};
    int total = 0, longest = 0;
    for (int first = 0; first < args.sequences; first += WARP) {
        const int tiles = tiles_of(args, first + lane);
        total += tiles;
        longest = maximum(longest, tiles);
    }
    total = redux_add(total);
    longest = redux_max(longest);
    if (8 * total >= 7 * longest * args.sequences) {  // alike
        if (block < args.sequences * items * args.splits) return {0, args.splits, args.fewest, block, false, true};
        return none;
    }
    const int everything = total * items;  // tiles of all items
    const int short_one = clamp(parts_of(everything, args.lone), args.least_share, args.short_share);
    const int usual_one = clamp(parts_of(everything, args.wave), short_one, args.usual_share);
    const int share = maximum(parts_of(everything, args.waves), usual_one);
    if (block >= everything / share + args.sequences * items) return none;  // as what follows would find out
#pragma unroll 1
    for (int rank = RANKS - 1; rank >= 0; --rank) {
#pragma unroll 1
        for (int first = 0; first < args.sequences; first += WARP) {
            const int tiles = tiles_of(args, first + lane), splits = maximum(parts_of(tiles, share), 1);
            const int part = RANKS * tiles, whole = splits * share;  // a split has part / whole of RANKS shares
            const bool here = first + lane < args.sequences && part <= (rank + 1) * whole &&
                              (rank == 0 || part > rank * whole);
            const int blocks = here ? splits * items : 0, all = redux_add(blocks);
            if (block >= all) {
                block -= all;
                continue;
            }
            int end = blocks;  // with those of the lanes below
#pragma unroll
            for (int distance = 1; distance < WARP; distance *= 2) {
                const int below = shuffle_up(end, distance);
                end += lane < distance ? 0 : below;
            }
            const int found = find_first_set(ballot(block < end));
            block -= shuffle_from(end - blocks, found);
            return {first + found, shuffle_from(splits, found), 1, block, false, false};
        }
    }
    return none;
}

template <typename Args>
__device__ __forceinline__ Paged locate(const Args& args) {
    Turn turn = {args.first_sequence, args.splits, args.fewest, static_cast<int>(fresh_block_index()), false, true};
    if (args.sequences > 0) turn = turn_of(args, turn.block);
    Paged place(turn.block, turn.sequence, args.key_heads, turn.splits, turn.fewest, args.tiles, args.group);
    if constexpr (CLUSTERS) place.clustered = turn.fixed && cluster_size() > 1;
    if (turn.idle) place.split = turn.splits;  // beyond the last
    return place;
}

}  // namespace cuflash
