// What specdec/fast_persistent.cu takes from a GPU, in C++, so that its arithmetic and its order are tested without one.
//
// Each thread of each block is a fiber; those of a block run by turns in one thread of the CPU, and one gives way where it
// waits: at a barrier, or for the other lanes of its warp. A block runs until it waits for the others, then the next one: a
// block that does not wait for all reads what they have not written yet. The file comes before the kernel's
// text, and what stands below AFTER_THE_KERNEL behind it.

#ifndef AFTER_THE_KERNEL
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <ucontext.h>
#include <vector>

#define ON_A_CPU
#define AFTER_THE_KERNEL
#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(threads, blocks)
#define __align__(bytes) alignas(bytes)

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

inline float __int_as_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

constexpr int WARP = 32, WORDS = 6;

struct Gate { // opens when all have come
    int all, come = 0, opened = 0;
};

struct Warp {
    Gate gate{WARP};
    unsigned words[2][WARP][WORDS]; // by turns: who writes the one has seen that all have read the other
};

struct Block {
    Gate gate;
    std::vector<Warp> warps;
    std::unique_ptr<unsigned char[]> memory;
    bool asks = false;
    int left;
};

struct Index { unsigned x; };

struct Fiber {
    ucontext_t context;
    std::unique_ptr<unsigned char[]> stack;
    Index thread, block;
    Block *home;
    int turn = 0;
    bool done = false;
};

static ucontext_t scheduler;
static Fiber *now;
static Index threadIdx, blockIdx;
static unsigned num_blocks;

inline void give_way() { swapcontext(&now->context, &scheduler); }

inline void pass(Gate &gate) {
    const int opened = gate.opened;
    if (++gate.come == gate.all)
        gate.come = 0, gate.opened++;
    else
        while (gate.opened == opened) give_way();
}

inline void __syncthreads() { pass(now->home->gate); }
inline void __trap() { abort(); }

// What all lanes of the warp hand in.
inline unsigned (&exchanged(const unsigned *mine))[WARP][WORDS] {
    Warp &warp = now->home->warps[now->thread.x / WARP];
    unsigned(&all)[WARP][WORDS] = warp.words[now->turn++ & 1];
    memcpy(all[now->thread.x % WARP], mine, sizeof all[0]);
    pass(warp.gate);
    return all;
}

inline float __shfl_xor_sync(unsigned, float value, int apart) {
    unsigned mine[WORDS] = {};
    memcpy(mine, &value, 4);
    return __int_as_float(exchanged(mine)[now->thread.x % WARP ^ apart][0]);
}

struct Shared;
inline Shared &shared() { return *(Shared *)now->home->memory.get(); }

inline unsigned to_bits(float value) {
    unsigned bits;
    memcpy(&bits, &value, 4);
    return std::isnan(value) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline unsigned packed(float low, float high) { return to_bits(low) | to_bits(high) << 16; }
inline float exp2_of(float value) { return exp2f(value); }
inline float rsqrt_of(float value) { return 1 / sqrtf(value); }

template <class T> inline T loaded(const void *from) {
    T value;
    memcpy(&value, from, sizeof value);
    return value;
}

inline uint2 load_far_half(const unsigned short *from) { return loaded<uint2>(from); }
inline float load_far_one(const float *from) { return *from; }
inline uint4 load_far(const unsigned short *from) { return loaded<uint4>(from); }
inline unsigned load_far_pair(const unsigned short *from) { return loaded<unsigned>(from); }

using Full = unsigned long long; // how often a thread has arrived
inline void make_barrier(Full *full) { *full = 0; }
inline void copy_16_bytes(unsigned short *to, const unsigned short *from) { memcpy(to, from, 16); }
inline void arrive_with_copies(Full *full) { ++*full; }

inline bool is_full(Full *full, unsigned parity) {
    const bool done = (*full / now->home->gate.all & 1) != parity;
    if (!done) give_way();
    return done;
}

inline void add_one(unsigned *counter) { ++*counter; }
inline unsigned count_before(unsigned *counter) { return (*counter)++; }

inline unsigned count_of(unsigned *counter) {
    const unsigned count = *counter;
    if (count < num_blocks) {
        now->home->asks = true;
        give_way();
    }
    return count;
}

inline float low(unsigned pair) { return __int_as_float(pair << 16); }
inline float high(unsigned pair) { return __int_as_float(pair & 0xffff0000); }

// Where each lane's numbers stand in the two matrices: the PTX manual on mma.m16n8k16.
inline void product(float *c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    const unsigned mine[WORDS] = {a0, a1, a2, a3, b0, b1};
    const auto &all = exchanged(mine);
    const int lane = now->thread.x % WARP;
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4, column = lane % 4 * 2 + i % 2, lower = i / 2;
        for (int k = 0; k < 4; k++)
            for (int half = 0; half < 2; half++) {
                const unsigned a = all[row * 4 + k][half * 2 + lower], b = all[column * 4 + k][4 + half];
                c[i] += low(a) * low(b) + high(a) * high(b);
            }
    }
}

#else

static void **given;

template <class T> T argument(int place) { return *(T *)given[place]; }

static void begin() {
    decoder_layers(argument<const Layer *>(0), argument<u16 *>(1), argument<float *>(2), argument<const long long *>(3),
                   argument<const long long *>(4), argument<const long long *>(5), argument<const u16 *>(6),
                   argument<const u16 *>(7), argument<u16 *>(8), argument<u16 *>(9), argument<float *>(10),
                   argument<float *>(11), argument<u16 *>(12), argument<u16 *>(13), argument<u32 *>(14),
                   argument<u32 *>(15), argument<int>(16), argument<int>(17), argument<int>(18), argument<int>(19),
                   argument<float>(20), argument<float>(21), argument<float>(22));
    now->done = true;
    give_way();
}

extern "C" unsigned long long shared_bytes() { return sizeof(Shared); }

extern "C" void launch(int blocks, int threads, void **arguments) {
    constexpr int STACK = 1 << 17;
    given = arguments, num_blocks = blocks;
    std::vector<Block> homes(blocks);
    std::vector<Fiber> fibers(blocks * threads);
    for (Block &home : homes) {
        home.gate.all = home.left = threads;
        home.warps.resize(threads / WARP);
        home.memory.reset(new (std::align_val_t(128)) unsigned char[sizeof(Shared)]);
        memset(home.memory.get(), 0xff, sizeof(Shared)); // NaN: what nobody wrote must not count
    }
    for (unsigned i = 0; i < fibers.size(); i++) {
        Fiber &fiber = fibers[i];
        fiber.thread.x = i % threads, fiber.block.x = i / threads, fiber.home = &homes[i / threads];
        fiber.stack.reset(new unsigned char[STACK]);
        getcontext(&fiber.context);
        fiber.context.uc_stack = {fiber.stack.get(), 0, STACK};
        makecontext(&fiber.context, begin, 0);
    }
    for (bool more = true; more;) {
        more = false;
        for (int block = 0; block < blocks; block++) {
            Block &home = homes[block];
            for (home.asks = false; home.left > 0 && !home.asks;)
                for (int thread = 0; thread < threads; thread++) {
                    Fiber &fiber = fibers[block * threads + thread];
                    if (fiber.done) continue;
                    now = &fiber, threadIdx = fiber.thread, blockIdx = fiber.block;
                    swapcontext(&scheduler, &fiber.context);
                    home.left -= fiber.done;
                }
            more |= home.left > 0;
        }
    }
    for (Block &home : homes) operator delete[](home.memory.release(), std::align_val_t(128));
}
#endif
