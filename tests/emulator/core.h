// An emulator of CUDA's execution model, as strict as the programming model allows and stricter than any hardware.
//
// Every thread of a block is a fiber, and a launch runs in one thread of the operating system, so whatever happens is
// decided by the seed alone. This header knows threads, warps, barriers, memory and time; instructions are built on
// it: `ptx.cuh` and `ptx_sm90.cuh`, which replace kernels/ptx.cuh and kernels/ptx_sm90.cuh. What they use:
//
//   where           thread(), block(), block_of_cluster(rank); Thread: index, lane, warp, block
//   places          Site here = HERE as the last parameter of an instruction is the kernel's file and line
//   errors          fail(here, format, ...): ends the launch; Python raises EmulatorError with place, block, thread
//   waiting         wait_until(ready, what, here): any wait, a spin on memory too; other threads run meanwhile
//                   pause(what, here): one turn of a spin that the kernel writes itself
//                   an `acquire` after the wait orders this thread after whom it waited for
//   collectives     collective(thread().warp->lanes, what, mine, all, here): the last of 32 lanes to arrive calls
//                   all(operands), operands[lane] pointing at each lane's `mine`; every lane then goes on. Results are
//                   written through the pointers. thread().warp->group->threads: the same for 128 threads
//   barriers        Barrier, barrier_sync(barrier, expected, ...), barrier_arrive(..., thread); block().barriers[16];
//                   arrive_at_cluster(here) and wait_for_cluster(here) are the two halves of the cluster's
//   shared memory   addresses are uint32, a block's begin at SHARED_BASE (a multiple of 1024);
//                   read_shared / write_shared(address, bytes, align, actor, here) check and return a pointer;
//                   begin_async_write / end_async_write mark bytes that something in flight will write: who touches
//                   them before the end is stopped; map_shared(address, rank) is another block's of the cluster, and
//                   read_cluster(address, rank, bytes, here) reads it where that block has begun and not ended
//   global memory   check_global(pointer, bytes, align, WRITES or READS, here)
//   actors          who touches shared memory, for the race check: a Thread, or a unit that works beside the threads:
//                   block().units[TENSOR + warp] (wgmma), block().units[COPY + n] (TMA and bulk copies; n < COPIES, one
//                   and the same for all copies that complete on a barrier)
//   time            release(actor, clock): all that `actor` did happened before whoever acquires `clock`;
//                   acquire(actor, clock). An mbarrier holds a Clock: arrive releases into it, wait acquires it
//   in order        Groups<Action>: add, commit, wait(pending): actions of a thread that run as late as its waits
//                   allow (cp.async, bulk stores, wgmma: poison registers in add, fill them in the action)
//   out of order    later(action): runs by itself at a time the seed decides, at the latest when nothing else can
//                   move (TMA loads, which complete on an mbarrier)
//   own state       state_of<T>(thread()), state_of<T>(block()): a T that begins with the block and ends with it
//   chance          random(n): a number below n, drawn from the seed
//   made known      progress(): something changed that another thread may wait for. Stores, atomics and collectives
//                   say so by themselves; without it a launch in which all wait is taken for a deadlock
//
// Race check. Every 4 bytes of shared memory remember who wrote and who read them last, and when. Time is kept by
// warp: each thread knows up to which time of each warp it has been ordered after what happened there, by barriers
// and whatever else calls release and acquire. An access that is not ordered after an earlier one of another thread,
// one of the two a write, is a race, in whatever order the two happened to run. Lanes of a warp are ordered by
// sync_warp alone: shuffles, votes and products order no memory.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstring>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "fiber.h"

// After the system's headers, which use some of these words themselves.
#define __global__
#define __device__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__

namespace emulator {

struct Site {
    const char* file;
    int line;
    // Its own default arguments, since those of a template would be the template's place.
    static constexpr Site now(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
    bool operator==(const Site& other) const {
        return line == other.line && (file == other.file || std::strcmp(file, other.file) == 0);
    }
};
// The default argument that is the caller's place.
#define HERE emulator::Site::now()

constexpr int WARP_LANES = 32, GROUP_WARPS = 4, MOST_THREADS = 1024;
constexpr int MOST_CLUSTER = 8;         // blocks that any device with clusters takes
constexpr uint32_t SHARED_BASE = 1024;  // as on sm_90, where the first 1024 bytes are the system's
constexpr int RANK_SHIFT = 24;          // of the addresses of a cluster's shared memory

enum Access { READS, WRITES };
enum Check : uint32_t { RACES = 1, UNWRITTEN = 2 };  // of shared memory; both are switched by the driver
constexpr int COPIES = 8;
enum Unit { COPY, TENSOR = COPIES, UNITS = TENSOR + MOST_THREADS / WARP_LANES };

// What the driver passes.
struct Range {
    uint64_t begin, end, writable;
};
struct Launch {
    uint64_t grid, threads, shared_bytes, cluster;
    uint64_t seed, fewest_alive, most_alive;  // clusters at once
    uint64_t checks;
    uint64_t most_events;  // after that many a launch is taken for endless
    const Range* ranges;   // in order
    uint64_t range_count;
    const void* args;
    char* message;
    uint64_t message_bytes;
    uint64_t events;  // out
};

// Time -----------------------------------------------------------------------------------------------------------

// Of a cluster: two blocks of the most threads, or more of fewer.
constexpr int COMPONENTS = 2 * (MOST_THREADS / WARP_LANES + UNITS);

// Up to which time of each component (the warps of a cluster, then its units) something has been ordered after it.
struct Clock {
    uint32_t at[COMPONENTS] = {};
    void join(const Clock& other, int components) {
        for (int n = 0; n < components; ++n) at[n] = std::max(at[n], other.at[n]);
    }
};

struct Actor {
    int number = 0;  // within the cluster, threads first; the component of its time is number / 32
    Clock clock;
    int component() const { return number / WARP_LANES; }
};

// Actions of one thread in groups: what was added since the last commit is the newest group.
template <typename Action>
class Groups {
  public:
    void add(Action action) { open.push_back(std::move(action)); }
    void commit() {
        actions.insert(actions.end(), std::make_move_iterator(open.begin()), std::make_move_iterator(open.end()));
        open.clear();
        ends.push_back(actions.size());
    }
    // Runs the groups but the `pending` newest ones.
    void wait(size_t pending) {
        if (ends.size() - first <= pending) return;
        const size_t end = ends[ends.size() - pending - 1];
        first = ends.size() - pending;
        while (done < end) actions[done++]();
        if (first == ends.size()) actions.clear(), ends.clear(), first = done = 0;
    }
    void wait_all() {
        commit();
        wait(0);
    }
    bool empty() const { return open.empty() && done == actions.size(); }
    const Action& oldest() const { return done < actions.size() ? actions[done] : open.front(); }

  private:
    std::vector<Action> open, actions;
    std::vector<size_t> ends;  // of the groups, in `actions`
    size_t first = 0, done = 0;
};

// Threads --------------------------------------------------------------------------------------------------------

struct Thread;
struct Warp;
struct Block;

// State of an instruction, by type.
struct States {
    std::unordered_map<const void*, std::shared_ptr<void>> by_type;
};

// 16 bytes on the way to shared memory.
struct AsyncCopy {
    Thread* thread;
    const char* global;
    uint32_t shared, bytes;  // bytes: that are read, of `size` that are written
    Site here;
    uint32_t size = 16;
    void operator()() const;
};

struct Thread : Actor, States {
    void* context = nullptr;
    char* stack = nullptr;
    Block* block = nullptr;
    Warp* warp = nullptr;
    int index = 0, lane = 0;  // in the block, in the warp
    int position = 0;         // in the warp's order
    bool left = false;        // the kernel has returned
    uint32_t arrivals = 0, waits = 0;  // at the cluster's barrier
    const char* waits_for = nullptr;
    Site waits_at{};
    Groups<AsyncCopy> copies;
};

// Threads that execute an instruction together.
struct Gang {
    std::vector<Thread*> threads;
    std::vector<void*> operands;
    size_t arrived = 0;
    const char* what = nullptr;
    Site here{};
};

struct Group {
    Gang threads;
};

struct Warp {
    Block* block;
    int index;
    Gang lanes;
    Group* group = nullptr;            // null where the block has no whole warpgroup for it
    Thread* order[WARP_LANES] = {};    // in which its lanes run
    uint32_t ready = 0, polling = 0;   // by position in that order
    int slice = 0;                     // collectives until another warp may run
};

// Where `expected` threads meet, those that do not wait included.
struct Barrier {
    int arrived = 0;
    Clock clock;
    std::vector<Thread*> waiting;
};

// Of a cluster: who has arrived may do other things before it waits. Nobody arrives again before it has waited, so that
// of the phases one is being waited for and one being arrived at, no more.
struct ClusterBarrier {
    int arrived = 0;     // in this phase, of the threads that have not left
    uint32_t phase = 0;  // how often it has opened
    Clock clocks[2];     // of the phases of each parity
    std::vector<Thread*> waiting;
};

struct Record {  // of an access to shared memory
    uint32_t time = 0;  // 0: none
    uint16_t actor = 0, site = 0;
};
struct Cell {  // 4 bytes of shared memory
    Record write, reads[2];
};
constexpr uint32_t IN_FLIGHT = 0x80000000;  // in the time of a write: it has not happened yet

struct Block : States {
    int64_t index = 0;
    int rank = 0;  // in its cluster
    int live = 0;  // threads that have not left
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::vector<Group> groups;
    Barrier all;           // __syncthreads
    Barrier barriers[16];  // bar.sync n
    Actor units[UNITS];
    char* shared = nullptr;
    std::vector<Cell> cells;
    struct Cluster* cluster = nullptr;
    std::vector<Record> readers;  // by component: when it last read this memory from another block; empty: none has
    Clock left;                   // of the threads that have left since
};

struct Cluster {
    std::vector<std::unique_ptr<Block>> blocks;
    ClusterBarrier barrier;
    uint32_t time[COMPONENTS];  // now, of each component
    int live() const {
        int sum = 0;
        for (auto& block : blocks) sum += block->live;
        return sum;
    }
};

struct World {
    Launch* launch = nullptr;
    std::function<void()> body;
    void *caller = nullptr, *scheduler = nullptr;
    char* scheduler_stack = nullptr;
    Thread* current = nullptr;  // null while the scheduler runs
    Stacks stacks;
    uint64_t random = 0, events = 0;
    bool eager = false;  // what may happen out of order happens at random and not as late as it can
    int longest_slice = 1;
    int64_t next_block = 0;
    int components = 0;
    std::vector<std::unique_ptr<Cluster>> alive;
    std::vector<std::function<void()>> spontaneous;
    std::vector<void (*)()> at_exit;  // what each thread runs when its kernel has returned: checks of instructions
    std::vector<Site> sites{{"a place not kept", 0}};
    uint16_t site_of[4096] = {};  // numbers of sites, by hash
    const Range* last_range = nullptr;
};
inline World world;

inline Thread& thread() { return *world.current; }
inline Block& block() { return *world.current->block; }
inline Block& block_of_cluster(int rank) { return *block().cluster->blocks[rank]; }

inline void progress() { ++world.events; }

inline uint32_t random(uint32_t n) {
    uint64_t z = world.random += 0x9e3779b97f4a7c15u;  // splitmix64
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return static_cast<uint32_t>((z >> 32) * n >> 32);
}

template <typename T, typename Owner>
T& state_of(Owner& owner) {
    static const char key = 0;
    std::shared_ptr<void>& state = owner.by_type[&key];
    if (!state) state = std::make_shared<T>();
    return *static_cast<T*>(state.get());
}

// Errors ---------------------------------------------------------------------------------------------------------

[[noreturn]] inline void end_launch() {
    void* forgotten;
    emulator_switch(&forgotten, world.caller);
    __builtin_unreachable();
}

// Adds to the launch's message.
inline void vreport(const char* format, va_list arguments) {
    Launch& launch = *world.launch;
    const size_t length = std::strlen(launch.message);
    std::vsnprintf(launch.message + length, launch.message_bytes - length, format, arguments);
}

__attribute__((format(printf, 1, 2))) inline void report(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vreport(format, arguments);
    va_end(arguments);
}

[[noreturn]] __attribute__((format(printf, 2, 3))) inline void fail(Site here, const char* format, ...) {
    report("%s:%d: ", here.file, here.line);
    if (const Thread* t = world.current) {
        report("block %lld, thread %d (warp %d, lane %d): ", static_cast<long long>(t->block->index), t->index,
               t->warp->index, t->lane);
    }
    va_list arguments;
    va_start(arguments, format);
    vreport(format, arguments);
    va_end(arguments);
    end_launch();
}

[[noreturn]] inline void deadlock() {
    report("deadlock: no thread can go on");
    for (auto& cluster : world.alive) {
        for (auto& block : cluster->blocks) {
            for (Warp& warp : block->warps) {
                int from = 0;
                auto alike = [](const Thread& a, const Thread& b) {
                    return a.left == b.left && (a.left || (a.waits_for == b.waits_for && a.waits_at == b.waits_at));
                };
                for (int lane = 1; lane <= WARP_LANES; ++lane) {
                    const Thread& first = *warp.lanes.threads[from];
                    if (lane < WARP_LANES && alike(first, *warp.lanes.threads[lane])) continue;
                    report("\n  block %lld, warp %d, lanes %d-%d: ", static_cast<long long>(block->index), warp.index,
                           from, lane - 1);
                    if (first.left) {
                        report("left the kernel");
                    } else {
                        report("%s at %s:%d", first.waits_for, first.waits_at.file, first.waits_at.line);
                    }
                    from = lane;
                }
            }
        }
    }
    end_launch();
}

// Switching ------------------------------------------------------------------------------------------------------

// Leaves the running thread, in whatever state it has been put, for the next of its warp that is ready.
inline void switch_away() {
    Thread* left = world.current;
    Warp& warp = *left->warp;
    if (warp.ready == 0) {
        world.current = nullptr;
        emulator_switch(&left->context, world.scheduler);
        return;
    }
    const uint32_t turned = warp.ready >> left->position | warp.ready << (-left->position & 31);
    Thread* next = warp.order[(left->position + __builtin_ctz(turned)) & 31];
    if (next == left) return;
    world.current = next;
    emulator_switch(&left->context, next->context);
}

inline void block_on(const char* what, Site here) {
    Thread& t = thread();
    t.waits_for = what;
    t.waits_at = here;
    t.warp->ready &= ~(1u << t.position);
    switch_away();
}
inline void unblock(Thread& t) { t.warp->ready |= 1u << t.position; }

inline void pause(const char* what, Site here) {
    Thread& t = thread();
    t.warp->polling |= 1u << t.position;
    block_on(what, here);
}

template <typename Ready>
void wait_until(Ready ready, const char* what, Site here) {
    while (!ready()) pause(what, here);
    progress();
}

// The order in which lanes run, drawn anew.
inline void shuffle_lanes(Warp& warp) {
    uint32_t ready = 0, polling = 0;
    for (int n = WARP_LANES - 1; n > 0; --n) {
        const int other = static_cast<int>(random(n + 1));
        std::swap(warp.order[n], warp.order[other]);
    }
    for (int n = 0; n < WARP_LANES; ++n) {
        Thread& lane = *warp.order[n];
        ready |= (warp.ready >> lane.position & 1) << n;
        polling |= (warp.polling >> lane.position & 1) << n;
        lane.position = n;
    }
    warp.ready = ready;
    warp.polling = polling;
}

template <typename Operands, typename All>
void collective(Gang& gang, const char* what, Operands& mine, All&& all, Site here) {
    Thread& t = thread();
    const size_t rank = gang.threads.size() == WARP_LANES ? t.lane : t.index % (WARP_LANES * GROUP_WARPS);
    if (gang.arrived == 0) {
        gang.what = what;
        gang.here = here;
    } else if (!(gang.here == here) || (gang.what != what && std::strcmp(gang.what, what) != 0)) {
        fail(here, "%s, while other lanes of the warp are at %s, %s:%d: all must execute it together", what, gang.what,
             gang.here.file, gang.here.line);
    }
    gang.operands[rank] = &mine;
    if (++gang.arrived < gang.threads.size()) return block_on(what, here);
    gang.arrived = 0;
    all(reinterpret_cast<Operands**>(gang.operands.data()));
    progress();
    if (gang.threads.size() == WARP_LANES) {
        Warp& warp = *t.warp;
        warp.ready = ~0u;
        if (--warp.slice <= 0) {  // another warp's turn
            warp.slice = 1 + static_cast<int>(random(world.longest_slice));
            warp.polling = ~0u;
            warp.ready = 0;
            switch_away();
        }
    } else {
        for (Thread* other : gang.threads) unblock(*other);
    }
}

// Order in time --------------------------------------------------------------------------------------------------

inline uint32_t& time_of(const Block& block, const Actor& actor) { return block.cluster->time[actor.component()]; }

inline void release(Block& block, const Actor& actor, Clock& clock) {
    clock.join(actor.clock, world.components);
    uint32_t& now = time_of(block, actor);
    clock.at[actor.component()] = std::max(clock.at[actor.component()], now);
    ++now;
}
inline void release(const Thread& t, Clock& clock) { release(*t.block, t, clock); }
inline void acquire(Actor& actor, const Clock& clock) { actor.clock.join(clock, world.components); }

// Barriers -------------------------------------------------------------------------------------------------------

inline void complete(Barrier& barrier) {
    for (Thread* waiting : barrier.waiting) {
        acquire(*waiting, barrier.clock);
        unblock(*waiting);
    }
    barrier.waiting.clear();
    barrier.arrived = 0;
    barrier.clock = Clock();
    progress();
}

inline void barrier_arrive(Barrier& barrier, int expected, const Thread& t) {
    release(t, barrier.clock);
    if (++barrier.arrived >= expected) complete(barrier);
}

inline void barrier_sync(Barrier& barrier, int expected, const char* what, Site here) {
    Thread& t = thread();
    release(t, barrier.clock);
    barrier.waiting.push_back(&t);
    const bool last = ++barrier.arrived >= expected;
    if (last) complete(barrier);
    if (!last) block_on(what, here);
}

// All threads of the block that have not left, whole warps at one place in the text.
inline void sync_block(Site here) {
    Warp& warp = *thread().warp;
    collective(warp.lanes, "sync_threads", warp, [](Warp** lanes) { shuffle_lanes(*lanes[0]); }, here);
    barrier_sync(block().all, block().live, "sync_threads", here);
}

inline void open(ClusterBarrier& barrier) {
    for (Thread* waiting : barrier.waiting) {
        acquire(*waiting, barrier.clocks[barrier.phase & 1]);
        unblock(*waiting);
    }
    barrier.waiting.clear();
    barrier.arrived = 0;
    barrier.clocks[++barrier.phase & 1] = Clock();
    progress();
}

// All threads of the cluster that have not left, whole warps at one place in the text. A thread may leave without the
// wait that its arrival allows: PTX counts those that have not left.
inline void arrive_at_cluster(Site here) {
    Thread& t = thread();
    if (t.arrivals > t.waits) fail(here, "cluster_arrive by a thread that has arrived already and not waited since");
    collective(t.warp->lanes, "cluster_arrive", t, [](Thread** lanes) {
        Cluster& cluster = *block().cluster;
        ClusterBarrier& barrier = cluster.barrier;
        for (int n = 0; n < WARP_LANES; ++n) {
            release(*lanes[n], barrier.clocks[barrier.phase & 1]);
            ++lanes[n]->arrivals;
        }
        barrier.arrived += WARP_LANES;
        if (barrier.arrived >= cluster.live()) open(barrier);
    }, here);
}

inline void wait_for_cluster(Site here) {
    Thread& t = thread();
    if (t.arrivals == t.waits) fail(here, "cluster_wait by a thread that has not arrived since it last waited");
    collective(t.warp->lanes, "cluster_wait", *t.warp, [](Warp** lanes) { shuffle_lanes(*lanes[0]); }, here);
    ClusterBarrier& barrier = block().cluster->barrier;
    if (barrier.phase == t.waits) {
        barrier.waiting.push_back(&t);
        block_on("cluster_wait", here);
    } else {
        acquire(t, barrier.clocks[t.waits & 1]);
    }
    ++t.waits;
}

inline void sync_lanes(Site here) {
    Thread& t = thread();
    collective(t.warp->lanes, "sync_warp", t, [](Thread** lanes) {
        Clock clock;
        for (int n = 0; n < WARP_LANES; ++n) release(*lanes[n], clock);
        for (int n = 0; n < WARP_LANES; ++n) acquire(*lanes[n], clock);
    }, here);
}

// Shared memory --------------------------------------------------------------------------------------------------

inline uint16_t number_of(Site here) {
    constexpr size_t SLOTS = sizeof world.site_of / sizeof world.site_of[0];
    size_t slot = (static_cast<size_t>(here.line) * 31 + reinterpret_cast<uintptr_t>(here.file) / 8) % SLOTS;
    for (;; slot = (slot + 1) % SLOTS) {
        const uint16_t number = world.site_of[slot];
        if (number == 0) break;
        if (world.sites[number].line == here.line && world.sites[number].file == here.file) return number;
    }
    if (world.sites.size() > SLOTS / 2) return 0;
    world.sites.push_back(here);
    return world.site_of[slot] = static_cast<uint16_t>(world.sites.size() - 1);
}

struct Window {  // where an address of shared memory leads
    Block* block;
    uint32_t offset;
};

inline Window window_of(uint32_t address, uint32_t bytes, uint32_t align, Access access, Block& own, Site here) {
    const uint32_t rank = address >> RANK_SHIFT;
    const uint32_t offset = (address & ((1u << RANK_SHIFT) - 1)) - SHARED_BASE;
    const char* what = access == READS ? "reads" : "writes";
    if (address % align != 0) fail(here, "%s %u bytes of shared memory at %u, not a multiple of %u", what, bytes, address, align);
    if (rank > own.cluster->blocks.size()) fail(here, "%s shared memory of a block that is not in the cluster: %#x", what, address);
    const uint64_t room = world.launch->shared_bytes;
    if (offset > room || bytes > room - offset) {
        fail(here, "%s %u bytes of shared memory at offset %d; the block has %llu bytes", what, bytes,
             static_cast<int>(offset), static_cast<unsigned long long>(room));
    }
    return {rank == 0 ? &own : own.cluster->blocks[rank - 1].get(), offset};
}

inline uint32_t map_shared(uint32_t address, int rank) {
    return (address & ((1u << RANK_SHIFT) - 1)) | static_cast<uint32_t>(rank + 1) << RANK_SHIFT;
}

[[noreturn]] __attribute__((noinline)) inline void race(const char* what, uint32_t offset, const char* earlier,
                                                        const Record& record, Site here, const char* why) {
    const int threads = static_cast<int>(world.launch->threads), cluster = static_cast<int>(world.launch->cluster);
    const int unit = (record.actor - threads * cluster) / WARP_LANES;
    const Site site = world.sites[record.site];
    char who[64];
    if (record.actor < threads * cluster) {
        const int length = std::snprintf(who, sizeof who, "thread %d", record.actor % threads);
        if (cluster > 1) std::snprintf(who + length, sizeof who - length, " of rank %d", record.actor / threads);
    } else {
        std::snprintf(who, sizeof who, unit % (TENSOR + threads / WARP_LANES) >= TENSOR ? "a wgmma" : "an asynchronous copy");
    }
    fail(here, "%s shared memory at offset %u, %s by %s at %s:%d%s", what, offset, earlier, who, site.file, site.line, why);
}

constexpr const char* NO_ORDER = "; nothing orders the two";
constexpr const char* NO_WAIT = ", which has not been waited for";

inline bool ordered(const Record& record, const Actor& actor) {
    return record.actor == actor.number || record.time <= actor.clock.at[record.actor / WARP_LANES];
}

inline char* read_shared(uint32_t address, uint32_t bytes, uint32_t align, Actor& actor, Block& own, Site here,
                         uint64_t wanted = RACES | UNWRITTEN) {
    const Window window = window_of(address, bytes, align, READS, own, here);
    const Record mine{time_of(own, actor), static_cast<uint16_t>(actor.number), number_of(here)};
    Cell* cell = &window.block->cells[window.offset / 4];
    Cell* const end = &window.block->cells[0] + (window.offset + bytes + 3) / 4;
    const uint64_t checks = world.launch->checks & wanted;
    for (; cell < end; ++cell) {
        const uint32_t offset = static_cast<uint32_t>(cell - &window.block->cells[0]) * 4;
        if (cell->write.time & IN_FLIGHT) race("reads", offset, "written", cell->write, here, NO_WAIT);
        if (cell->write.time == 0) {
            if (checks & UNWRITTEN) fail(here, "reads shared memory at offset %u, which nothing has written", offset);
        } else if ((checks & RACES) && !ordered(cell->write, actor)) {
            race("reads", offset, "written", cell->write, here, NO_ORDER);
        }
        // Of readers that no order connects two are kept, of two warps where there are two.
        Record& first = cell->reads[0];
        Record& second = cell->reads[1];
        if (first.time == 0 || ordered(first, actor) || first.actor / WARP_LANES == actor.component()) {
            first = mine;
        } else {
            second = mine;
        }
    }
    return window.block->shared + window.offset;
}

inline void check_write(Cell* cell, Cell* first, const Actor& actor, Site here) {
    const uint32_t offset = static_cast<uint32_t>(cell - first) * 4;
    if (cell->write.time & IN_FLIGHT) race("writes", offset, "written", cell->write, here, NO_WAIT);
    if (!(world.launch->checks & RACES)) return;
    if (cell->write.time != 0 && !ordered(cell->write, actor)) race("writes", offset, "written", cell->write, here, NO_ORDER);
    for (const Record& read : cell->reads) {
        if (read.time != 0 && !ordered(read, actor)) race("writes", offset, "read", read, here, NO_ORDER);
    }
}

inline char* write_shared(uint32_t address, uint32_t bytes, uint32_t align, Actor& actor, Block& own, Site here) {
    const Window window = window_of(address, bytes, align, WRITES, own, here);
    const Record mine{time_of(own, actor), static_cast<uint16_t>(actor.number), number_of(here)};
    Cell* const cells = window.block->cells.data();
    for (uint32_t n = window.offset / 4; n < (window.offset + bytes + 3) / 4; ++n) {
        check_write(&cells[n], cells, actor, here);
        cells[n] = Cell{mine, {}};
    }
    progress();
    return window.block->shared + window.offset;
}

// From here to the end of the write nobody may touch the bytes. Whole words.
inline void begin_async_write(uint32_t address, uint32_t bytes, uint32_t align, Actor& actor, Block& own, Site here) {
    const Window window = window_of(address, bytes, align, WRITES, own, here);
    const Record mine{IN_FLIGHT, static_cast<uint16_t>(actor.number), number_of(here)};
    Cell* const cells = window.block->cells.data();
    for (uint32_t n = window.offset / 4; n < (window.offset + bytes) / 4; ++n) {
        check_write(&cells[n], cells, actor, here);
        cells[n] = Cell{mine, {}};
    }
}
// Returns where the bytes are to be put.
inline char* end_async_write(uint32_t address, uint32_t bytes, const Actor& actor, Block& own, Site here) {
    const Window window = window_of(address, bytes, 1, WRITES, own, here);
    const uint32_t now = time_of(own, actor);
    for (uint32_t n = window.offset / 4; n < (window.offset + bytes) / 4; ++n) window.block->cells[n].write.time = now;
    progress();
    return window.block->shared + window.offset;
}

// By the running thread.
inline char* read_shared(uint32_t address, uint32_t bytes, uint32_t align, Site here) {
    return read_shared(address, bytes, align, thread(), block(), here);
}
inline char* write_shared(uint32_t address, uint32_t bytes, uint32_t align, Site here) {
    return write_shared(address, bytes, align, thread(), block(), here);
}

// By the running thread, from the block of that rank: an address of its own block's window. Whose shared memory is read
// must have begun, as far as the thread can know, and must not end before: see `end_block`.
inline char* read_cluster(uint32_t address, int rank, uint32_t bytes, Site here) {
    Thread& t = thread();
    Block& own = *t.block;
    const int blocks = static_cast<int>(own.cluster->blocks.size()), warps = static_cast<int>(own.warps.size());
    if (rank < 0 || rank >= blocks) fail(here, "reads shared memory of rank %d; the cluster has %d blocks", rank, blocks);
    if (address >> RANK_SHIFT) fail(here, "reads shared memory of rank %d by an address of no block's own: %#x", rank, address);
    if (rank != own.rank) {
        Block& other = block_of_cluster(rank);
        if (other.live == 0) fail(here, "reads shared memory of a block that has ended, that of rank %d", rank);
        const uint32_t* known = t.clock.at + rank * warps;
        if (std::all_of(known, known + warps, [](uint32_t time) { return time == 0; })) {
            fail(here, "reads shared memory of a block that may not have begun, that of rank %d: no barrier of the cluster "
                       "is waited for before", rank);
        }
        if (other.readers.empty()) other.readers.resize(world.components);
        other.readers[t.component()] = Record{time_of(own, t), static_cast<uint16_t>(t.number), number_of(here)};
    }
    return read_shared(map_shared(address, rank), bytes, bytes, t, own, here);
}

// The running thread, the last of its block, has left: what other blocks have read must come before one of them left.
inline void end_block(const Block& own) {
    if (!(world.launch->checks & RACES)) return;
    const int threads = static_cast<int>(world.launch->threads);
    for (size_t n = 0; n < own.readers.size(); ++n) {
        const Record& read = own.readers[n];
        if (read.time <= own.left.at[n]) continue;
        fail(world.sites[read.site],
             "its block ends, whose shared memory thread %d of rank %d reads here; nothing orders the two",
             read.actor % threads, read.actor / threads);
    }
}

// Global memory --------------------------------------------------------------------------------------------------

inline void check_global(const void* pointer, size_t bytes, size_t align, Access access, Site here) {
    const uint64_t begin = reinterpret_cast<uint64_t>(pointer), end = begin + bytes;
    const Range* range = world.last_range;
    if (range == nullptr || begin < range->begin || end > range->end) {
        const Range *first = world.launch->ranges, *last = first + world.launch->range_count;
        range = std::upper_bound(first, last, begin, [](uint64_t at, const Range& r) { return at < r.begin; });
        range = range == first ? nullptr : range - 1;
        if (range == nullptr || end > range->end) {
            const char* what = access == READS ? "reads" : "writes";
            if (range != nullptr) {
                fail(here, "%s %zu bytes of global memory, %lld bytes past the end of the nearest array below", what, bytes,
                     static_cast<long long>(end - range->end));
            }
            fail(here, "%s %zu bytes of global memory at %#llx, below all arrays", what, bytes,
                 static_cast<unsigned long long>(begin));
        }
        world.last_range = range;
    }
    if (begin % align != 0) {
        fail(here, "%s %zu bytes of global memory at an address that is no multiple of %zu",
             access == READS ? "reads" : "writes", bytes, align);
    }
    if (access == WRITES) {
        if (!range->writable) fail(here, "writes %zu bytes into an array that is an input", bytes);
        progress();
    }
}

inline void AsyncCopy::operator()() const {
    char* target = end_async_write(shared, size, *thread, *thread->block, here);
    std::memcpy(target, global, bytes);
    std::memset(target + bytes, 0, size - bytes);
}

// Running --------------------------------------------------------------------------------------------------------

inline void later(std::function<void()> action) {
    world.spontaneous.push_back(std::move(action));
    progress();
}

inline void run_spontaneous() {
    const size_t n = random(static_cast<uint32_t>(world.spontaneous.size()));
    std::function<void()> action = std::move(world.spontaneous[n]);
    world.spontaneous.erase(world.spontaneous.begin() + static_cast<std::ptrdiff_t>(n));
    action();
    progress();
}

inline void begin_thread() {
    world.body();
    Thread& t = thread();
    if (!t.copies.empty()) fail(t.copies.oldest().here, "left the kernel with this copy in flight");
    for (auto check : world.at_exit) check();
    t.left = true;
    Block& own = *t.block;
    --own.live;
    progress();
    if (own.live > 0 && own.all.arrived >= own.live) complete(own.all);
    ClusterBarrier& barrier = own.cluster->barrier;
    if (t.arrivals > barrier.phase) --barrier.arrived;
    if (barrier.arrived > 0 && barrier.arrived >= own.cluster->live()) open(barrier);
    if (!own.readers.empty()) own.left.join(t.clock, world.components);
    if (own.live == 0) end_block(own);
    t.warp->ready &= ~(1u << t.position);
    switch_away();
    __builtin_unreachable();
}

inline std::unique_ptr<Block> make_block(Cluster& cluster, int64_t index, int rank) {
    const Launch& launch = *world.launch;
    auto block = std::make_unique<Block>();
    const int threads = static_cast<int>(launch.threads), warps = threads / WARP_LANES;
    block->index = index;
    block->rank = rank;
    block->live = threads;
    block->cluster = &cluster;
    block->threads.resize(threads);
    block->warps.resize(warps);
    block->groups.resize(warps / GROUP_WARPS);
    block->cells.resize((launch.shared_bytes + 3) / 4);
    const size_t room = (launch.shared_bytes + 1024) / 1024 * 1024;
    block->shared = static_cast<char*>(std::aligned_alloc(1024, room));
    std::memset(block->shared, 0xff, room);  // NaN in every format
    for (int w = 0; w < warps; ++w) {
        Warp& warp = block->warps[w];
        warp.block = block.get();
        warp.index = w;
        warp.lanes.threads.resize(WARP_LANES);
        warp.lanes.operands.resize(WARP_LANES);
        warp.ready = ~0u;
        warp.slice = 1 + static_cast<int>(random(world.longest_slice));
        if (w / GROUP_WARPS < static_cast<int>(block->groups.size())) warp.group = &block->groups[w / GROUP_WARPS];
        for (int lane = 0; lane < WARP_LANES; ++lane) {
            Thread& t = block->threads[w * WARP_LANES + lane];
            t.number = rank * threads + w * WARP_LANES + lane;
            t.block = block.get();
            t.warp = &warp;
            t.index = w * WARP_LANES + lane;
            t.lane = t.position = lane;
            warp.order[lane] = warp.lanes.threads[lane] = &t;
            if (warp.group) warp.group->threads.threads.push_back(&t);
            t.stack = world.stacks.take();
            t.context = context(t.stack, static_cast<size_t>(t.index) * 13, begin_thread);
        }
        shuffle_lanes(warp);
    }
    for (Group& group : block->groups) group.threads.operands.resize(group.threads.threads.size());
    for (int unit = 0; unit < TENSOR + warps; ++unit) {
        const int component = static_cast<int>(launch.cluster) * warps + rank * (TENSOR + warps) + unit;
        block->units[unit].number = component * WARP_LANES;
    }
    return block;
}

inline void start_cluster() {
    auto cluster = std::make_unique<Cluster>();
    std::fill(std::begin(cluster->time), std::end(cluster->time), 1);
    for (int rank = 0; rank < static_cast<int>(world.launch->cluster); ++rank) {
        cluster->blocks.push_back(make_block(*cluster, world.next_block++, rank));
    }
    world.alive.push_back(std::move(cluster));
}

inline void clear(Cluster& cluster) {
    for (auto& block : cluster.blocks) {
        for (Thread& t : block->threads) world.stacks.give(t.stack);
        std::free(block->shared);
    }
}

// Turns of the warps, in a new order each round.
inline void schedule() {
    const Launch& launch = *world.launch;
    const uint64_t choices = launch.most_alive - launch.fewest_alive + 1;
    const uint64_t together = launch.fewest_alive + random(static_cast<uint32_t>(choices));
    std::vector<Warp*> turns;
    for (int idle = 0;;) {
        while (world.alive.size() < together && world.next_block < static_cast<int64_t>(launch.grid)) start_cluster();
        if (world.alive.empty()) break;
        turns.clear();
        for (auto& cluster : world.alive) {
            for (auto& block : cluster->blocks) {
                for (Warp& warp : block->warps) {
                    if (warp.ready | warp.polling) turns.push_back(&warp);
                }
            }
        }
        const uint64_t before = world.events;
        for (size_t n = turns.size(); n > 0; --n) {
            std::swap(turns[n - 1], turns[random(static_cast<uint32_t>(n))]);
            Warp& warp = *turns[n - 1];
            warp.ready |= warp.polling;
            warp.polling = 0;
            if (warp.ready == 0) continue;
            Thread* first = warp.order[__builtin_ctz(warp.ready)];
            world.current = first;
            emulator_switch(&world.scheduler, first->context);
        }
        for (size_t n = world.alive.size(); n-- > 0;) {
            if (world.alive[n]->live() > 0) continue;
            clear(*world.alive[n]);
            world.alive.erase(world.alive.begin() + static_cast<std::ptrdiff_t>(n));
        }
        if (world.events > launch.most_events) {
            report("endless: more than %llu events", static_cast<unsigned long long>(launch.most_events));
            end_launch();
        }
        idle = world.events == before ? idle + 1 : 0;
        if (!world.spontaneous.empty() && (idle > 2 || (world.eager && random(2) == 0))) {
            run_spontaneous();
            idle = 0;
        } else if (idle > 2) {
            deadlock();
        }
    }
    while (!world.spontaneous.empty()) run_spontaneous();
    end_launch();
}

// Float32 arithmetic flushes subnormal inputs and results to 0, as CuPy's -ftz=true has it. On x86 the switch is one for
// both formats, so float64 flushes too, which a GPU does not.
class Denormals {
  public:
    explicit Denormals(bool flush) {
#if defined(__x86_64__)
        before = _mm_getcsr();
        _mm_setcsr(flush ? before | 0x8040 : before & ~0x8040u);
#else
        asm volatile("mrs %0, fpcr" : "=r"(before));
        asm volatile("msr fpcr, %0" ::"r"(flush ? before | 1ull << 24 : before & ~(1ull << 24)));
#endif
    }
    ~Denormals() {
#if defined(__x86_64__)
        _mm_setcsr(before);
#else
        asm volatile("msr fpcr, %0" ::"r"(before));
#endif
    }

  private:
#if defined(__x86_64__)
    unsigned before;
#else
    uint64_t before;
#endif
};

// Named barriers: those that meet at one must expect as many, and come to it once, to wait there or in passing.
struct BlockNamed {
    int expected[16] = {};
    Site here[16];          // of who came last
    uint32_t came[16] = {};  // warps, since it last opened
};
inline void meet_at_named(const char* what, int number, int threads, bool waits, Site here) {
    if (number < 1 || number > 15) fail(here, "%s %d; wanted 1 to 15", what, number);
    if (threads < WARP_LANES || threads % WARP_LANES != 0 || threads > static_cast<int>(world.launch->threads)) {
        fail(here, "%s of %d threads; wanted whole warps of this block", what, threads);
    }
    Barrier& barrier = block().barriers[number];
    collective(thread().warp->lanes, what, number, [&](int** numbers) {
        for (int lane = 0; lane < WARP_LANES; ++lane) {
            if (*numbers[lane] == number) continue;
            fail(here, "%s %d, while lane %d of the warp has %d", what, number, lane, *numbers[lane]);
        }
        BlockNamed& named = state_of<BlockNamed>(block());
        const uint32_t warp = 1u << thread().warp->index;
        if (barrier.arrived == 0) {
            named.came[number] = 0;
        } else if (named.expected[number] != threads) {
            fail(here, "%s %d of %d threads, while others at %s:%d expect %d", what, number, threads,
                 named.here[number].file, named.here[number].line, named.expected[number]);
        } else if (named.came[number] & warp) {
            fail(here, "%s %d by a warp that has come to it already; it has not opened since: %d of %d are there", what,
                 number, barrier.arrived, threads);
        }
        named.came[number] |= warp;
        named.expected[number] = threads;
        named.here[number] = here;
        if (waits) return;
        for (const Thread* lane : thread().warp->lanes.threads) barrier_arrive(barrier, threads, *lane);
    }, here);
    if (waits) barrier_sync(barrier, threads, what, here);
}

// Runs a launch; true where it came to its end, else the message says why not.
template <typename Args>
bool run(Launch& launch, void (*kernel)(Args)) {
    launch.message[0] = 0;
    world.spontaneous.clear();
    world.launch = &launch;
    world.random = launch.seed;
    world.events = 0;
    world.eager = random(2) == 0;
    world.longest_slice = 1 << random(10);
    world.next_block = 0;
    world.current = nullptr;
    world.last_range = nullptr;
    world.components = static_cast<int>(launch.cluster * (launch.threads / WARP_LANES * 2 + TENSOR));
    launch.events = 0;
    const int grid = static_cast<int>(launch.grid), cluster = static_cast<int>(launch.cluster);
    if (cluster < 1 || cluster > MOST_CLUSTER) {
        report("a cluster of %d blocks; wanted 1 to %d", cluster, MOST_CLUSTER);
        return false;
    }
    if (grid % cluster != 0) {
        report("a grid of %d blocks, not a multiple of the %d of a cluster", grid, cluster);
        return false;
    }
    if (world.components > COMPONENTS) {
        report("a cluster of %d blocks of %d threads: %d warps and units, whose time is kept; at most %d", cluster,
               static_cast<int>(launch.threads), world.components, COMPONENTS);
        return false;
    }
    world.body = [kernel, &launch] { kernel(*static_cast<const Args*>(launch.args)); };
    if (world.scheduler_stack == nullptr) world.scheduler_stack = world.stacks.take();
    world.scheduler = context(world.scheduler_stack, 0, [] { schedule(); });
    {
        const Denormals flushed(true);
        emulator_switch(&world.caller, world.scheduler);
    }
    for (auto& cluster : world.alive) clear(*cluster);  // of a launch that failed
    world.alive.clear();
    world.stacks.keep(16);
    launch.events = world.events;
    return launch.message[0] == 0;
}

}  // namespace emulator

// At the end of the text: what the driver calls.
#define EMULATE(kernel)                                                                                     \
    extern "C" __attribute__((visibility("default"))) bool emulate(emulator::Launch* launch) { \
        return emulator::run(*launch, kernel);                                                              \
    }
