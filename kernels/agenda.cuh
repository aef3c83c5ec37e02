// What a block of backward's main kernel is working on: its item and the visits that come next, in shared memory, since
// registers are short.
#pragma once

#include "backward_args.cuh"
#include "mask.cuh"
#include "ptx.cuh"
#include "visits.cuh"

namespace cuflash {

constexpr int LISTED = 2 * WARP;  // visits

struct alignas(16) Work {
    const char *q, *dout;  // row 0 of the group's first head
    int first_tile;        // tile 0 of that head, among those of all heads (an int counts them: each has a counter)
    int index;             // of the item
    int visits;
    int key;  // first of the tile
};
// A visit, looked up beforehand.
struct alignas(16) Listed {
    Visit visit;
    int turn;
    int plain;  // whether every row sees every key
};

struct alignas(16) Agenda {
    Listed list[LISTED];
    Work work;
    int next;       // item
    int visits[2];  // the number of the visit, up to its second barrier and from there on
};

// The agenda that lies at an address in shared memory.
struct AgendaAt {
    uint32 address;

    __device__ __forceinline__ Work work() const { return load_shared<Work>(address + OFFSET_OF(Agenda, work)); }
    __device__ __forceinline__ void set_work(const Work& work) const {
        store_shared(address + OFFSET_OF(Agenda, work), work);
    }
    __device__ __forceinline__ int next() const { return load_shared<int>(address + OFFSET_OF(Agenda, next)); }
    __device__ __forceinline__ void set_next(int item) const { store_shared(address + OFFSET_OF(Agenda, next), item); }
    __device__ __forceinline__ int visit(int half) const {
        return load_shared<int>(address + OFFSET_OF(Agenda, visits) + half * sizeof(int));
    }
    __device__ __forceinline__ void set_visit(int half, int n) const {
        store_shared(address + OFFSET_OF(Agenda, visits) + half * sizeof(int), n);
    }
    __device__ __forceinline__ Listed listed(int n) const {
        return load_shared<Listed>(address + n % LISTED * sizeof(Listed));
    }

    // A warp looks up 32 visits at once, one a lane, from the n-th on.
    template <typename Args>
    __device__ __forceinline__ void list(const Args& args, const Mask& mask, const Item& item, int n) const {
        n += lane_index();
        if (n >= item.span.visits) return;
        Listed listed;
        listed.visit = visit_at(item.span, n);
        listed.turn = turn_of(args, mask, item, listed.visit);
        const int row = listed.visit.tile * TILE_Q, last_row = clamp(row + TILE_Q, 0, args.queries) - 1;
        const int key = item.key_tile * TILE_K;
        const bool coarse = load_global<int>(args.turns + COARSE) != 0;
        listed.plain = !coarse && mask.first_key(last_row) <= key && mask.end_key(row) >= key + TILE_K;
        store_shared(address + n % LISTED * sizeof(Listed), listed);
    }
    // The tile of a visit among those of all heads.
    template <typename Args>
    __device__ __forceinline__ int tile_of(const Args& args, const Visit& visit) const {
        return work().first_tile + visit.head * args.query_tiles + visit.tile;
    }
    // The counter of its turns.
    template <typename Args>
    __device__ __forceinline__ char* counter(const Args& args, int n) const {
        return args.turns + COUNTERS + static_cast<int64>(tile_of(args, listed(n).visit)) * sizeof(int);
    }
};

}  // namespace cuflash
