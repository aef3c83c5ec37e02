// Blocks of a cluster leave numbers in their shared memory, and each adds what all of them have left, by rank.
//
// `quads`: the four floats of a thread, which another of each block has left. `pairs`: the last two of one more.
//
// The block of rank `leaver` brings nothing and leaves: at once or, `arrives`, between its arrival and the wait, which
// the others must not notice. The rest leave when all have been read.
#include "ptx_sm90.cuh"

namespace cuflash {

constexpr int MOST_THREADS = 128;
static_assert(SHARED_BYTES == MOST_THREADS * 16, "SHARED_BYTES: four floats of each thread");

struct Args {
    const char* in;       // [turn][block][thread], four floats
    char *quads, *pairs;  // four and two
    int64 turns, threads, leaver, arrives;
};

struct alignas(16) Quad {
    float x[4];
};
struct alignas(8) Pair {
    float x[2];
};

extern "C" __global__ void __launch_bounds__(MOST_THREADS) cluster(const __grid_constant__ Args args) {
    const uint32 shared = shared_memory();
    const int rank = cluster_rank(), blocks = cluster_size(), threads = static_cast<int>(args.threads);
    const int leaver = static_cast<int>(args.leaver), thread = thread_index();
    if (rank == leaver) {
        if (args.arrives) cluster_arrive();
        return;
    }
    auto place = [&](int turn) {
        return (static_cast<int64>(turn) * grid_size() + fresh_block_index()) * threads + thread;
    };
    Quad mine = load_global<Quad>(args.in + place(0) * 16);
#pragma unroll 1
    for (int turn = 0; turn < args.turns; ++turn) {
        store_shared(shared + thread * 16, mine);
        cluster_arrive();
        if (turn + 1 < args.turns) mine = load_global<Quad>(args.in + place(turn + 1) * 16);
        cluster_wait();
        const int other = (thread + rank + 1) % threads;
        Quad four{};
        Pair two{};
#pragma unroll 1
        for (int n = 0; n < blocks; ++n) {
            if (n == leaver) continue;
            const Quad all = load_cluster<Quad>(shared + other * 16, n);
            const Pair half = load_cluster<Pair>(shared + (threads - 1 - thread) * 16 + 8, n);
#pragma unroll
            for (int i = 0; i < 4; ++i) four.x[i] += all.x[i];
#pragma unroll
            for (int i = 0; i < 2; ++i) two.x[i] += half.x[i];
        }
        cluster_arrive();  // it has read
        store_global(args.quads + place(turn) * 16, four);
        store_global(args.pairs + place(turn) * 8, two);
        cluster_wait();
    }
}

}  // namespace cuflash
