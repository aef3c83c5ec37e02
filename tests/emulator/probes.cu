// Small kernels for tests/test_emulator.py: one instruction or one mistake each. A probe's number is its place here.
#include <vector>

#include <ptx.cuh>

namespace cuflash {

struct Args {
    const char* in;
    char* out;
    int64 number;
};

#include <probe.h>

// Where this thread is

PROBE(places) {
    const int thread = static_cast<int>(fresh_block_index()) * 64 + thread_index();
    output(args, 4 * thread, fresh_thread_index());
    output(args, 4 * thread + 1, lane_index());
    output(args, 4 * thread + 2, warp_index());
    output(args, 4 * thread + 3, static_cast<int>(fresh_block_index()));
}

// Warps

PROBE(xor_shuffles) {
    for (int n = 0; n < 5; ++n) output(args, n * WARP + lane_index(), shuffle_xor(lane_index() * 1.5, 1 << n));
}
PROBE(other_shuffles) {
    for (int n = 0; n < 5; ++n) output(args, n * WARP + lane_index(), shuffle_up(3 * lane_index(), 1 << n));
    output(args, 5 * WARP + lane_index(), shuffle_from(3 * lane_index(), 7));
}
PROBE(shuffle_from_several) { output(args, lane_index(), shuffle_from(1, lane_index() / 20)); }
PROBE(reductions) {
    output(args, 2 * lane_index(), redux_add(input<int>(args, lane_index())));
    output(args, 2 * lane_index() + 1, redux_max(input<int>(args, lane_index())));
}
PROBE(votes) {
    const uint32 bits = input<uint32>(args, 0);
    const bool mine = bits >> lane_index() & 1;
    output(args, 3 * lane_index(), ballot(mine));
    output(args, 3 * lane_index() + 1, static_cast<uint32>(any(mine)));
    output(args, 3 * lane_index() + 2, static_cast<uint32>(find_first_set(bits)));
}
PROBE(uniform_value) { output(args, lane_index(), uniform(7)); }
PROBE(uniform_that_differs) { output(args, lane_index(), uniform(lane_index() / 20)); }
PROBE(divergence) {
    if (lane_index() < 8) {
        sync_warp();
    } else {
        ballot(true);
    }
}
PROBE(lane_that_left) {
    if (lane_index() == 3) return;
    sync_warp();
}

// Matrices

PROBE(load_matrices) {
    const uint32 shared = shared_memory();
    store_shared(shared + lane_index() * 16, input<Vector16>(args, lane_index()));
    sync_warp();
    uint32 plain[4], transposed[4];
    const uint32 row = shared + (lane_index() * 5 % WARP) * 16;  // 5 is odd: every row once
    ldmatrix_x4(plain, row);
    ldmatrix_x4_trans(transposed, row);
    for (int n = 0; n < 4; ++n) {
        output(args, lane_index() * 8 + n, plain[n]);
        output(args, lane_index() * 8 + 4 + n, transposed[n]);
    }
}

template <typename Element>
void multiply_matrices(const Args& args) {
    const int lane = lane_index();
    uint32 a[4], b[2];
    float sum[4], product[4];
    for (int n = 0; n < 4; ++n) a[n] = input<uint32>(args, lane * 10 + n);
    for (int n = 0; n < 2; ++n) b[n] = input<uint32>(args, lane * 10 + 4 + n);
    for (int n = 0; n < 4; ++n) sum[n] = input<float>(args, lane * 10 + 6 + n);
    mma_m16n8k16(Element{}, sum, a, b[0], b[1]);
    mma_m16n8k16_first(Element{}, product, a, b[0], b[1]);
    for (int n = 0; n < 4; ++n) {
        output(args, lane * 8 + n, sum[n]);
        output(args, lane * 8 + 4 + n, product[n]);
    }
}
PROBE(mma_float16) { multiply_matrices<Float16>(args); }
PROBE(mma_bfloat16) { multiply_matrices<BFloat16>(args); }

template <int ROWS, int TERMS>
void multiply_float64(const Args& args) {
    constexpr int A = ROWS * TERMS / WARP, B = TERMS / 4, D = ROWS / 4;
    double a[A], b[B], d[D];
    const int first = lane_index() * (A + B + D);
    for (int n = 0; n < A; ++n) a[n] = input<double>(args, first + n);
    for (int n = 0; n < B; ++n) b[n] = input<double>(args, first + A + n);
    for (int n = 0; n < D; ++n) d[n] = input<double>(args, first + A + B + n);
    if constexpr (ROWS == 8) {
        mma_m8n8k4(d[0], d[1], a[0], b[0]);
    } else {
        mma_m16n8(d, a, b);
    }
    for (int n = 0; n < D; ++n) output(args, lane_index() * D + n, d[n]);
}
PROBE(mma_float64_8_4) { multiply_float64<8, 4>(args); }
PROBE(mma_float64_16_4) { multiply_float64<16, 4>(args); }
PROBE(mma_float64_16_8) { multiply_float64<16, 8>(args); }
PROBE(mma_float64_16_16) { multiply_float64<16, 16>(args); }

// Numbers

PROBE(words_of_float64) {
    const double x = input<double>(args, lane_index());
    output(args, 2 * lane_index(), low_word(x));
    output(args, 2 * lane_index() + 1, high_word(x));
    output(args, WARP + lane_index(), from_words(low_word(x), high_word(x)));
}
PROBE(floats_of_16_bits) {
    for (int n = thread_index(); n < 1 << 16; n += WARP) {
        output(args, 2 * n, to_float(Float16{static_cast<unsigned short>(n)}));
        output(args, 2 * n + 1, to_float(BFloat16{static_cast<unsigned short>(n)}));
    }
}
PROBE(pairs_of_floats) {
    for (int n = thread_index(); n < 4096; n += WARP) {
        const float low = input<float>(args, 2 * n), high = input<float>(args, 2 * n + 1);
        output(args, 2 * n, cvt_pair(Float16{}, low, high));
        output(args, 2 * n + 1, cvt_pair(BFloat16{}, low, high));
    }
}
PROBE(floats_of_e4m3) {
    for (int n = thread_index(); n < 256; n += WARP) {
        output(args, n, cvt_pair_of_e4m3<0>(n << 8 | (255 - n)));
        output(args, 256 + n, cvt_pair_of_e4m3<1>(n << 24 | (255 - n) << 16));
    }
}
PROBE(pairs_of_halves) {
    for (int n = thread_index(); n < 4096; n += WARP) {
        const uint32 a = input<uint32>(args, 2 * n), b = input<uint32>(args, 2 * n + 1);
        output(args, 2 * n, add_pair(a, b));
        output(args, 2 * n + 1, multiply_pair(a, b));
    }
}
PROBE(permuted_bytes) {
    if (thread_index() == 0) output(args, 0, byte_permute(input<uint32>(args, 0), input<uint32>(args, 1), 0x7250));
}
PROBE(exponentials) {
    for (int n = thread_index(); n < 4096; n += WARP) {
        output(args, 2 * n, ex2_approx(input<float>(args, n)));
        output(args, 2 * n + 1, lg2_approx(input<float>(args, n)));
    }
}
PROBE(arithmetic) {
    const float a = input<float>(args, 0), b = input<float>(args, 1), c = input<float>(args, 2);
    if (thread_index() != 0) return;
    const float results[] = {fused_multiply_add(a, b, c), multiply(a, b) + c, reciprocal(a),
                             maximum(a, b), minimum(a, b), absolute(b)};
    for (int n = 0; n < 6; ++n) output(args, n, results[n]);
}
PROBE(subnormal_numbers) {
    if (thread_index() == 0) output(args, 0, multiply(input<float>(args, 0), input<float>(args, 1)));
}

// Copies

PROBE(copies) {  // lane l copies l % 17 bytes
    const uint32 to = shared_memory() + lane_index() * 16;
    cp_async_16(to, args.in + lane_index() * 16, lane_index() % 17);
    cp_async_16(to + 512, args.in + lane_index() * 16, lane_index() % 2 == 0);
    for (int n = 0; n < 4; ++n) cp_async_4(to + 1024 + 4 * n, args.in + lane_index() * 16 + 4 * n, n % 2 == 0);
    cp_async_commit_group();
    cp_async_wait_group<0>();
    output(args, lane_index(), load_shared<Vector16>(to));
    output(args, WARP + lane_index(), load_shared<Vector16>(to + 512));
    output(args, 2 * WARP + lane_index(), load_shared<Vector16>(to + 1024));
    output(args, 3 * WARP + lane_index(), load_global_16(args.in + lane_index() * 16, lane_index() % 3 == 0));
}
PROBE(copy_of_the_older_group) {
    const uint32 to = shared_memory() + lane_index() * 32;
    for (int n = 0; n < 2; ++n) {
        cp_async_16(to + 16 * n, args.in + n * 16, true);
        cp_async_commit_group();
    }
    cp_async_wait_group<1>();
    output(args, lane_index(), load_shared<Vector16>(to));
    cp_async_wait_group<0>();
}
PROBE(copy_not_waited_for) {
    cp_async_16(shared_memory() + lane_index() * 16, args.in, true);
    cp_async_commit_group();
    cp_async_wait_group<1>();
    load_shared<int>(shared_memory() + lane_index() * 16);
}
PROBE(copy_not_committed) {
    cp_async_16(shared_memory() + lane_index() * 16, args.in, true);
    cp_async_wait_group<0>();
    load_shared<int>(shared_memory() + lane_index() * 16);
}
PROBE(copy_of_another_thread) {
    cp_async_16(shared_memory() + lane_index() * 16, args.in, true);
    cp_async_commit_group();
    cp_async_wait_group<0>();
    load_shared<int>(shared_memory() + (lane_index() ^ 1) * 16);
}
PROBE(copy_in_flight_at_the_end) {
    cp_async_16(shared_memory() + lane_index() * 16, args.in, true);
    cp_async_commit_group();
}
PROBE(copy_of_too_much) { cp_async_16(shared_memory() + lane_index() * 16, args.in + 4096 - 16, 16 + (lane_index() == 31)); }
PROBE(copy_from_beyond) { cp_async_16(shared_memory(), args.in + (1 << 20), 16); }

// Shared memory and barriers

PROBE(exchange) {  // between warps, twice through the same place
    const int thread = thread_index();
    const uint32 shared = shared_memory();
    int value = input<int>(args, thread);
    for (int turn = 0; turn < 3; ++turn) {
        store_shared(shared + 4 * thread, value);
        sync_threads();
        value += load_shared<int>(shared + 4 * ((thread + 33) % 128));
        sync_threads();
    }
    output(args, thread, value);
}
PROBE(exchange_without_the_second_barrier) {
    const uint32 shared = shared_memory();
    for (int turn = 0; turn < 2; ++turn) {
        store_shared(shared + 4 * thread_index(), turn);
        sync_threads();
        load_shared<int>(shared + 4 * ((thread_index() + 33) % 128));
    }
}
PROBE(exchange_without_barriers) {
    if (warp_index() == 0) store_shared(shared_memory() + 4 * lane_index(), 1);
    if (warp_index() == 1) load_shared<int>(shared_memory() + 4 * lane_index());
}
PROBE(exchange_within_a_warp) {
    store_shared(shared_memory() + 4 * thread_index(), thread_index());
    sync_warp();
    output(args, thread_index(), load_shared<int>(shared_memory() + 4 * (thread_index() ^ 5)));
}
PROBE(exchange_without_sync_warp) {
    store_shared(shared_memory() + 4 * thread_index(), thread_index());
    ballot(true);  // brings the lanes together, but orders no memory
    load_shared<int>(shared_memory() + 4 * (thread_index() ^ 5));
}
PROBE(two_writers) { store_shared(shared_memory(), thread_index()); }
PROBE(nothing_written) { load_shared<int>(shared_memory() + 4 * thread_index()); }
PROBE(unwritten_is_nan) { output(args, thread_index(), load_shared<float>(shared_memory() + 4 * thread_index())); }
PROBE(shared_beyond) { store_shared(shared_memory() + 4 * (947 + thread_index()), 1); }  // for 77 and more
PROBE(shared_below) { load_shared<int>(shared_memory() - 4); }
PROBE(shared_misaligned) { store_shared(shared_memory() + 2, 1.0f); }
PROBE(barrier_without_a_warp) {
    if (warp_index() != 2) sync_threads();
}
PROBE(barrier_that_some_never_reach) {
    if (warp_index() == 2) emulator::wait_until([] { return false; }, "a flag", HERE);
    sync_threads();
}
PROBE(barrier_of_half_a_warp) {
    if (lane_index() < 16) sync_threads();
}

// Global memory and other blocks

PROBE(global_beyond) { load_global<int>(args.in + 4096 + 4 * thread_index()); }
PROBE(global_below) { load_global<int>(args.in - 4); }
PROBE(global_nowhere) { load_global<int>(nullptr); }
PROBE(global_misaligned) { load_global<int>(args.in + 1); }
PROBE(global_input_written) { store_global(const_cast<char*>(args.in), 1); }
PROBE(tickets) {  // every block takes one, whatever the order in which they come
    int ticket = thread_index() == 0 ? atomic_add(args.out, 1) : 0;
    ticket = shuffle_xor(ticket, 0);
    if (thread_index() == 0) output(args, 1 + static_cast<int>(fresh_block_index()), ticket);
}
PROBE(turns) {  // blocks add in their order, though they live at once
    if (thread_index() == 0) {
        const int block = static_cast<int>(fresh_block_index());
        emulator::wait_until([&] { return input<int>(Args{args.out, nullptr, 0}, 0) == block; }, "its turn", HERE);
        output(args, 1, input<int>(Args{args.out, nullptr, 0}, 1) * 3 + block);
        output(args, 0, block + 1);
    }
}
PROBE(endless) {
    for (;;) sync_warp();
}

}  // namespace cuflash
