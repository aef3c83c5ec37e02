// The order in which tiles of keys meet tiles of queries in the backward pass, and with it the order of sums: dk and dv
// of a tile of keys are summed by one block, dq of a tile of queries by many, each when its turn has come.
//
// A block works on one item at a time, a tile of keys of one key head, and visits every tile of queries that sees some
// of it, of each query head of the group. Where every row sees every key, the tiles of keys of a head begin at places
// spread evenly over the visits and go round, so that hardly two meet; where there is a mask, each begins at the first
// rows that see it, which spreads them as well. A tile's turns follow: they are the order of arrival of blocks that
// begin together and run at one speed, so that waiting is rare, and nothing but a problem's own shape decides them.
//
// Handing a turn on takes about as long as a visit. Where tiles of keys would follow each other at a distance of one
// visit they come in passes, every second one in the first, the others in the next, once the first is over.
//
// Nobody waits for ever. Blocks stay, as many as the device holds at once (a cooperative launch), and draw items from a
// ticket, in order. The items of one pass of a section of heads, a wave, are no more than there are blocks, and wait for
// one another and for waves before; no block draws a second item of a wave before all of it is drawn.
#pragma once

#include "mask.cuh"
#include "ptx.cuh"

namespace cuflash {

// One thread may make and use all of this: nothing here shuffles. Nor do 64-bit divisions, which take registers.
struct Item {
    int index, key_tile;
    int key_head, batch0, batch1;
    int64 batch;            // linear
    int first, end;         // tiles of queries that see some key of the tile
    int start_head, start;  // the first visit: query head in the group, tile of queries
    int visits;             // of all heads of the group
    int pass, rank, tiles;  // of the tile of keys: its pass, its place there; tiles of the pass
};

// Tiles of keys of a pass: the first passes may have one more than the others.
template <typename Args>
__device__ __forceinline__ int tiles_of(const Args& args, int pass) {
    return args.key_tiles / args.passes + (pass < args.key_tiles % args.passes);
}
// How many of the first `tiles` tiles of keys belong to passes before this one.
template <typename Args>
__device__ __forceinline__ int tiles_before(const Args& args, int tiles, int pass) {
    const int rest = tiles % args.passes;
    return tiles / args.passes * pass + (rest < pass ? rest : pass);
}

// The items of a pass of a section of heads: tiles of keys are the slow index, so that under a causal mask the longest
// come first.
struct Wave {
    int first_head, heads, pass;
    int first, end;  // items
};

template <typename Args>
__device__ __forceinline__ Wave wave_of(const Args& args, int index) {
    Wave wave;
    const int section = index / (args.section * args.key_tiles), all_heads = args.items / args.key_tiles;
    wave.first_head = section * args.section;
    wave.heads = all_heads - wave.first_head < args.section ? all_heads - wave.first_head : args.section;
    wave.end = wave.first_head * args.key_tiles;
    wave.pass = -1;
    while (wave.end <= index) {
        wave.first = wave.end;
        wave.end += tiles_of(args, ++wave.pass) * wave.heads;
    }
    return wave;
}

template <typename Args>
__device__ __forceinline__ Item locate_item(const Args& args, const Mask& mask, int index) {
    Item item;
    const Wave wave = wave_of(args, index);
    item.index = index;
    item.pass = wave.pass;
    item.rank = (index - wave.first) / wave.heads;
    item.tiles = tiles_of(args, wave.pass);
    item.key_tile = wave.pass + item.rank * args.passes;

    int linear = wave.first_head + (index - wave.first) % wave.heads;
    const int key_heads = args.heads / args.group;
    item.key_head = linear % key_heads;
    linear /= key_heads;
    item.batch = linear;
    item.batch0 = linear / args.batches1;
    item.batch1 = linear % args.batches1;
    if (args.cyclic) {
        item.first = 0;
        item.end = args.query_tiles;
        item.visits = args.group * args.query_tiles;
        const int share = item.visits / item.tiles, rest = item.visits % item.tiles;
        const int start = share * item.rank + rest * item.rank / item.tiles;  // visits * rank / tiles
        item.start_head = start / args.query_tiles;
        item.start = start % args.query_tiles;
    } else {
        const int last_key = clamp((item.key_tile + 1) * TILE_K, 0, args.keys) - 1;
        const int first = mask.first_query(item.key_tile * TILE_K, args.queries), end = mask.end_query(last_key, args.queries);
        item.first = first / TILE_Q;
        item.end = first < end ? (end - 1) / TILE_Q + 1 : item.first;
        item.visits = args.group * (item.end - item.first);
        item.start_head = 0;
        item.start = item.first;
    }
    return item;
}

// A visit: a tile of queries of one query head of the group.
struct Visit {
    int head, tile;
    __device__ __forceinline__ void advance(const Item& item, int group) {
        if (++tile == item.end) {
            tile = item.first;
            if (++head == group) head = 0;
        }
    }
};

// The n-th visit of an item.
template <typename Args>
__device__ __forceinline__ Visit visit_at(const Args& args, const Item& item, int n) {
    const int span = item.end - item.first, start = item.start_head * span + item.start - item.first;
    const int place = n < item.visits - start ? start + n : start + n - item.visits;
    return {place / span, item.first + place % span};
}

// How many blocks add to dq of this tile of queries before this one. The first stores instead.
template <typename Args>
__device__ __forceinline__ int turn_of(const Args& args, const Mask& mask, const Item& item, const Visit& visit) {
    if (args.cyclic) {
        // Tiles of keys that begin here or before come first, the last of them foremost; then those that go round.
        // Those that have begun, (place + 1) * tiles / visits rounded up: the estimate is never more, and soon set right.
        const int place = visit.head * args.query_tiles + visit.tile;
        const float share = static_cast<float>(place + 1) * reciprocal(static_cast<float>(item.visits));
        int begun = static_cast<int>(share * static_cast<float>(item.tiles));
        while (static_cast<int64>(begun) * item.visits < static_cast<int64>(place + 1) * item.tiles) ++begun;
        const int later = begun - 1 - item.rank;
        return tiles_before(args, args.key_tiles, item.pass) + (later < 0 ? later + item.tiles : later);
    }
    // The last tiles of keys that the rows see come first: they begin last, so get here first.
    const int last_row = clamp((visit.tile + 1) * TILE_Q, 0, args.queries) - 1, last = (mask.end_key(last_row) - 1) / TILE_K;
    const int turn = (last - item.key_tile) / args.passes;
    if (item.pass == 0) return turn;
    const int first = mask.first_key(visit.tile * TILE_Q) / TILE_K;
    return turn + tiles_before(args, last + 1, item.pass) - tiles_before(args, first, item.pass);
}

}  // namespace cuflash
