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
// visit they come in passes: every second one in the first, the others in the next, once the first is over.
//
// Nobody waits for ever. Blocks stay, as many as the device holds at once (a cooperative launch), and draw items from a
// ticket, in order. The items of one pass of a section of heads, a wave, are no more than there are blocks, and wait
// for one another and for waves before; no block draws a second item of a wave before all of it is drawn.
#pragma once

#include "mask.cuh"
#include "ptx.cuh"

namespace cuflash {

// One thread may make and use all of this: nothing here shuffles. Nor do 64-bit divisions, which take registers.

// The visits of an item: tiles of queries [first, end) that see some of its keys, of each query head of the group.
struct Span {
    int first, end;
    int start_head, start;  // the first visit: query head in the group, tile of queries
    int visits;             // of all heads
};

struct Item {
    int index;                     // in the order of drawing
    int key_tile;                  // of the head
    int key_head, batch0, batch1;  // and the linear one:
    int batch;
    int pass, rank, tiles;         // of the tile of keys: its pass, its place there; tiles of the pass
    Span span;
};

// Tiles of keys of a pass. Passes are a power of two, for the sake of those who divide by them.
template <typename Args>
__device__ __forceinline__ int tiles_of(const Args& args, int pass) {
    return ((args.key_tiles - pass - 1) >> args.passes_log2) + 1;
}
// How many of the first `tiles` tiles of keys belong to passes before this one.
template <typename Args>
__device__ __forceinline__ int tiles_before(const Args& args, int tiles, int pass) {
    const int whole = tiles >> args.passes_log2, rest = tiles - (whole << args.passes_log2);
    return whole * pass + (rest < pass ? rest : pass);
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

// The item but for its span.
template <typename Args>
__device__ __forceinline__ Item draw_item(const Args& args, int index) {
    const Wave wave = wave_of(args, index);
    const int key_heads = args.heads / args.group;
    Item item;
    item.index = index;
    item.pass = wave.pass;
    item.rank = (index - wave.first) / wave.heads;
    item.tiles = tiles_of(args, wave.pass);
    item.key_tile = wave.pass + (item.rank << args.passes_log2);
    const int head = wave.first_head + (index - wave.first) % wave.heads;
    item.key_head = head % key_heads;
    item.batch = head / key_heads;
    item.batch0 = item.batch / args.batches1;
    item.batch1 = item.batch % args.batches1;
    return item;
}

template <typename Args>
__device__ __forceinline__ Span span_of(const Args& args, const Mask& mask, const Item& item) {
    Span span;
    if (args.cyclic) {
        span.first = 0;
        span.end = args.query_tiles;
        span.visits = args.group * args.query_tiles;
        const int share = span.visits / item.tiles, rest = span.visits % item.tiles;
        const int start = share * item.rank + rest * item.rank / item.tiles;  // visits * rank / tiles
        span.start_head = start / args.query_tiles;
        span.start = start % args.query_tiles;
    } else {
        const int last_key = clamp((item.key_tile + 1) * TILE_K, 0, args.keys) - 1;
        const int first = mask.first_query(item.key_tile * TILE_K, args.queries);
        const int end = mask.end_query(last_key, args.queries);
        span.first = first / TILE_Q;
        span.end = first < end ? (end - 1) / TILE_Q + 1 : span.first;
        span.visits = args.group * (span.end - span.first);
        span.start_head = 0;
        span.start = span.first;
    }
    return span;
}

template <typename Args>
__device__ __forceinline__ Item locate_item(const Args& args, const Mask& mask, int index) {
    Item item = draw_item(args, index);
    item.span = span_of(args, mask, item);
    return item;
}

// A visit: a tile of queries of one query head of the group.
struct Visit {
    int head, tile;
    __device__ __forceinline__ void advance(const Span& span, int group) {
        if (++tile == span.end) {
            tile = span.first;
            if (++head == group) head = 0;
        }
    }
};

// The n-th visit of an item.
__device__ __forceinline__ Visit visit_at(const Span& span, int n) {
    const int tiles = span.end - span.first, start = span.start_head * tiles + span.start - span.first;
    const int place = n < span.visits - start ? start + n : start + n - span.visits;
    return {place / tiles, span.first + place % tiles};
}

// How many blocks add to dq of this tile of queries before this one. The first stores instead.
template <typename Args>
__device__ __forceinline__ int turn_of(const Args& args, const Mask& mask, const Item& item, const Visit& visit) {
    if (args.cyclic) {
        // Tiles of keys that begin here or before come first, the last of them foremost; then those that go round.
        // Those that have begun, (place + 1) * tiles / visits rounded up: an estimate is never more, and hardly less.
        // What it lacks is small, so that products of 32 bits, which wrap around, give it all the same.
        const int place = visit.head * args.query_tiles + visit.tile, visits = item.span.visits;
        const float share = static_cast<float>(place + 1) * reciprocal(static_cast<float>(visits));
        int begun = static_cast<int>(share * static_cast<float>(item.tiles));
        const uint32 lacking = static_cast<uint32>(place + 1) * item.tiles - static_cast<uint32>(begun) * visits;
        for (int left = static_cast<int>(lacking); left > 0; left -= visits) ++begun;
        const int later = begun - 1 - item.rank;
        return tiles_before(args, args.key_tiles, item.pass) + (later < 0 ? later + item.tiles : later);
    }
    // The last tiles of keys that the rows see come first: they begin last, so get here first.
    const int last_row = clamp((visit.tile + 1) * TILE_Q, 0, args.queries) - 1;
    const int last = (mask.end_key(last_row) - 1) / TILE_K;
    const int turn = (last - item.key_tile) >> args.passes_log2;
    if (item.pass == 0) return turn;
    const int first = mask.first_key(visit.tile * TILE_Q) / TILE_K;
    return turn + tiles_before(args, last + 1, item.pass) - tiles_before(args, first, item.pass);
}

}  // namespace cuflash
