// Hopper's asynchronous units, for ptx_sm90.cuh: products of a warpgroup, bulk copies, barriers in shared memory.
//
// Whatever is asynchronous reads its sources and delivers its results as late as the program allows, and is ordered
// after what its issue was ordered after, no more:
//
// - A product reads shared memory when a warp waits for it, each warp for its own 16 rows. Until then its registers,
//   accumulators and A operand, hold a NaN; they come back, if nothing has touched them, with the wait.
// - A load, of a box of a tensor or of bytes as they lie, poisons its destination at once and lands by itself, at the
//   latest when no thread can go on.
// - A store, or a sum onto what is there, reads shared memory when its thread waits for that, and changes global memory
//   when its thread waits for it, else some time after the read.
// - What threads have written to shared memory may be read so only if each of them has executed fence_proxy_async
//   between its write and the barrier that orders the two.
#pragma once

#include <deque>
#include <type_traits>

#include "core.h"
#include "half.h"

namespace emulator {

constexpr uint32_t POISON = 0x7f817f81;  // NaN in all formats; signalling in float32, so that arithmetic changes it

// Fences ---------------------------------------------------------------------------------------------------------

// When a thread executed a fence, in its warp's time, which every fence moves on.
struct Fences {
    uint32_t times[16] = {};
    uint32_t count = 0;
    void add() { times[count++ % 16] = time_of(block(), thread())++; }
    // Whether there was one from `first` to `last`; of very old ones it is taken for granted.
    bool between(uint32_t first, uint32_t last) const {
        if (count > 16 && first < times[count % 16]) return true;
        for (uint32_t n = 0; n < std::min(count, 16u); ++n) {
            if (first <= times[n] && times[n] <= last) return true;
        }
        return false;
    }
};
struct ThreadFences {
    Fences proxy, barriers;
};
struct BlockFences {
    std::vector<ThreadFences> threads = std::vector<ThreadFences>(MOST_THREADS);
};
inline ThreadFences& own_fences() { return state_of<BlockFences>(block()).threads[thread().index]; }

inline int threads_of_cluster() { return static_cast<int>(world.launch->threads * world.launch->cluster); }
// Of the thread with this number within the cluster.
inline ThreadFences& fences_of(Cluster& cluster, int number) {
    const int threads = static_cast<int>(world.launch->threads);
    return state_of<BlockFences>(*cluster.blocks[number / threads]).threads[number % threads];
}

// Reads that happen after their issue ------------------------------------------------------------------------------

// Who reads: a thread, as it was when it issued the instruction, or a unit in its name.
struct Reader {
    Actor actor;  // the thread
    const Actor* unit = nullptr;  // whose read it is, when it happens
    Block* block = nullptr;
    uint32_t issued = 0;  // by its warp's time, which the issue moves on
    Site here{};
    Reader() = default;
    Reader(Thread& t, const Actor& unit, Site here)
        : actor(t), unit(&unit), block(t.block), issued(time_of(*t.block, t)++), here(here) {}

    void check(uint32_t offset) {
        Cell& cell = block->cells[offset / 4];
        const Record write = cell.write;
        const uint64_t checks = world.launch->checks;
        if (write.time & IN_FLIGHT) race("reads", offset, "written", write, here, NO_WAIT);
        if (write.time != 0 && (checks & RACES)) {  // what nothing has written is NaN
            const uint32_t last = write.actor == actor.number ? issued : actor.clock.at[write.actor / WARP_LANES];
            if (write.time > last) race("reads", offset, "written", write, here, NO_ORDER);
            if (write.actor < threads_of_cluster() &&
                !fences_of(*block->cluster, write.actor).proxy.between(write.time, last)) {
                race("reads", offset, "written", write, here, " without fence_proxy_async before the barrier between them");
            }
        }
        const Record mine{time_of(*block, *unit), static_cast<uint16_t>(unit->number), number_of(here)};
        const bool covers = cell.reads[0].time == 0 || ordered(cell.reads[0], actor) ||
                            cell.reads[0].actor / WARP_LANES == unit->component();
        cell.reads[covers ? 0 : 1] = mine;
    }
    // 16 bytes, of which one word, `word`, stands for all in the checks.
    const char* chunk(uint32_t address, uint32_t word) {
        const Window window = window_of(address, 16, 16, READS, *block, here);
        check(window.offset + 4 * word);
        return window.block->shared + window.offset;
    }
};

// Barriers in shared memory ----------------------------------------------------------------------------------------

struct MBarrier {
    uint32_t offset;
    int count, missing;    // arrivals of a phase, and those that are still to come
    int64_t bytes = 0;     // announced that have not come
    uint32_t phase = 0;
    Clock clocks[2];       // of the phases of each parity
    std::vector<Thread*> waiting[2];
    char text[2][128];     // what those who wait wait for
    Record init;           // as shared memory remembers it
    Site here;

    void describe() {
        for (uint32_t parity = 0; parity < 2; ++parity) {
            if (waiting[parity].empty()) continue;
            std::snprintf(text[parity], sizeof text[parity], "mbarrier_wait, parity %u, offset %u: phase %u lacks %d of %d arrivals, %lld bytes",
                          parity, offset, phase, missing, count, static_cast<long long>(bytes));
        }
    }
    // Ends the phase if all has come.
    void settle(Site place) {
        if (missing == 0 && bytes < 0) {
            fail(place, "brings %lld bytes more to the barrier at offset %u than were announced (initialised at %s:%d)",
                 static_cast<long long>(-bytes), offset, here.file, here.line);
        }
        if (missing == 0 && bytes == 0) {
            for (Thread* t : waiting[phase & 1]) unblock(*t);
            waiting[phase & 1].clear();
            missing = count;
            clocks[++phase & 1] = Clock();
        }
        describe();
        progress();
    }
};

struct BlockBarriers {
    std::unordered_map<uint32_t, MBarrier> by_offset;
};

// The barrier at this address, which must be initialised for the running thread and, if so asked, for asynchronous copies.
inline MBarrier& barrier_at(uint32_t address, bool asynchronous, Site here) {
    const Window window = window_of(address, 8, 8, READS, block(), here);
    auto& barriers = state_of<BlockBarriers>(*window.block).by_offset;
    const auto found = barriers.find(window.offset);
    if (found == barriers.end()) fail(here, "uses a barrier at offset %u, where none is initialised", window.offset);
    MBarrier& barrier = found->second;
    const Record& now = window.block->cells[window.offset / 4].write;
    if (now.time != barrier.init.time || now.actor != barrier.init.actor) {
        race("uses the barrier in", window.offset, "overwritten", now, here, "");
    }
    if (world.launch->checks & RACES) {
        Thread& t = thread();
        if (!ordered(now, t)) race("uses the barrier in", window.offset, "initialised", now, here, NO_ORDER);
        const uint32_t last = now.actor == t.number ? time_of(*t.block, t) : t.clock.at[now.actor / WARP_LANES];
        if (asynchronous && !fences_of(*t.block->cluster, now.actor).barriers.between(now.time, last)) {
            race("uses the barrier in", window.offset, "initialised", now, here, " without fence_mbarrier_init");
        }
    }
    return barrier;
}

inline void initialise_barrier(uint32_t address, int count, Site here) {
    if (count < 1 || count >= 1 << 20) fail(here, "initialises a barrier for %d arrivals", count);
    write_shared(address, 8, 8, here);
    const Window window = window_of(address, 8, 8, WRITES, block(), here);
    MBarrier& barrier = state_of<BlockBarriers>(*window.block).by_offset[window.offset];
    barrier = MBarrier{};
    barrier.offset = window.offset;
    barrier.count = barrier.missing = count;
    barrier.init = window.block->cells[window.offset / 4].write;
    barrier.here = here;
}

inline void arrive(uint32_t address, int64_t bytes, Site here) {
    MBarrier& barrier = barrier_at(address, false, here);
    if (barrier.missing == 0) {
        fail(here, "arrives at the barrier at offset %u, where all %d have arrived and %lld bytes are still to come",
             barrier.offset, barrier.count, static_cast<long long>(barrier.bytes));
    }
    if (bytes < 0 || bytes >= 1 << 20) fail(here, "announces %lld bytes; a barrier counts up to 2^20 - 1", static_cast<long long>(bytes));
    barrier.bytes += bytes;
    --barrier.missing;
    release(thread(), barrier.clocks[barrier.phase & 1]);
    barrier.settle(here);
}

inline void wait_for_barrier(uint32_t address, uint32_t parity, Site here) {
    if (parity > 1) fail(here, "waits for parity %u", parity);
    MBarrier& barrier = barrier_at(address, false, here);
    if ((barrier.phase & 1) == parity) {
        barrier.waiting[parity].push_back(&thread());
        barrier.describe();
        block_on(barrier.text[parity], here);
    } else if (barrier.phase == 0) {
        return;  // parity 1 of a fresh barrier
    }
    acquire(thread(), barrier.clocks[parity]);
}

// Bulk copies ------------------------------------------------------------------------------------------------------
//
// Of a box of a tensor or of bytes as they lie. Either tells its place in the kernel, where it begins in shared memory,
// how many `bytes` it has and where each `chunk` of 16, by its number, lies in shared memory. `fetch` gets them all from
// global memory, `deliver` puts them there.

// What tensor_map.py's `encode` writes.
struct EmulatedMap {
    uint64_t base, dims[5], strides[5];
    uint32_t box[5], swizzle, magic, pad[3];
};
static_assert(sizeof(EmulatedMap) == 128);

// One box of a tensor and its place in shared memory.
struct Box {
    EmulatedMap map;
    int corner[5];
    uint32_t shared;
    Site here;

    Box(const void* encoded, uint32_t shared, const int (&corner)[5], Site here) : shared(shared), here(here) {
        std::memcpy(&map, encoded, sizeof map);
        std::memcpy(this->corner, corner, sizeof corner);
        if (map.magic != 0x70a3d3a9) fail(here, "copies a tensor whose map is none");
        const uint32_t align = map.swizzle ? 8 * map.swizzle : 128;  // a whole pattern of the swizzle
        if (shared % align != 0) fail(here, "copies a box to or from shared memory at %u, not a multiple of %u", shared, align);
        if (map.swizzle && row_bytes() != map.swizzle) {
            fail(here, "copies rows of %u bytes under a swizzle of %u: not emulated", row_bytes(), map.swizzle);
        }
    }
    uint32_t row_bytes() const { return map.box[0] * static_cast<uint32_t>(map.strides[0]); }
    uint32_t rows() const { return map.box[1] * map.box[2] * map.box[3] * map.box[4]; }
    uint32_t bytes() const { return rows() * row_bytes(); }
    uint32_t chunk(uint32_t n) const {
        const uint32_t address = shared + n * 16;
        return map.swizzle ? address ^ (address >> 7) % (map.swizzle / 16) * 16 : address;
    }
    // The part of a row that lies inside the tensor: its first byte in the row, their number, their address.
    struct Part {
        uint32_t first, bytes;
        char* global;
    };
    Part inside(uint32_t row) const {
        uint64_t address = map.base;
        for (int axis = 1; axis < 5; row /= map.box[axis++]) {
            const int64_t at = corner[axis] + static_cast<int64_t>(row % map.box[axis]);
            if (at < 0 || at >= static_cast<int64_t>(map.dims[axis])) return {0, 0, nullptr};
            address += at * map.strides[axis];
        }
        const int64_t itemsize = map.strides[0], first = std::max(0, -corner[0]);
        const int64_t end = std::min<int64_t>(map.box[0], static_cast<int64_t>(map.dims[0]) - corner[0]);
        if (first >= end) return {0, 0, nullptr};
        address += (corner[0] + first) * itemsize;
        return {static_cast<uint32_t>(first * itemsize), static_cast<uint32_t>((end - first) * itemsize),
                reinterpret_cast<char*>(address)};
    }
    void fetch(char* data) const {
        std::memset(data, 0, bytes());
        for (uint32_t row = 0; row < rows(); ++row) {
            const Part part = inside(row);
            if (part.bytes == 0) continue;
            check_global(part.global, part.bytes, 1, READS, here);
            std::memcpy(data + row * row_bytes() + part.first, part.global, part.bytes);
        }
    }
    void deliver(const char* data) const {
        for (uint32_t row = 0; row < rows(); ++row) {
            const Part part = inside(row);
            if (part.bytes == 0) continue;
            check_global(part.global, part.bytes, 1, WRITES, here);
            std::memcpy(part.global, data + row * row_bytes() + part.first, part.bytes);
        }
    }
};

// Bytes that lie in global memory as in shared memory.
struct Line {
    char* global;
    uint32_t shared, length;
    bool adds;  // float32 to what is there, where else it would be replaced
    Site here;

    Line(const char* global, uint32_t shared, uint32_t length, Access access, bool adds, Site here)
        : global(const_cast<char*>(global)), shared(shared), length(length), adds(adds), here(here) {
        if (length == 0 || length % 16 != 0) fail(here, "copies %u bytes, not a multiple of 16 above 0", length);
        check_global(global, length, 16, access, here);
        window_of(shared, length, 16, access == READS ? WRITES : READS, block(), here);
    }
    uint32_t bytes() const { return length; }
    uint32_t chunk(uint32_t n) const { return shared + n * 16; }
    void fetch(char* data) const { std::memcpy(data, global, length); }
    void deliver(const char* data) const {
        if (!adds) {
            std::memcpy(global, data, length);
        } else {
            for (uint32_t n = 0; n < length; n += 4) {
                float sum, more;
                std::memcpy(&sum, global + n, 4);
                std::memcpy(&more, data + n, 4);
                sum += more;
                std::memcpy(global + n, &sum, 4);
            }
        }
        progress();
    }
};

struct BlockCopies {
    int in_flight = 0;
    Site here{};  // of the last one
};

// The bytes land, and count on the barrier, at a time of their own.
template <typename Piece>
void load_bulk(const Piece& piece, uint32_t barrier_address) {
    MBarrier& barrier = barrier_at(barrier_address, true, piece.here);
    Block& own = block();
    Actor copy = own.units[COPY + barrier.offset / 8 % COPIES];
    copy.clock = thread().clock;
    const Window window = window_of(piece.shared, piece.bytes(), 16, WRITES, own, piece.here);
    const Record mine{IN_FLIGHT, static_cast<uint16_t>(copy.number), number_of(piece.here)};
    for (uint32_t n = window.offset / 4; n < (window.offset + piece.bytes()) / 4; ++n) {
        check_write(&own.cells[n], own.cells.data(), thread(), piece.here);
        own.cells[n] = Cell{mine, {}};
    }
    uint32_t* const words = reinterpret_cast<uint32_t*>(own.shared + window.offset);
    std::fill(words, words + piece.bytes() / 4, POISON);
    BlockCopies& copies = state_of<BlockCopies>(own);
    ++copies.in_flight;
    copies.here = piece.here;
    later([=, &own, &barrier, &copies] {
        std::vector<char> data(piece.bytes());
        end_async_write(piece.shared, piece.bytes(), copy, own, piece.here);
        piece.fetch(data.data());
        for (uint32_t n = 0; n < piece.bytes() / 16; ++n) {
            std::memcpy(own.shared + (piece.chunk(n) - SHARED_BASE), &data[16 * n], 16);
        }
        --copies.in_flight;
        barrier.bytes -= piece.bytes();
        release(own, copy, barrier.clocks[barrier.phase & 1]);
        barrier.settle(piece.here);
    });
}

// What is on its way from shared to global memory.
struct Store {
    Site here;
    Reader reader;
    std::vector<uint32_t> chunks;               // where the 16 bytes of each lie in shared memory
    std::function<void(const char*)> deliver;
    std::vector<char> data{};
    bool read_done = false, write_done = false;

    void read() {
        if (read_done) return;
        read_done = true;
        data.resize(16 * chunks.size());
        for (size_t n = 0; n < chunks.size(); ++n) {
            for (uint32_t word = 0; word < 4; ++word) reader.chunk(chunks[n], word);
            std::memcpy(&data[16 * n], reader.chunk(chunks[n], 0), 16);
        }
    }
    void write() {
        if (write_done) return;
        write_done = true;
        deliver(data.data());
    }
};

// A thread's stores, in groups.
struct ThreadStores {
    std::vector<std::shared_ptr<Store>> open;
    std::deque<std::vector<std::shared_ptr<Store>>> groups;
};

template <typename Piece>
void store_bulk(const Piece& piece) {
    std::vector<uint32_t> chunks;
    for (uint32_t n = 0; n < piece.bytes() / 16; ++n) chunks.push_back(piece.chunk(n));
    const Reader reader(thread(), thread(), piece.here);
    auto deliver = [piece](const char* data) { piece.deliver(data); };
    state_of<ThreadStores>(thread()).open.push_back(std::make_shared<Store>(Store{piece.here, reader, chunks, deliver}));
}
inline void commit_stores() {
    ThreadStores& stores = state_of<ThreadStores>(thread());
    stores.groups.push_back(std::move(stores.open));
    stores.open.clear();
}
// All but the newest `pending` groups are read and, where `written`, written; else they are some time later. That takes
// as many turns as the seed says.
inline void wait_for_stores(size_t pending, bool written, const char* what, Site here) {
    for (uint32_t turns = random(8); turns > 0; --turns) {
        pause(what, here);
        progress();
    }
    ThreadStores& stores = state_of<ThreadStores>(thread());
    for (size_t n = 0; n + pending < stores.groups.size(); ++n) {
        for (auto& store : stores.groups[n]) {
            if (!store->read_done) {
                store->read();
                later([store] { store->write(); });
            }
            if (written) store->write();
        }
    }
    auto done = [](const auto& group) {
        return std::all_of(group.begin(), group.end(), [](const auto& store) { return store->write_done; });
    };
    while (stores.groups.size() > pending && done(stores.groups.front())) stores.groups.pop_front();
    progress();
}

// Products of a warpgroup --------------------------------------------------------------------------------------------

// A matrix in shared memory, as a descriptor tells of it.
struct Matrix {
    uint32_t start, leading, stride, span;  // span 16: not swizzled

    Matrix(uint64_t descriptor, Site here) {
        constexpr uint32_t SPANS[] = {16, 128, 64, 32};
        start = (descriptor & 0x3fff) << 4;
        leading = (descriptor >> 16 & 0x3fff) << 4;
        stride = (descriptor >> 32 & 0x3fff) << 4;
        span = SPANS[descriptor >> 62];
        if (descriptor & ~0xc0003fff3fff3fffull) {
            fail(here, "multiplies a matrix of descriptor %#llx, of which bits are set that mean nothing, or a base offset",
                 static_cast<unsigned long long>(descriptor));
        }
    }
    uint32_t swizzle(uint32_t address) const { return address ^ (address >> 7) % (span / 16) * 16; }
    // Of row `row` (along M or N), elements 8 half to 8 half + 7 of the 16.
    uint32_t along_k(uint32_t row, uint32_t half) const {
        const uint32_t across = span == 16 ? half * leading : half * 16;
        return swizzle(start + row / 8 * stride + row % 8 * span + across);
    }
    // Of element k of the 16, rows 8 block to 8 block + 7.
    uint32_t along_rows(uint32_t block, uint32_t k) const {
        if (span == 16) return start + block * stride + k / 8 * leading + k % 8 * 16;
        const uint32_t blocks = span / 16;
        return swizzle(start + block / blocks * leading + block % blocks * 16 + k / 8 * stride + k % 8 * span);
    }
};

// What a warp's lanes hold of an accumulator, while products on it are in flight.
struct Accumulator {
    int columns;
    std::vector<float> values;  // 16 x columns
    float& at(int lane, int i) { return values[(lane / 4 + i / 2 % 2 * 8) * columns + i / 4 * 8 + lane % 4 * 2 + i % 2]; }
};

// What all threads of a warpgroup must agree on.
struct Operation {
    int columns;
    bool a_in_registers, transpose_a, transpose_b, accumulate;
    uint64_t a, b;  // descriptors; a is 0 where it comes from registers
    Site here;
    bool operator==(const Operation& other) const {
        return columns == other.columns && a_in_registers == other.a_in_registers && transpose_a == other.transpose_a &&
               transpose_b == other.transpose_b && accumulate == other.accumulate && a == other.a && b == other.b &&
               here == other.here;
    }
};

struct Product {
    Operation operation;
    std::shared_ptr<Accumulator> d;
    uint32_t a[WARP_LANES][4];
    int held_d[WARP_LANES], held_a[WARP_LANES];  // indices of the lanes' registers
    int lanes = 0;                               // that have issued it
    Reader reader;                               // the last of them
};

// Registers that a lane has handed to products.
struct Held {
    uint32_t* words;
    int count;
    int in_flight = 0;
    bool fenced = false;              // since they came back
    uint64_t hash = 0;                // at the last fence
    uint32_t saved[4] = {};           // of an A operand
    std::shared_ptr<Accumulator> d;   // of an accumulator
    Site here{};

    uint64_t hash_now() const {
        uint64_t h = 14695981039346656037u;
        for (int n = 0; n < count; ++n) h = (h ^ words[n]) * 1099511628211u;
        return h;
    }
    void poison() { std::fill(words, words + count, POISON); }
    bool poisoned() const {
        return std::all_of(words, words + count, [](uint32_t word) { return word == POISON; });
    }
};

struct LaneProducts {
    std::vector<Held> held;
    uint64_t issued = 0, groups = 0;
    bool fenced = false;  // since the last wait
    int find(void* words, int count) {
        for (size_t n = 0; n < held.size(); ++n) {
            if (held[n].words == words && held[n].count == count) return static_cast<int>(n);
        }
        held.push_back(Held{static_cast<uint32_t*>(words), count});
        return static_cast<int>(held.size()) - 1;
    }
};

struct WarpProducts {
    LaneProducts lanes[WARP_LANES];
    std::deque<Product> products;  // issued by some lane and not retired
    uint64_t retired = 0;
    std::vector<uint64_t> ends;    // of the groups, in products
};

struct BlockProducts {
    std::vector<WarpProducts> warps = std::vector<WarpProducts>(MOST_THREADS / WARP_LANES);
    // Of each warpgroup, what its products were; those all four warps have issued are forgotten.
    struct Log {
        std::deque<Operation> operations;
        uint64_t forgotten = 0;
        uint64_t issued[GROUP_WARPS] = {};
    };
    std::vector<Log> groups = std::vector<Log>(MOST_THREADS / WARP_LANES / GROUP_WARPS);
};

inline WarpProducts& own_products() { return state_of<BlockProducts>(block()).warps[thread().warp->index]; }

inline void agree(const Operation& mine, const Operation& other, const char* who) {
    if (mine == other) return;
    if (!(mine.here == other.here)) {
        fail(mine.here, "%s of the warpgroup are at the product of %s:%d: all must execute the same", who, other.here.file,
             other.here.line);
    }
    fail(mine.here, "a product with descriptors %#llx and %#llx, accumulate %d; %s of the warpgroup have %#llx, %#llx, %d",
         static_cast<unsigned long long>(mine.a), static_cast<unsigned long long>(mine.b), mine.accumulate, who,
         static_cast<unsigned long long>(other.a), static_cast<unsigned long long>(other.b), other.accumulate);
}

inline void check_fenced(const LaneProducts& lane, const Held& held, const char* what, Site here) {
    const bool known = held.here.file != nullptr;
    if (known ? !held.fenced : !lane.fenced) {
        fail(here, "%s goes to a product without a wgmma_fence since %s", what,
             known ? "it came back from the last" : "the last wait, or at all");
    }
    if (known && held.hash != held.hash_now()) fail(here, "%s was written between the wgmma_fence and the product", what);
}

// One lane's issue of a product. `d`: its columns / 2 accumulators; `a`: four registers, or null.
inline void issue_product(const Operation& operation, float* d, uint32_t* a) {
    Thread& t = thread();
    const Site here = operation.here;
    if (t.warp->group == nullptr) fail(here, "a product in a warp that belongs to no whole warpgroup");
    BlockProducts& all = state_of<BlockProducts>(block());
    WarpProducts& warp = all.warps[t.warp->index];
    LaneProducts& lane = warp.lanes[t.lane];
    const uint64_t number = lane.issued++;
    if (number == warp.retired + warp.products.size()) {
        warp.products.emplace_back();
        warp.products.back().operation = operation;
        BlockProducts::Log& log = all.groups[t.warp->index / GROUP_WARPS];
        log.issued[t.warp->index % GROUP_WARPS] = number + 1;
        if (number == log.forgotten + log.operations.size()) log.operations.push_back(operation);
        agree(operation, log.operations[number - log.forgotten], "other warps");
        while (*std::min_element(log.issued, log.issued + GROUP_WARPS) > log.forgotten) {
            log.operations.pop_front();
            ++log.forgotten;
        }
    }
    Product& product = warp.products[number - warp.retired];
    agree(operation, product.operation, "other lanes");

    const int held_d = product.held_d[t.lane] = lane.find(d, operation.columns / 2);
    {
        Held& held = lane.held[held_d];
        if (held.in_flight++ == 0) {
            check_fenced(lane, held, "an accumulator", here);
            if (!product.d) product.d = std::make_shared<Accumulator>(Accumulator{operation.columns, std::vector<float>(16 * operation.columns)});
            held.d = product.d;
            held.here = here;
            for (int i = 0; i < held.count; ++i) product.d->at(t.lane, i) = d[i];
            held.poison();
        } else {
            if (!product.d) product.d = held.d;
            if (held.d != product.d) fail(here, "lanes of a warp give a product accumulators that belong to others");
        }
    }
    if (a != nullptr) {
        Held& held = lane.held[product.held_a[t.lane] = lane.find(a, 4)];
        if (held.in_flight++ == 0) {
            check_fenced(lane, held, "an A operand", here);
            held.here = here;
            std::copy(a, a + 4, held.saved);
            held.poison();
        }
        std::copy(held.saved, held.saved + 4, product.a[t.lane]);
    }
    if (++product.lanes == WARP_LANES) product.reader = Reader(t, block().units[TENSOR + t.warp->index], here);
}

inline void fence_products() {
    LaneProducts& lane = own_products().lanes[thread().lane];
    lane.fenced = true;
    for (Held& held : lane.held) {
        if (held.in_flight) continue;
        held.fenced = true;
        held.hash = held.hash_now();
    }
}

inline void commit_products(Site here) {
    WarpProducts& warp = own_products();
    LaneProducts& lane = warp.lanes[thread().lane];
    if (lane.groups == warp.ends.size()) warp.ends.push_back(lane.issued);
    if (warp.ends[lane.groups++] != lane.issued) fail(here, "lanes of a warp commit groups of different products");
}

// Eight elements of 16 bits, `pitch` apart in `to`.
inline void convert(const char* chunk, bool bfloat, float* to, int pitch) {
    uint16_t bits[8];
    std::memcpy(bits, chunk, 16);
    if (bfloat) {
        for (int n = 0; n < 8; ++n) to[n * pitch] = float_of_bfloat(bits[n]);
    } else {
        for (int n = 0; n < 8; ++n) to[n * pitch] = float_of_half(bits[n]);
    }
}

// The 16 rows of a warp.
inline void multiply(Product& product, int warp, bool bfloat) {
    const Operation& operation = product.operation;
    const int columns = operation.columns;
    const uint32_t word = random(4);
    float a[16][16];
    alignas(64) static float b[16][256];
    auto get = [&](uint32_t address, float* to, int pitch) {
        convert(product.reader.chunk(address, word), bfloat, to, pitch);
    };
    auto element = [bfloat](uint32_t bits) {
        return bfloat ? float_of_bfloat(static_cast<uint16_t>(bits)) : float_of_half(static_cast<uint16_t>(bits));
    };
    if (operation.a_in_registers) {
        for (int lane = 0; lane < WARP_LANES; ++lane) {
            for (int r = 0; r < 4; ++r) {
                float* to = &a[lane / 4 + r % 2 * 8][r / 2 * 8 + lane % 4 * 2];
                to[0] = element(product.a[lane][r]);
                to[1] = element(product.a[lane][r] >> 16);
            }
        }
    } else {
        const Matrix matrix(operation.a, operation.here);
        const uint32_t first = 16 * warp;
        for (uint32_t row = 0; row < 16 && !operation.transpose_a; ++row) {
            for (uint32_t half = 0; half < 2; ++half) {
                get(matrix.along_k(first + row, half), &a[row][8 * half], 1);
            }
        }
        for (uint32_t k = 0; k < 16 && operation.transpose_a; ++k) {
            for (uint32_t half = 0; half < 2; ++half) {
                get(matrix.along_rows(first / 8 + half, k), &a[8 * half][k], 16);
            }
        }
    }
    const Matrix matrix(operation.b, operation.here);
    for (uint32_t column = 0; column < static_cast<uint32_t>(columns) && !operation.transpose_b; ++column) {
        for (uint32_t half = 0; half < 2; ++half) {
            get(matrix.along_k(column, half), &b[8 * half][column], 256);
        }
    }
    for (uint32_t k = 0; k < 16 && operation.transpose_b; ++k) {
        for (uint32_t block = 0; block < static_cast<uint32_t>(columns / 8); ++block) {
            get(matrix.along_rows(block, k), &b[k][8 * block], 1);
        }
    }
    typedef float Vector __attribute__((vector_size(32)));
    float* const values = product.d->values.data();
    for (int row = 0; row < 16; ++row) {
        for (int column = 0; column < columns; column += 8) {
            Vector sum = {}, factor;
            if (operation.accumulate) std::memcpy(&sum, values + row * columns + column, sizeof sum);
            for (int k = 0; k < 16; ++k) {
                std::memcpy(&factor, &b[k][column], sizeof factor);
                sum += a[row][k] * factor;
            }
            std::memcpy(values + row * columns + column, &sum, sizeof sum);
        }
    }
}

// Gives registers back to a lane once nothing in flight uses them.
inline void give_back(Held& held, int lane, const char* what, Site here) {
    if (--held.in_flight > 0) return;
    if (!held.poisoned()) {
        fail(here, "%s of lane %d, given to the product at %s:%d, was written before this wait", what, lane, held.here.file,
             held.here.line);
    }
    for (int i = 0; i < held.count; ++i) {
        if (held.d) {
            std::memcpy(&held.words[i], &held.d->at(lane, i), 4);
        } else {
            held.words[i] = held.saved[i];
        }
    }
    held.fenced = false;
    held.d = nullptr;
}

inline void wait_for_products(uint64_t pending, bool bfloat, Site here) {
    WarpProducts& warp = own_products();
    const int index = thread().warp->index % GROUP_WARPS;
    LaneProducts& mine = warp.lanes[thread().lane];
    mine.fenced = false;
    collective(thread().warp->lanes, "wgmma_wait_group", mine, [&](LaneProducts** lanes) {
        for (int lane = 1; lane < WARP_LANES; ++lane) {
            if (lanes[lane]->groups != lanes[0]->groups) fail(here, "lanes of a warp have committed different numbers of groups");
        }
        if (mine.groups <= pending) return;
        const uint64_t end = warp.ends[mine.groups - pending - 1];
        const Denormals kept(false);
        for (; warp.retired < end; ++warp.retired) {
            Product& product = warp.products.front();
            multiply(product, index, bfloat);
            for (int lane = 0; lane < WARP_LANES; ++lane) {
                give_back(lanes[lane]->held[product.held_d[lane]], lane, "an accumulator", here);
                if (product.operation.a_in_registers) {
                    give_back(lanes[lane]->held[product.held_a[lane]], lane, "an A operand", here);
                }
            }
            warp.products.pop_front();
        }
        const Actor& unit = block().units[TENSOR + thread().warp->index];
        const uint32_t now = time_of(block(), unit)++;
        for (Thread* lane : thread().warp->lanes.threads) lane->clock.at[unit.component()] = now;
    }, here);
}

// Registers ------------------------------------------------------------------------------------------------------

struct BlockRegisters {
    int free = 0;
    std::vector<int> threads;  // registers of each
    char text[64];
};

inline void set_registers(int registers, bool more, Site here) {
    if (registers < 24 || registers > 256 || registers % 8 != 0) {
        fail(here, "setmaxnreg %d; wanted a multiple of 8 from 24 to 256", registers);
    }
    BlockRegisters& pool = state_of<BlockRegisters>(block());
    if (pool.threads.empty()) {  // what a block of one per SM is started with
        const int threads = static_cast<int>(world.launch->threads);
        pool.threads.assign(threads, std::min(65536 / threads / 8 * 8, 256));
    }
    int& own = pool.threads[thread().index];
    if (more ? registers < own : registers > own) fail(here, "setmaxnreg from %d to %d registers", own, registers);
    auto ready = [&] {
        std::snprintf(pool.text, sizeof pool.text, "setmaxnreg, %d registers more, %d are free", registers - own, pool.free);
        return registers - own <= pool.free;
    };
    int none = 0;
    collective(thread().warp->lanes, "setmaxnreg", none, [](int**) {}, here);
    if (!ready()) wait_until(ready, pool.text, here);
    pool.free -= registers - own;
    own = registers;
    progress();
}

// The end ----------------------------------------------------------------------------------------------------------

// Called by each thread when its kernel has returned.
inline void leave_hopper() {
    Thread& t = thread();
    for (auto& store : state_of<ThreadStores>(t).open) fail(store->here, "a store that no group was committed for");
    for (auto& group : state_of<ThreadStores>(t).groups) {
        for (auto& store : group) {
            if (!store->read_done) fail(store->here, "left the kernel while this store reads shared memory");
        }
    }
    WarpProducts& warp = own_products();
    LaneProducts& lane = warp.lanes[t.lane];
    if (lane.issued > warp.retired) {
        fail(warp.products[0].operation.here, "left the kernel without a wait for this product");
    }
    if (t.block->live > 1) return;
    const BlockCopies& copies = state_of<BlockCopies>(*t.block);
    if (copies.in_flight) {
        fail(copies.here, "the block ends with %d loads in flight, this one among them", copies.in_flight);
    }
    for (BlockProducts::Log& log : state_of<BlockProducts>(*t.block).groups) {
        if (!log.operations.empty()) {
            fail(log.operations[0].here, "not all warps of the warpgroup have executed this product: %llu, %llu, %llu and %llu products",
                 static_cast<unsigned long long>(log.issued[0]), static_cast<unsigned long long>(log.issued[1]),
                 static_cast<unsigned long long>(log.issued[2]), static_cast<unsigned long long>(log.issued[3]));
        }
    }
}
inline const bool leaves_hopper = (world.at_exit.push_back(leave_hopper), true);

}  // namespace emulator
