// Places: where the rows of a problem lie. Rows are mapped once, packed row -> (query row, head in group); masks and
// scores see the query row alone.
#pragma once

#include "ptx.cuh"

namespace cuflash {

struct Strides {  // in bytes
    int64 batch0, batch1, head, row;
    __device__ __forceinline__ int64 offset(int64 b0, int64 b1, int64 h) const {
        return b0 * batch0 + b1 * batch1 + h * head;
    }
};

// Which rows a block owns. Blocks come in sections of `section` heads: inside one, tiles are the slow index and heads
// the fast one, so that blocks that run together share the keys of few heads (those of a section fit the cache), and,
// where tiles differ in length, the longest run first and only short ones are left for the end.
struct Schedule {
    int tiles, section;
    int64 heads;  // head blocks of all batches

    // Integer: int where blocks and heads are few enough, since division takes registers and time.
    template <typename Integer>
    __device__ __forceinline__ void locate(Integer block, int& tile, Integer& head) const {
        Integer first = block / (static_cast<Integer>(section) * tiles) * section;
        int here = heads - first < section ? static_cast<int>(heads - first) : section;
        int position = static_cast<int>(block - first * tiles);
        tile = position / here;
        head = first + position % here;
    }
};

// Packed row r is query row r / pack of head r % pack.
__device__ __forceinline__ int query_of(int row, int pack) { return pack == 1 ? row : row / pack; }

// Dense arrays behind at most two merged leading axes. A block owns `pack` query heads of one key head (1, or the
// whole group when there are few rows) and a tile of their packed rows.
struct Dense {
    int batch0, batch1;  // along the two axes
    int batches1;
    int tile;        // tile of packed rows
    int head, pack;  // first query head of the block
    int queries;

    __device__ Dense(const Schedule& schedule, int64 block, int head_blocks, int batches1, int pack, int queries,
                     bool last_first)
        : batches1(batches1), pack(pack), queries(queries) {
        int64 linear;
        schedule.locate(block, tile, linear);
        tile = uniform(last_first ? schedule.tiles - 1 - tile : tile);
        head = uniform(static_cast<int>(linear % head_blocks)) * pack;
        linear /= head_blocks;
        batch0 = uniform(static_cast<int>(linear / batches1));
        batch1 = uniform(static_cast<int>(linear % batches1));
    }
    __device__ __forceinline__ int64 batch() const { return static_cast<int64>(batch0) * batches1 + batch1; }
    __device__ __forceinline__ int rows() const { return queries * pack; }
    __device__ __forceinline__ int query(int row) const { return query_of(row, pack); }
    __device__ __forceinline__ int head_of(int row) const { return pack == 1 ? head : head + row % pack; }
    // Address of a packed row of q or out.
    __device__ __forceinline__ const char* row(const char* base, const Strides& strides, int row) const {
        return base + strides.offset(batch0, batch1, head_of(row)) + query(row) * strides.row;
    }
};

// Division by a number that a launch fixes: the upper half of a product and a shift (Granlund & Montgomery 1994).
struct Divisor {
    int value;
    uint32 multiplier;  // 2^32 (2^shift - value) / value, rounded down, + 1
    int shift;          // 2^shift is the least power of two not below value

    // Of n >= 0.
    __device__ __forceinline__ int divide(int n) const { return (multiply_high(n, multiplier) + n) >> shift; }
};

// The pages that hold a sequence's keys. A cache in one piece has a page of its own for each sequence.
struct Pages {
    const char* table;  // entries of this sequence, `step` bytes apart; null where its only page has its number
    int64 step;
    int sequence, count;  // count: of pages in the cache
    Divisor size;         // keys of a page

    // Page n of the sequence, as the table has it.
    __device__ __forceinline__ int number(int n) const {
        return table == nullptr ? sequence : load_global<int>(table + n * step);
    }
    __device__ __forceinline__ bool exists(int page) const {
        return static_cast<uint32>(page) < static_cast<uint32>(count);
    }
    // Address of key j, which lies in that page, of a head of a cache.
    __device__ __forceinline__ const char* row(const char* base, const Strides& strides, int page, int head,
                                               int j) const {
        const int place = j - size.divide(j) * size.value;
        return base + strides.offset(0, page, head) + place * strides.row;
    }
};

// Sequences whose keys lie in pages. A block owns a tile of one key head's packed rows, those of all heads of its
// group, and one split of the keys that they see.
struct Paged {
    int sequence, key_head, split, tile;
    int splits;  // of what its rows see, at most
    int fewest;  // tiles of keys of one, at least
    int group;   // query heads of a key head
    bool clustered = false;  // its splits are the blocks of a cluster

    // Block `block` of those of sequences that have so many splits each, from one sequence on.
    __device__ Paged(uint32 block, int first_sequence, int key_heads, int splits, int fewest, int tiles, int group)
        : splits(splits), fewest(fewest), group(group) {
        tile = uniform(block % tiles);
        block /= tiles;
        split = uniform(block % splits);
        block /= splits;
        key_head = uniform(block % key_heads);
        sequence = uniform(first_sequence + block / key_heads);
    }
    __device__ __forceinline__ int query(int row) const { return query_of(row, group); }
    __device__ __forceinline__ int head_of(int row) const { return key_head * group + row % group; }
    // Address of a packed row of q or out.
    __device__ __forceinline__ const char* row(const char* base, const Strides& strides, int row) const {
        return base + strides.offset(0, sequence, head_of(row)) + query(row) * strides.row;
    }
};

}  // namespace cuflash
