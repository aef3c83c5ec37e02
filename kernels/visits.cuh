// The order in which tiles of keys meet tiles of queries in the backward pass, and with it the order of sums: dk and dv
// of a tile of keys are summed by one block, dq of a tile of queries by many, each when its turn has come.
//
// A block works on one item at a time, a tile of keys of one key head, and visits every tile of queries that sees some
// of it, of each query head of the group. Items are drawn from a ticket, in order. Where every row sees every key, the
// tiles of keys of a head begin at places spread evenly over the visits and go round, so that hardly two meet; where
// there is a mask, each begins at the first rows that see it, which spreads them as well. A tile's turns follow from
// these orders: they are the order of arrival of blocks that begin together and run at one speed, so that waiting is
// rare, and nothing but the problem's own shape decides them.
//
// Nobody waits for ever. Blocks stay, as many as the device holds at once (a cooperative launch), and each draws its next
// item when it has done with one. The tiles of keys that go round wait for one another, so these come in chunks of no
// more than there are blocks, one chunk's turns after those of the one before; under a mask a block waits only for
// items drawn before its own.
#pragma once

#include "mask.cuh"
#include "ptx.cuh"

namespace cuflash {

// One thread may make and use all of this: nothing here shuffles.
struct Item {
    int key_tile;
    int key_head, batch0, batch1;
    int64 batch;          // linear
    int first, end;       // tiles of queries that see some key of the tile
    int start_head, start;  // the first visit: query head in the group, tile of queries
    int visits;           // of all heads of the group
};

template <typename Args>
__device__ __forceinline__ Item locate_item(const Args& args, const Mask& mask, int index) {
    Item item;
    item.key_tile = index % args.key_tiles;
    int linear = index / args.key_tiles;
    const int key_heads = args.heads / args.group;
    item.key_head = linear % key_heads;
    linear /= key_heads;
    item.batch = linear;
    item.batch0 = linear / args.batches1;
    item.batch1 = linear % args.batches1;
    if (args.cyclic) {
        const int chunk_first = item.key_tile / args.chunk * args.chunk;
        const int here = args.key_tiles - chunk_first < args.chunk ? args.key_tiles - chunk_first : args.chunk;
        item.first = 0;
        item.end = args.query_tiles;
        item.visits = args.group * args.query_tiles;
        const int rank = item.key_tile - chunk_first;
        const int start = item.visits / here * rank + item.visits % here * rank / here;  // visits * rank / here
        item.start_head = start / args.query_tiles;
        item.start = start % args.query_tiles;
    } else {
        item.key_tile = args.key_tiles - 1 - item.key_tile;  // so that blocks wait for items drawn before theirs
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
        const int chunk_first = item.key_tile / args.chunk * args.chunk;
        const int here = args.key_tiles - chunk_first < args.chunk ? args.key_tiles - chunk_first : args.chunk;
        // Tiles of keys that begin here or before come first, the last of them foremost; then those that go round.
        // Those that have begun, (place + 1) * here / visits rounded up. The estimate is never more, and soon set right.
        const int place = visit.head * args.query_tiles + visit.tile;
        const float share = static_cast<float>(place + 1) * reciprocal(static_cast<float>(item.visits));
        int begun = static_cast<int>(share * static_cast<float>(here));
        while (static_cast<int64>(begun) * item.visits < static_cast<int64>(place + 1) * here) ++begun;
        const int rank = begun - 1 - (item.key_tile - chunk_first);
        return chunk_first + (rank < 0 ? rank + here : rank);
    }
    const int last_row = clamp((visit.tile + 1) * TILE_Q, 0, args.queries) - 1;
    return (mask.end_key(last_row) - 1) / TILE_K - item.key_tile;
}

}  // namespace cuflash
