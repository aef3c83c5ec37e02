// Small kernels for tests/test_emulator_sm90.py: one Hopper instruction or one mistake each. `Element` is the test's.
#include <vector>

#include <ptx_sm90.cuh>

namespace cuflash {

struct Args {
    TensorMap map;
    const char* in;
    char* out;
    int64 number;
};

#include <probe.h>

// Shared memory of all probes: tiles first, then the barriers.
constexpr uint32 BARRIERS = 48 * 1024;
inline uint32 barrier(int n = 0) { return shared_memory() + BARRIERS + 8 * n; }
inline void initialise(int barriers, int count) {
    if (thread_index() == 0) {
        for (int n = 0; n < barriers; ++n) mbarrier_init(barrier(n), count);
        fence_mbarrier_init();
    }
    sync_threads();
}
// Bytes of the input to shared memory.
inline void fill(const Args& args, int bytes, int threads) {
    for (int n = thread_index() * 16; n < bytes; n += threads * 16) {
        store_shared(shared_memory() + n, load_global<Vector16>(args.in + n));
    }
}
inline void load(const Args& args, uint32 offset, Corner corner = {}) {
    cp_async_bulk_tensor_load(shared_memory() + offset, args.map, barrier(), corner, EVICT_FIRST);
}

// Barriers

PROBE(phases) {  // the second warp sees what the first wrote before each of its arrivals
    initialise(2, WARP);
    for (int turn = 0; turn < 6; ++turn) {
        if (warp_index() == 0) {
            mbarrier_wait(barrier(1), turn % 2 ^ 1);  // passes at once the first time
            store_shared(shared_memory() + 4 * lane_index(), turn * 100 + lane_index());
            mbarrier_arrive(barrier(0));
        } else {
            mbarrier_wait(barrier(0), turn % 2);
            output(args, turn * WARP + lane_index(), load_shared<int>(shared_memory() + 4 * (31 - lane_index())));
            mbarrier_arrive(barrier(1));
        }
    }
}
PROBE(phases_without_the_way_back) {
    initialise(1, WARP);
    for (int turn = 0; turn < 6; ++turn) {
        if (warp_index() == 0) {
            store_shared(shared_memory() + 4 * lane_index(), turn);
            mbarrier_arrive(barrier(0));
        } else {
            mbarrier_wait(barrier(0), turn % 2);
            load_shared<int>(shared_memory() + 4 * (31 - lane_index()));
        }
    }
}
PROBE(barrier_that_is_none) { mbarrier_arrive(barrier()); }
PROBE(barrier_misaligned) { mbarrier_init(barrier() + 4, 1); }
PROBE(barrier_of_nobody) { mbarrier_init(barrier(), 0); }
PROBE(barrier_not_synchronised) {
    if (thread_index() == 0) {
        mbarrier_init(barrier(), 1);
        fence_mbarrier_init();
        store_global(args.out, 1);
    } else if (thread_index() == 32) {
        emulator::wait_until([&] { return input<int>(Args{{}, args.out, nullptr, 0}, 0) == 1; }, "a flag", HERE);
        mbarrier_arrive(barrier());
    }
}
PROBE(barrier_not_fenced) {
    if (thread_index() == 0) mbarrier_init(barrier(), 1);
    sync_threads();
    if (thread_index() == 0) load(args, 0);
}
PROBE(barrier_overwritten) {
    initialise(1, 1);
    if (thread_index() == 0) {
        store_shared(barrier(), 0);
        mbarrier_arrive(barrier());
    }
}
PROBE(barrier_with_too_many) {
    initialise(1, 1);
    if (thread_index() == 0) {
        mbarrier_arrive_expect_tx(barrier(), 128);
        mbarrier_arrive(barrier());
    }
}
PROBE(barrier_that_nobody_completes) {
    initialise(1, 2);
    if (thread_index() == 0) mbarrier_arrive_expect_tx(barrier(), 256);
    mbarrier_wait(barrier(), 0);
}
PROBE(named_barrier) {  // of warps 1 and 2, while warp 0 passes
    if (warp_index() == 0) return;
    store_shared(shared_memory() + 4 * thread_index(), thread_index());
    bar_sync(3, 2 * WARP);
    output(args, thread_index(), load_shared<int>(shared_memory() + 4 * (3 * WARP - (thread_index() - WARP) - 1)));
}
PROBE(named_barrier_of_different_numbers) { bar_sync(3, warp_index() == 0 ? 64 : 96); }
PROBE(named_barrier_of_half_a_warp) { bar_sync(3, 48); }
PROBE(barrier_arrived_at) {  // turns: warp 0 writes for the others, which tell it when it may write again, and go on
    const int slot = shared_memory() + 4 * lane_index();
    for (int turn = 0; turn < 6; ++turn) {
        if (warp_index() == 0) {
            if (turn > 0) bar_sync(2, 3 * WARP);
            store_shared(slot, turn * 100 + lane_index());
            bar_arrive(1, 3 * WARP);
        } else {
            bar_sync(1, 3 * WARP);
            output(args, (turn * 2 + warp_index() - 1) * WARP + lane_index(), load_shared<int>(slot ^ 4));
            if (turn < 5) bar_arrive(2, 3 * WARP);
        }
    }
}
PROBE(barrier_arrived_at_by_too_few) {  // the third warp does not come
    if (warp_index() == 0) bar_arrive(3, 3 * WARP);
    if (warp_index() == 1) bar_sync(3, 3 * WARP);
}
PROBE(barrier_arrived_at_twice) {
    if (warp_index() == 0) {
        bar_arrive(3, 3 * WARP);
        bar_arrive(3, 3 * WARP);
    }
}
PROBE(barrier_arrived_at_that_expects_others) {
    if (warp_index() == 0) {
        bar_arrive(3, 2 * WARP);
    } else {
        bar_sync(3, 3 * WARP);
    }
}
PROBE(barrier_arrived_at_by_half_a_warp) { bar_arrive(3, 16); }
PROBE(barrier_arrived_at_by_some_lanes) {
    if (lane_index() < 16) bar_arrive(3, WARP);
}
PROBE(barrier_arrived_at_does_not_wait) {  // so what others wrote before it may not be read after it
    if (warp_index() == 0) {
        store_shared(shared_memory() + 4 * lane_index(), 1);
        bar_sync(3, 2 * WARP);
    } else {
        bar_arrive(3, 2 * WARP);
        load_shared<int>(shared_memory() + 4 * lane_index());
    }
}

// Clusters. Each block has 64 threads, and 16 bytes of shared memory for each.

inline uint32 slot(int thread) { return shared_memory() + 16 * thread; }
inline Vector16 numbers(int turn, int rank, int thread) {
    const uint32 first = turn * 10000 + rank * 1000 + thread * 4;
    return {{first, first + 1, first + 2, first + 3}};
}
inline void sync_cluster() {
    cluster_arrive();
    cluster_wait();
}
// Turns of numbers for the others. Summed, the weights of ranks being 1, 2, ...: the first of those that a thread of each has
// left, and the last two.
inline void exchange_in_cluster(const Args& args, bool second_barrier) {
    const int rank = cluster_rank(), blocks = cluster_size(), thread = thread_index();
    for (int turn = 0; turn < 3; ++turn) {
        store_shared(slot(thread), numbers(turn, rank, thread));
        sync_cluster();
        uint32 sums[3] = {};
        for (int n = 0; n < blocks; ++n) {
            const Vector16 all = load_cluster<Vector16>(slot(63 - thread), n);
            const Vector8 half = load_cluster<Vector8>(slot(thread ^ 32) + 8, n);
            sums[0] += (n + 1) * all.words[0];
            sums[1] += (n + 1) * half.words[0];
            sums[2] += (n + 1) * half.words[1];
        }
        const int at = ((turn * grid_size() + static_cast<int>(fresh_block_index())) * 64 + thread) * 3;
        for (int n = 0; n < 3; ++n) output(args, at + n, sums[n]);
        if (second_barrier) sync_cluster();
    }
}
PROBE(cluster_exchange) { exchange_in_cluster(args, true); }
PROBE(cluster_exchange_without_the_way_back) { exchange_in_cluster(args, false); }
PROBE(cluster_exchange_without_barriers) {
    store_shared(slot(thread_index()), Vector16{});
    sync_threads();
    load_cluster<Vector16>(slot(thread_index()), cluster_rank());  // its own it may
    load_cluster<Vector16>(slot(thread_index()), cluster_rank() ^ 1);
    sync_cluster();
}
PROBE(cluster_written_after_the_arrival) {
    sync_cluster();
    cluster_arrive();
    store_shared(slot(thread_index()), Vector16{});
    cluster_wait();
    load_cluster<Vector8>(slot(thread_index()), cluster_rank() ^ 1);
    sync_cluster();
}
PROBE(cluster_read_before_the_wait) {
    sync_cluster();
    store_shared(slot(thread_index()), Vector16{});
    cluster_arrive();
    load_cluster<Vector16>(slot(thread_index()), cluster_rank() ^ 1);
    cluster_wait();
    sync_cluster();
}
PROBE(cluster_waited_for_by_one_warp) {  // which tells the other by the block's own barrier
    store_shared(slot(thread_index()), numbers(0, cluster_rank(), thread_index()));
    cluster_arrive();
    if (warp_index() == 0) cluster_wait();
    sync_threads();
    const Vector16 all = load_cluster<Vector16>(slot(thread_index()), cluster_size() - 1);
    output(args, static_cast<int>(fresh_block_index()) * 64 + thread_index(), all.words[0]);
    if (warp_index() == 1) cluster_wait();
    sync_cluster();
}
PROBE(cluster_without_a_block) {  // the last one; and of the others the second warp leaves where the first must wait
    const int rank = cluster_rank(), blocks = cluster_size();
    if (rank == blocks - 1) return;
    store_shared(slot(thread_index()), numbers(0, rank, thread_index()));
    cluster_arrive();
    if (warp_index() == 1) return;
    cluster_wait();
    uint32 sum = 0;
    for (int n = 0; n < blocks - 1; ++n) sum += load_cluster<Vector16>(slot(63 - thread_index()), n).words[0];
    output(args, rank * WARP + thread_index(), sum);
    sync_cluster();
}
PROBE(cluster_places) {
    const int block = static_cast<int>(fresh_block_index());
    output(args, 2 * block, cluster_size());
    output(args, 2 * block + 1, cluster_rank());
}
PROBE(cluster_arrived_at_twice) {
    cluster_arrive();
    cluster_arrive();
}
PROBE(cluster_waited_for_without_arrival) { cluster_wait(); }
PROBE(cluster_waited_for_twice) {
    sync_cluster();
    cluster_wait();
}
PROBE(cluster_arrived_at_in_two_places) {
    if (lane_index() < 16) {
        cluster_arrive();
    } else {
        cluster_arrive();
    }
}
PROBE(cluster_arrived_at_by_half_a_warp) {
    if (lane_index() < 16) cluster_arrive();
}
PROBE(cluster_arrived_at_by_too_few) {  // a warp waits for what another would do after the barrier
    if (cluster_rank() == 0 && warp_index() == 1) bar_sync(3, 64);
    sync_cluster();
    if (cluster_rank() == 0 && warp_index() == 0) bar_arrive(3, 64);
}
PROBE(cluster_block_has_left) {
    if (cluster_rank() == 1) return;
    sync_cluster();
    load_cluster<Vector16>(slot(0), 1);
}
PROBE(cluster_block_leaves_too_early) {
    store_shared(slot(thread_index()), Vector16{});
    sync_cluster();
    load_cluster<Vector16>(slot(thread_index()), cluster_rank() ^ 1);
}
PROBE(cluster_block_leaves_having_arrived) {
    store_shared(slot(thread_index()), Vector16{});
    sync_cluster();
    load_cluster<Vector16>(slot(thread_index()), cluster_rank() ^ 1);
    cluster_arrive();
}
PROBE(cluster_rank_beyond) {
    sync_cluster();
    load_cluster<Vector16>(slot(0), cluster_size());
}
PROBE(cluster_rank_below) {
    sync_cluster();
    load_cluster<Vector16>(slot(0), -1);
}
PROBE(cluster_beyond) {
    sync_cluster();
    load_cluster<Vector16>(shared_memory() + BARRIERS + 64, cluster_rank() ^ 1);
}
PROBE(cluster_below) {
    sync_cluster();
    load_cluster<Vector8>(shared_memory() - 8, cluster_rank() ^ 1);
}
PROBE(cluster_misaligned) {
    sync_cluster();
    load_cluster<Vector16>(slot(0) + 8, cluster_rank() ^ 1);
}
PROBE(cluster_misaligned_half) {
    sync_cluster();
    load_cluster<Vector8>(slot(0) + 4, cluster_rank() ^ 1);
}
PROBE(cluster_unwritten) {
    store_shared(slot(thread_index()), Vector8{});
    sync_cluster();
    load_cluster<Vector16>(slot(thread_index()), cluster_rank() ^ 1);
}

// Tensor copies

PROBE(load_box) {  // in: five coordinates, bytes
    initialise(1, 1);
    const int bytes = input<int>(args, 5);
    if (thread_index() == 0) {
        mbarrier_arrive_expect_tx(barrier(), bytes);
        load(args, 0, {input<int>(args, 0), input<int>(args, 1), input<int>(args, 2), input<int>(args, 3), input<int>(args, 4)});
    }
    mbarrier_wait(barrier(), 0);
    for (int n = thread_index(); n < bytes / 4; n += WARP) output(args, n, load_shared<int>(shared_memory() + 4 * n));
}
PROBE(store_box) {  // in: five coordinates, bytes, two words, then the bytes
    const int bytes = input<int>(args, 5);
    for (int n = thread_index(); n < bytes / 4; n += WARP) store_shared(shared_memory() + 4 * n, input<int>(args, 8 + n));
    fence_proxy_async();
    sync_threads();
    if (thread_index() != 0) return;
    cp_async_bulk_tensor_store(args.map, shared_memory(), {input<int>(args, 0), input<int>(args, 1), input<int>(args, 2),
                                                           input<int>(args, 3), input<int>(args, 4)});
    cp_async_bulk_commit_group();
    cp_async_bulk_wait_group_read<0>();
}
PROBE(load_not_waited_for) {
    initialise(1, 1);
    if (thread_index() == 0) {
        mbarrier_arrive_expect_tx(barrier(), 8192);
        load(args, 0);
        load_shared<int>(shared_memory() + 128);
    }
}
PROBE(load_waited_for_by_another) {  // lane 1 waits, lane 2 reads
    initialise(1, 1);
    if (thread_index() == 0) {
        mbarrier_arrive_expect_tx(barrier(), 8192);
        load(args, 0);
    }
    if (lane_index() == 1) mbarrier_wait(barrier(), 0);
    ballot(true);
    if (lane_index() == 2) load_shared<int>(shared_memory() + 128);
}
PROBE(load_over_what_is_read) {
    initialise(1, 1);
    if (warp_index() == 1) store_shared(shared_memory() + 4 * lane_index(), 1);
    sync_threads();
    if (warp_index() == 1) load_shared<int>(shared_memory() + 4 * lane_index());
    if (thread_index() == 0) {
        mbarrier_arrive_expect_tx(barrier(), 8192);
        load(args, 0);
    }
    mbarrier_wait(barrier(), 0);
}
PROBE(load_of_more_than_announced) {
    initialise(1, 1);
    if (thread_index() == 0) {
        mbarrier_arrive_expect_tx(barrier(), 4096);
        load(args, 0);
    }
    mbarrier_wait(barrier(), 0);
}
PROBE(load_of_less_than_announced) {
    initialise(1, 1);
    if (thread_index() == 0) {
        mbarrier_arrive_expect_tx(barrier(), 8192 + 64);
        load(args, 0);
    }
    mbarrier_wait(barrier(), 0);
}
PROBE(load_of_half_that_is_announced) {  // the first of two loads ends the phase
    initialise(1, 1);
    if (thread_index() == 0) {
        mbarrier_arrive_expect_tx(barrier(), 8192);
        load(args, 0);
        load(args, 8192);
    }
    mbarrier_wait(barrier(), 0);
    load_shared<int>(shared_memory() + 4 * thread_index());
    load_shared<int>(shared_memory() + 8192 + 4 * thread_index());
}
PROBE(load_misaligned) {
    initialise(1, 1);
    if (thread_index() == 0) load(args, 512);
}
PROBE(load_beyond) {
    initialise(1, 1);
    if (thread_index() == 0) load(args, 48 * 1024 - 1024);
}
PROBE(load_of_no_map) {
    initialise(1, 1);
    if (thread_index() == 0) cp_async_bulk_tensor_load(shared_memory(), TensorMap{}, barrier(), {}, EVICT_FIRST);
}
PROBE(load_in_flight_at_the_end) {
    initialise(1, 1);
    if (thread_index() == 0) load(args, 0);
}
PROBE(store_without_fence) {
    fill(args, 8192, WARP);
    sync_threads();
    if (thread_index() == 0) {
        cp_async_bulk_tensor_store(args.map, shared_memory(), {});
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group_read<0>();
    }
}
PROBE(store_fenced_by_the_reader) {  // the writers should have
    fill(args, 8192, WARP);
    sync_threads();
    if (thread_index() == 0) {
        fence_proxy_async();
        cp_async_bulk_tensor_store(args.map, shared_memory(), {});
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group_read<0>();
    }
}
PROBE(store_fenced_after_the_barrier) {
    fill(args, 8192, WARP);
    sync_threads();
    fence_proxy_async();
    if (thread_index() == 0) {
        cp_async_bulk_tensor_store(args.map, shared_memory(), {});
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group_read<0>();
    }
}
PROBE(store_overwritten) {
    fill(args, 8192, WARP);
    fence_proxy_async();
    sync_threads();
    if (thread_index() == 0) {
        cp_async_bulk_tensor_store(args.map, shared_memory(), {});
        cp_async_bulk_commit_group();
    }
    sync_threads();
    store_shared(shared_memory() + 4 * thread_index(), 0);
    if (thread_index() == 0) cp_async_bulk_wait_group_read<0>();
}
PROBE(store_not_waited_for) {
    fill(args, 8192, WARP);
    fence_proxy_async();
    sync_threads();
    if (thread_index() == 0) {
        cp_async_bulk_tensor_store(args.map, shared_memory(), {});
        cp_async_bulk_commit_group();
    }
}
PROBE(store_not_committed) {
    fill(args, 8192, WARP);
    fence_proxy_async();
    sync_threads();
    if (thread_index() == 0) {
        cp_async_bulk_tensor_store(args.map, shared_memory(), {});
        cp_async_bulk_wait_group_read<0>();
    }
}
PROBE(store_matrices) {  // as they are, then transposed
    uint32 r[4];
    for (int n = 0; n < 4; ++n) r[n] = input<uint32>(args, lane_index() * 4 + n);
    stmatrix_x4(shared_memory() + (lane_index() * 5 % WARP) * 16, r);
    stmatrix_x4_trans(shared_memory() + 512 + (lane_index() * 5 % WARP) * 16, r);
    sync_warp();
    for (int n = lane_index(); n < 2 * WARP; n += WARP) {
        output(args, n, load_shared<Vector16>(shared_memory() + 16 * n));
    }
}
PROBE(store_matrices_misaligned) {
    uint32 r[4] = {};
    stmatrix_x4_trans(shared_memory() + 8, r);
}
PROBE(store_matrices_by_some_lanes) {
    uint32 r[4] = {};
    if (lane_index() < 8) stmatrix_x4_trans(shared_memory() + 16 * lane_index(), r);
}

// Copies of bytes

PROBE(load_bytes) {  // in: where from, where to, how many; then the bytes
    initialise(1, 1);
    const int from = input<int>(args, 0), to = input<int>(args, 1), bytes = input<int>(args, 2);
    if (thread_index() == 0) {
        mbarrier_arrive_expect_tx(barrier(), bytes);
        cp_async_bulk_load(shared_memory() + to, args.in + from, bytes, barrier());
    }
    mbarrier_wait(barrier(), 0);
    for (int n = thread_index() * 4; n < bytes; n += WARP * 4) {
        output(args, n / 4, load_shared<int>(shared_memory() + to + n));
    }
}
PROBE(store_and_add_bytes) {  // in: 512 floats that replace those of `out`, and 512 that are added to the next, twice
    fill(args, 4096, WARP);
    fence_proxy_async();
    sync_warp();
    if (thread_index() != 0) return;
    cp_async_bulk_store(args.out, shared_memory(), 2048);
    cp_async_bulk_commit_group();
    cp_reduce_async_bulk_add(args.out + 2048, shared_memory() + 2048, 2048);
    cp_reduce_async_bulk_add(args.out + 2048, shared_memory() + 2048, 2048);
    cp_async_bulk_commit_group();
    cp_async_bulk_wait_group<1>();
    output(args, 1024, input<float>(Args{{}, args.out, nullptr, 0}, 511));  // there for this thread
    cp_async_bulk_wait_group<0>();
    output(args, 1025, input<float>(Args{{}, args.out, nullptr, 0}, 1023));
}
PROBE(bytes_seen_too_early) {  // their shared memory has been read, but they need not be there
    store_shared(shared_memory() + 16 * thread_index(), Vector16{{1, 1, 1, 1}});
    fence_proxy_async();
    sync_warp();
    if (thread_index() == 0) {
        cp_async_bulk_store(args.out, shared_memory(), 512);
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group_read<0>();
        output(args, 128, load_global<int>(args.out));
        cp_async_bulk_wait_group<0>();
        output(args, 129, load_global<int>(args.out));
    }
}
PROBE(turns_of_blocks) {  // each waits for the one after it: all must be there
    char* const turn = args.out;
    const int mine = grid_size() - 1 - static_cast<int>(fresh_block_index());
    if (thread_index() == 0) {
        while (load_acquire(turn) != mine) {
        }
        output(args, 1 + mine, static_cast<int>(fresh_block_index()));
        add_release(turn, 1);
    }
}
// A store of the first 512 bytes of shared memory, for what may be wrong with it.
inline void write_tile() {
    store_shared(shared_memory() + 16 * lane_index(), Vector16{});
    fence_proxy_async();
    sync_warp();
}
inline void finish_stores() {
    cp_async_bulk_commit_group();
    cp_async_bulk_wait_group<0>();
}
inline void load_some(const char* from, uint32 to, uint32 bytes) {
    initialise(1, 1);
    if (thread_index() == 0) {
        mbarrier_arrive_expect_tx(barrier(), bytes);
        cp_async_bulk_load(to, from, bytes, barrier());
    }
    mbarrier_wait(barrier(), 0);
}
PROBE(load_of_some_bytes) { load_some(args.in, shared_memory(), 24); }
PROBE(load_of_no_bytes) { load_some(args.in, shared_memory(), 0); }
PROBE(load_from_a_misaligned_place) { load_some(args.in + 8, shared_memory(), 32); }
PROBE(load_to_a_misaligned_place) { load_some(args.in, shared_memory() + 8, 32); }
PROBE(load_beyond_the_array) { load_some(args.in + 65536 - 16, shared_memory(), 32); }
PROBE(load_beyond_shared_memory) { load_some(args.in, shared_memory() + 49216 - 16, 32); }
PROBE(load_bytes_not_announced) {
    initialise(1, 1);
    if (thread_index() == 0) {
        mbarrier_arrive_expect_tx(barrier(), 48);
        cp_async_bulk_load(shared_memory(), args.in, 32, barrier());
    }
    mbarrier_wait(barrier(), 0);
}
PROBE(load_bytes_not_waited_for) {
    initialise(1, 1);
    if (thread_index() == 0) {
        mbarrier_arrive_expect_tx(barrier(), 32);
        cp_async_bulk_load(shared_memory(), args.in, 32, barrier());
        load_shared<int>(shared_memory());
    }
}
PROBE(load_bytes_in_flight_at_the_end) {
    initialise(1, 1);
    if (thread_index() == 0) cp_async_bulk_load(shared_memory(), args.in, 32, barrier());
}
PROBE(store_of_some_bytes) {
    write_tile();
    if (thread_index() == 0) cp_async_bulk_store(args.out, shared_memory(), 40);
}
PROBE(store_to_a_misaligned_place) {
    write_tile();
    if (thread_index() == 0) cp_async_bulk_store(args.out + 4, shared_memory(), 32);
}
PROBE(add_from_a_misaligned_place) {
    write_tile();
    if (thread_index() == 0) cp_reduce_async_bulk_add(args.out, shared_memory() + 4, 32);
}
PROBE(add_beyond_the_array) {
    write_tile();
    if (thread_index() == 0) cp_reduce_async_bulk_add(args.out + 65536 - 16, shared_memory(), 32);
}
PROBE(add_to_an_input) {
    write_tile();
    if (thread_index() == 0) cp_reduce_async_bulk_add(const_cast<char*>(args.in), shared_memory(), 32);
}
PROBE(add_without_fence) {
    store_shared(shared_memory() + 16 * lane_index(), Vector16{});
    sync_warp();
    if (thread_index() == 0) {
        cp_reduce_async_bulk_add(args.out, shared_memory(), 512);
        finish_stores();
    }
}
PROBE(add_fenced_by_one) {
    store_shared(shared_memory() + 16 * lane_index(), Vector16{});
    sync_warp();
    if (thread_index() == 0) {
        fence_proxy_async();
        cp_reduce_async_bulk_add(args.out, shared_memory(), 512);
        finish_stores();
    }
}
PROBE(add_of_what_is_overwritten) {
    write_tile();
    if (thread_index() == 0) {
        cp_reduce_async_bulk_add(args.out, shared_memory(), 512);
        cp_async_bulk_commit_group();
    }
    sync_warp();
    store_shared(shared_memory() + 4 * thread_index(), 0);
    if (thread_index() == 0) cp_async_bulk_wait_group<0>();
}
PROBE(add_not_waited_for) {
    write_tile();
    if (thread_index() == 0) {
        cp_reduce_async_bulk_add(args.out, shared_memory(), 512);
        cp_async_bulk_commit_group();
    }
}
PROBE(add_not_committed) {
    write_tile();
    if (thread_index() == 0) cp_reduce_async_bulk_add(args.out, shared_memory(), 512);
}

// Products

// in: tiles, then two descriptors, which leave the start of shared memory out. d starts as 1, 2, 3, ...
constexpr int TILE_BYTES = 32 * 1024, COLUMNS = 24;
template <int TRANSPOSE_A, int TRANSPOSE_B>
void product_of_descriptors(const Args& args) {
    fill(args, TILE_BYTES, WARPGROUP);
    fence_proxy_async();
    sync_threads();
    const uint64 start = shared_memory() >> 4;
    const uint64 a = input<uint64>(args, TILE_BYTES / 8) + start, b = input<uint64>(args, TILE_BYTES / 8 + 1) + start;
    float d[COLUMNS / 2];
    for (int i = 0; i < COLUMNS / 2; ++i) d[i] = static_cast<float>(thread_index() * COLUMNS / 2 + i);
    wgmma_fence();
    Wgmma<COLUMNS>::ss<TRANSPOSE_A, TRANSPOSE_B>(d, a, b, true);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    for (int i = 0; i < COLUMNS / 2; ++i) output(args, thread_index() * COLUMNS / 2 + i, d[i]);
}
PROBE(product_00) { product_of_descriptors<0, 0>(args); }
PROBE(product_01) { product_of_descriptors<0, 1>(args); }
PROBE(product_10) { product_of_descriptors<1, 0>(args); }
PROBE(product_11) { product_of_descriptors<1, 1>(args); }

// A product of the first 64 rows in shared memory, swizzled, with themselves, and what a probe does around it.
struct Operands {
    uint64 tile = matrix_descriptor(shared_memory() / 16, 16, 1024);
    float d[32] = {};
    uint32 a[4] = {};
    Operands(const Args& args, int threads = WARPGROUP) {
        fill(args, 8192, threads);
        fence_proxy_async();
        sync_threads();
    }
    void ss(Site here = HERE) { Wgmma<64>::ss<0, 0>(d, tile, tile, true, here); }
    void rs(Site here = HERE) { Wgmma<64>::rs<0>(d, a, tile, true, here); }
    void finish(Site here = HERE) {
        wgmma_commit_group(here);
        wgmma_wait_group<0>(here);
    }
};
PROBE(accumulators_in_flight) {  // read as NaN, and come back
    Operands o(args);
    wgmma_fence();
    o.ss();
    wgmma_commit_group();
    output(args, 2 * thread_index(), o.d[5]);
    wgmma_wait_group<0>();
    output(args, 2 * thread_index() + 1, o.d[5]);
}
PROBE(registers_of_two_products) {  // an A operand that both use, two accumulators
    Operands o(args);
    float other[32] = {};
    for (uint32& word : o.a) word = 0x3f803f80;  // ones
    wgmma_fence();
    o.rs();
    wgmma_commit_group();
    Wgmma<64>::rs<0>(other, o.a, o.tile, false);
    wgmma_commit_group();
    wgmma_wait_group<1>();
    output(args, 4 * thread_index(), o.d[7]);
    output(args, 4 * thread_index() + 1, o.a[0]);
    wgmma_wait_group<0>();
    output(args, 4 * thread_index() + 2, other[7]);
    output(args, 4 * thread_index() + 3, o.a[0]);
}
PROBE(product_without_fence) {
    Operands o(args);
    o.ss();
    o.finish();
}
PROBE(second_product_without_fence) {
    Operands o(args);
    wgmma_fence();
    o.ss();
    o.finish();
    o.ss();
    o.finish();
}
PROBE(accumulator_written_after_the_fence) {
    Operands o(args);
    wgmma_fence();
    o.ss();
    o.finish();
    wgmma_fence();
    o.d[3] -= 2.0f;
    o.ss();
    o.finish();
}
PROBE(accumulator_written_in_flight) {
    Operands o(args);
    wgmma_fence();
    o.ss();
    o.d[3] += 1.0f;
    o.finish();
}
PROBE(operand_written_in_flight) {
    Operands o(args);
    wgmma_fence();
    o.rs();
    o.a[2] = 5;
    o.finish();
}
PROBE(product_not_waited_for) {
    Operands o(args);
    wgmma_fence();
    o.ss();
    wgmma_commit_group();
}
PROBE(product_not_committed) {
    Operands o(args);
    wgmma_fence();
    o.ss();
    wgmma_wait_group<0>();
}
PROBE(product_of_three_warps) {
    Operands o(args);
    if (warp_index() == 2) return;
    wgmma_fence();
    o.ss();
    o.finish();
}
PROBE(product_of_half_a_warpgroup) {  // 160 threads; the fifth warp belongs to none
    Operands o(args, 160);
    wgmma_fence();
    if (warp_index() == 4) o.ss();
}
PROBE(lanes_that_disagree) {
    Operands o(args);
    wgmma_fence();
    o.tile += thread_index() == 77;
    o.ss();
    o.finish();
}
PROBE(warps_that_disagree) {
    Operands o(args);
    wgmma_fence();
    Wgmma<64>::ss<0, 0>(o.d, o.tile, o.tile, warp_index() != 1);
    o.finish();
}
PROBE(warps_at_different_products) {
    Operands o(args);
    wgmma_fence();
    if (warp_index() == 3) {
        o.rs();
    } else {
        o.ss();
    }
    o.finish();
}
PROBE(lanes_that_commit_different_groups) {
    Operands o(args);
    wgmma_fence();
    if (lane_index() == 9) wgmma_commit_group();
    o.ss();
    wgmma_commit_group();
    wgmma_wait_group<0>();
}
PROBE(descriptor_with_base_offset) {
    Operands o(args);
    wgmma_fence();
    o.tile |= 1ull << 49;
    o.ss();
    o.finish();
}
PROBE(product_beyond) {
    Operands o(args);
    wgmma_fence();
    o.tile = matrix_descriptor((shared_memory() + 49 * 1024) / 16, 16, 1024);
    o.ss();
    o.finish();
}
PROBE(product_without_proxy_fence) {
    fill(args, 8192, WARPGROUP);
    sync_threads();
    float d[32];
    const uint64 tile = matrix_descriptor(shared_memory() / 16, 16, 1024);
    wgmma_fence();
    Wgmma<64>::ss<0, 0>(d, tile, tile, false);
    wgmma_commit_group();
    wgmma_wait_group<0>();
}
PROBE(product_of_what_is_overwritten) {
    Operands o(args);
    wgmma_fence();
    o.ss();
    wgmma_commit_group();
    store_shared(shared_memory() + 16 * thread_index(), Vector16{});
    wgmma_wait_group<0>();
}
PROBE(product_of_a_stage_released_early) {  // a load is told to come before all have waited
    initialise(2, 1);
    if (thread_index() >= WARPGROUP) {
        if (thread_index() == WARPGROUP) {
            mbarrier_arrive_expect_tx(barrier(0), 8192);
            load(args, 0);
            mbarrier_wait(barrier(1), 0);
            mbarrier_arrive_expect_tx(barrier(0), 8192);
            load(args, 0);
            mbarrier_wait(barrier(0), 1);
        }
        return;
    }
    float d[32] = {};
    const uint64 tile = matrix_descriptor(shared_memory() / 16, 16, 1024);
    mbarrier_wait(barrier(0), 0);
    wgmma_fence();
    Wgmma<64>::ss<0, 0>(d, tile, tile, false);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    if (thread_index() == 0) mbarrier_arrive(barrier(1));  // says nothing of the other three warps
}

// Registers

PROBE(registers_that_move) {
    if (warp_index() < 4) {
        setmaxnreg_dec<24>();
    } else {
        setmaxnreg_inc<240>();
    }
    output(args, thread_index(), 1);
}
PROBE(registers_that_nobody_gives) {  // 168 each at the start
    if (warp_index() < 4) {
        setmaxnreg_dec<104>();
    } else {
        setmaxnreg_inc<208>();
    }
}
PROBE(registers_taken_away_twice) {
    setmaxnreg_dec<40>();
    setmaxnreg_dec<48>();
}
PROBE(registers_too_few) { setmaxnreg_dec<20>(); }

}  // namespace cuflash
