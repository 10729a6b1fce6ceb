// All decoder layers of a small Qwen3-type model for a few tokens, in one launch of one block a multiprocessor.
//
// A launch a product costs a few microseconds however little it reads, since each starts with cold loads. Here a block
// knows from the start which rows of every layer's weights it will multiply, and a ring in shared memory is always full
// of the next ones (asynchronous copies that complete on mbarriers), across the barriers between a layer's phases:
//
//   A  x = norm(residual); queries, keys, values = x Wqkv'      eight rows of Wqkv, or several times, a block
//   B  attention: a share of a row's cached tokens for one key head a block; new keys and values go to the cache; the
//      block of a head that comes last adds its shares up
//   C  o = attention Wo'
//   D  residual += o; x = norm(residual); mlp = SiLU(x Wg') * (x Wu')
//   E  down = mlp Wd', which the next A adds to the residual
//
// with a barrier over all blocks after each. While it waits there, a block fills the ring up, by a few pieces at a time
// (what the barrier sends queues behind them), and loads what the next phase reads that no block writes. Every block
// keeps the whole residual stream. Products are by tensor cores: up to 16 tokens times 8 rows of a weight, the inputs
// shared out over the warps. Both take their inputs in one order, 16 bytes a lane, which is not the instruction's; a sum
// does not mind. Roundings to bfloat16 are where the modules of transformers round. No headers: compiled by NVRTC, see
// specdec/fast_persistent.py.
//
// Defined by the compiler's options: E hidden size, H query heads, G key heads, I width of the MLP, LAYERS, GRID
// blocks, TOKENS at most, Q of them a row, SLOTS of the ring.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#define D 128
#define THREADS 256
#define WARPS 8
#define NT ((TOKENS + 7) / 8)
#define REPEAT (H / G)
#define ROWS 8                        // of a weight that a product takes at once
#define UNIT 1024                     // inputs of them that one slot of the ring holds
#define SLOT_ROW (UNIT + 32)          // padded, so that no two lanes meet in a bank
#define SLOT (ROWS * SLOT_ROW)
#define CHUNKS (UNIT / 8)             // of 16 bytes in a row
#define X_ROW (E + 32)
#define QKV_ITEMS ((H + 2 * G) * D / ROWS)
#define O_ITEMS (E / ROWS)
#define MLP_ITEMS (2 * I / ROWS)      // half of the rows are of Wg, half of Wu
#define DOWN_ITEMS (E / ROWS)
#define AT_MOST(items) ((items + GRID - 1) / GRID)
#define MOST_ITEMS (AT_MOST(QKV_ITEMS) > AT_MOST(MLP_ITEMS) ? AT_MOST(QKV_ITEMS) : AT_MOST(MLP_ITEMS))
#define UNITS_A_LAYER \
    (AT_MOST(QKV_ITEMS) * E / UNIT + AT_MOST(O_ITEMS) * H * D / UNIT + AT_MOST(MLP_ITEMS) * E / UNIT + AT_MOST(DOWN_ITEMS) * I / UNIT)
#define AT_ONCE ((UNITS_A_LAYER + 4) / 5) // units that are sent for at one barrier
#define LEAST_SHARE 64                // cached tokens of a share, at least
#define MOST_SHARES 16
#define R (REPEAT * Q)                // query rows of a key head
#define E_PARTS (E / (4 * THREADS))   // of four dimensions each that a thread keeps of the stream
#define TOO_OFTEN (1u << 24)
#define MINUS_INFINITY __int_as_float(0xff800000)

struct Layer {
    const u16 *qkv, *out, *gate_up, *down, *input_norm, *mlp_norm, *query_norm, *key_norm;
    u16 *keys, *values;
};

struct Shared {
    __align__(16) u16 ring[SLOTS * SLOT];
    union {
        __align__(16) u16 x[TOKENS * X_ROW];
        float sums[MOST_ITEMS * WARPS * TOKENS * ROWS];
        struct {
            __align__(16) float query[R][D];
            float key[Q][D], value[Q][D];
            float out[WARPS][R][D];
            float top[WARPS][R], total[WARPS][R];
            u32 before; // blocks that came earlier
        } attention;
    };
    __align__(16) u16 residual[TOKENS * E];
    float squares[WARPS][TOKENS], total[TOKENS]; // of each token's stream
    Layer layers[LAYERS];
    u64 full[SLOTS];
};

#ifndef ON_A_CPU // tests/gpu_on_a_cpu.cpp has these in C++

__device__ __forceinline__ Shared &shared() {
    extern __shared__ __align__(128) unsigned char memory[];
    return *(Shared *)memory;
}

__device__ __forceinline__ u32 to_bits(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ u32 packed(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ float exp2_of(float value) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

__device__ __forceinline__ float rsqrt_of(float value) {
    float result;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}

// What other blocks wrote is read from the L2 cache: a multiprocessor's own cache does not see their writes.
__device__ __forceinline__ uint2 load_far_half(const u16 *from) {
    uint2 v;
    asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from));
    return v;
}

__device__ __forceinline__ float load_far_one(const float *from) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(from));
    return v;
}

__device__ __forceinline__ uint4 load_far(const u16 *from) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
    return v;
}

__device__ __forceinline__ u32 load_far_pair(const u16 *from) {
    u32 v;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(from));
    return v;
}

__device__ __forceinline__ u32 address(const void *shared) {
    u32 result;
    asm("{ .reg .u64 a; cvta.to.shared.u64 a, %1; cvt.u32.u64 %0, a; }" : "=r"(result) : "l"(shared));
    return result;
}

__device__ __forceinline__ void make_barrier(u64 *full) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address(full)), "r"(THREADS) : "memory");
}

__device__ __forceinline__ void copy_16_bytes(u16 *to, const u16 *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address(to)), "l"(from) : "memory");
}

// This thread's copies so far count for the barrier when they have come.
__device__ __forceinline__ void arrive_with_copies(u64 *full) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(address(full)) : "memory");
}

__device__ __forceinline__ bool is_full(u64 *full, u32 parity) {
    u32 done;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(address(full)), "r"(parity)
                 : "memory");
    return done;
}

__device__ __forceinline__ void add_one(u32 *counter) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

__device__ __forceinline__ u32 count_of(u32 *counter) {
    u32 count;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
    return count;
}

__device__ __forceinline__ u32 count_before(u32 *counter) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

// 16 tokens times 8 rows over 16 inputs: c += a b.
__device__ __forceinline__ void product(float *c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

#endif

__device__ __forceinline__ float of_bits(u32 bits) { return __int_as_float(bits << 16); }
__device__ __forceinline__ float rounded(float value) { return of_bits(to_bits(value)); }
__device__ __forceinline__ float low_of(u32 pair) { return __int_as_float(pair << 16); }
__device__ __forceinline__ float high_of(u32 pair) { return __int_as_float(pair & 0xffff0000); }

__device__ __forceinline__ float over_warp(float value) {
    for (int apart = 16; apart > 0; apart /= 2) value += __shfl_xor_sync(0xffffffff, value, apart);
    return value;
}

// The next piece of weight that this block needs, over all layers.
struct Next {
    int layer, phase, item, unit, issued, free; // slots that were read and are to be filled

    __device__ __forceinline__ void some(Shared &s) {
        const int count = min(free, AT_ONCE);
        for (int i = 0; i < count; i++) issue(s);
    }

    __device__ __forceinline__ void issue(Shared &s) {
        if (layer >= LAYERS) {
            free = 0;
            return;
        }
        const Layer &l = s.layers[layer];
        const int row = threadIdx.x / CHUNKS, column = threadIdx.x % CHUNKS * 8;
        const u16 *from;
        int inputs, upper = ROWS / 2; // where the second half of the rows begins, from the first on
        if (phase == 0)
            from = l.qkv + (u64)item * ROWS * E, inputs = E;
        else if (phase == 1)
            from = l.out + (u64)item * ROWS * (H * D), inputs = H * D;
        else if (phase == 2)
            from = l.gate_up + (u64)item * (ROWS / 2) * E, inputs = E, upper = I;
        else
            from = l.down + (u64)item * ROWS * I, inputs = I;
        const int slot = issued % SLOTS, units = inputs / UNIT;
        from += unit * UNIT + column;
        u16 *to = s.ring + slot * SLOT + column;
#pragma unroll
        for (int r = 0; r < ROWS; r += THREADS / CHUNKS) {
            const u16 *here = from + (u64)((r + row) % (ROWS / 2) + (r + row) / (ROWS / 2) * upper) * inputs;
            copy_16_bytes(to + (r + row) * SLOT_ROW, here);
        }
        arrive_with_copies(s.full + slot);
        issued++, free--;
        if (++unit < units) return;
        unit = 0;
        item += GRID;
        while (item >= (phase == 0 ? QKV_ITEMS : phase == 2 ? MLP_ITEMS : phase == 1 ? O_ITEMS : DOWN_ITEMS)) {
            item = blockIdx.x;
            if (++phase == 4) {
                phase = 0;
                layer++;
                break;
            }
        }
    }
};

__device__ __forceinline__ void wait_full(Shared &s, int used) {
    u32 asked = 0;
    while (!is_full(s.full + used % SLOTS, used / SLOTS & 1))
        if (++asked == TOO_OFTEN) __trap();
}

// What all blocks wrote before they arrive is seen by all after they waited. Each barrier of a launch has a counter of
// its own; it is set back when all blocks have come to the next one.
__device__ __forceinline__ void arrive(u32 *counters, int which) {
    __syncthreads();
    if (threadIdx.x == 0) add_one(counters + which);
}

__device__ __forceinline__ void wait(u32 *counters, int which) {
    if (threadIdx.x == 0) {
        u32 asked = 0;
        while (count_of(counters + which) < GRID)
            if (++asked == TOO_OFTEN) __trap(); // some ten seconds: an error is better than a GPU that hangs
        if (blockIdx.x == 0) counters[(which + 5 * LAYERS - 1) % (5 * LAYERS)] = 0;
    }
    __syncthreads();
}

// The x of the tokens, in shared memory or, by `far`, from other blocks, [T, UNITS * UNIT], times this block's rows of a
// weight. Afterwards s.sums holds what each warp found of each item, and the slots that were read may be filled.
template <int ITEMS, int UNITS>
__device__ __forceinline__ void multiply(Shared &s, Next &next, int &used, int items, const u16 *far, int T) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    constexpr int STEPS = UNIT / WARPS / 32;
    const int input = warp * (UNIT / WARPS) + (lane & 3) * 8;
    uint4 a[UNITS][STEPS][NT];
#pragma unroll
    for (int unit = 0; unit < UNITS; unit++)
#pragma unroll
        for (int k = 0; k < STEPS; k++)
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const int token = n * 8 + (lane >> 2), at = unit * UNIT + input + k * 32;
                if (far)
                    a[unit][k][n] = load_far(far + (u64)min(token, T - 1) * (UNITS * UNIT) + at);
                else
                    a[unit][k][n] = *(const uint4 *)(s.x + min(token, TOKENS - 1) * X_ROW + at);
            }
    while (next.issued < used + items * UNITS && next.free > 0) next.issue(s);
    float sum[ITEMS][2][4];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
#pragma unroll
        for (int j = 0; j < 8; j++) sum[i][j / 4][j % 4] = 0.0f;
        if (i < items) {
#pragma unroll
            for (int unit = 0; unit < UNITS; unit++) {
                wait_full(s, used);
                const u16 *rows = s.ring + used % SLOTS * SLOT + (lane >> 2) * SLOT_ROW + input;
                used++;
                uint4 b[STEPS];
#pragma unroll
                for (int k = 0; k < STEPS; k++) b[k] = *(const uint4 *)(rows + k * 32);
#pragma unroll
                for (int k = 0; k < STEPS; k++) {
                    const uint4 low = a[unit][k][0], high = NT > 1 ? a[unit][k][NT - 1] : make_uint4(0, 0, 0, 0);
                    product(sum[i][0], low.x, high.x, low.y, high.y, b[k].x, b[k].y);
                    product(sum[i][1], low.z, high.z, low.w, high.w, b[k].z, b[k].w);
                }
            }
        }
    }
    next.free += items * UNITS;
    __syncthreads(); // x and the slots have been read
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
        if (i < items)
#pragma unroll
            for (int n = 0; n < NT; n++) {
                const int token = n * 8 + (lane >> 2);
                const float *c = sum[i][0] + 2 * n, *d = sum[i][1] + 2 * n;
                if (token < TOKENS)
                    *(float2 *)(s.sums + ((i * WARPS + warp) * TOKENS + token) * ROWS + (lane & 3) * 2) =
                        make_float2(c[0] + d[0], c[1] + d[1]);
            }
    __syncthreads();
}

__device__ __forceinline__ float summed(const Shared &s, int item, int row, int token) {
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) total += s.sums[((item * WARPS + warp) * TOKENS + token) * ROWS + row];
    return total;
}

// This block's outputs of a product: bfloat16 [T, width].
__device__ __forceinline__ void store(const Shared &s, u16 *out, int width, int items, int T) {
    for (int at = threadIdx.x; at < items * ROWS * TOKENS; at += THREADS) {
        const int r = at % ROWS, t = at / ROWS % TOKENS, i = at / ROWS / TOKENS;
        if (t < T) out[(u64)t * width + (blockIdx.x + i * GRID) * ROWS + r] = to_bits(summed(s, i, r, t));
    }
}

struct NormWeight {
    uint2 four[E_PARTS];

    __device__ __forceinline__ void load(const u16 *weight) {
#pragma unroll
        for (int c = 0; c < E_PARTS; c++) four[c] = *(const uint2 *)(weight + (c * THREADS + threadIdx.x) * 4);
    }
};

// residual += a product [T, E] (where there is any), and x = norm(residual) in shared memory.
__device__ __forceinline__ void add_and_norm(Shared &s, const u16 *added, const NormWeight &weight, float epsilon, int T) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    uint2 values[TOKENS][E_PARTS];
    float square[TOKENS];
    if (added)
#pragma unroll
        for (int t = 0; t < TOKENS; t++)
#pragma unroll
            for (int c = 0; c < E_PARTS; c++)
                values[t][c] = load_far_half(added + min(t, T - 1) * E + (c * THREADS + threadIdx.x) * 4);
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        square[t] = 0.0f;
#pragma unroll
        for (int c = 0; c < E_PARTS; c++) {
            uint2 *at = (uint2 *)(s.residual + t * E + (c * THREADS + threadIdx.x) * 4), &v = values[t][c];
            const uint2 old = *at;
            if (added) {
                v.x = packed(low_of(old.x) + low_of(v.x), high_of(old.x) + high_of(v.x));
                v.y = packed(low_of(old.y) + low_of(v.y), high_of(old.y) + high_of(v.y));
                *at = v;
            } else {
                v = old;
            }
            square[t] += low_of(v.x) * low_of(v.x) + high_of(v.x) * high_of(v.x);
            square[t] += low_of(v.y) * low_of(v.y) + high_of(v.y) * high_of(v.y);
        }
    }
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2)
#pragma unroll
        for (int t = 0; t < TOKENS; t++) square[t] += __shfl_xor_sync(0xffffffff, square[t], apart);
    if (lane == 0)
#pragma unroll
        for (int t = 0; t < TOKENS; t++) s.squares[warp][t] = square[t];
    __syncthreads();
    if (threadIdx.x < TOKENS) {
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < WARPS; i++) total += s.squares[i][threadIdx.x];
        s.total[threadIdx.x] = total;
    }
    __syncthreads();
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        const float scale = rsqrt_of(s.total[t] / E + epsilon);
#pragma unroll
        for (int c = 0; c < E_PARTS; c++) {
            const uint2 v = values[t][c], w = weight.four[c];
            const u32 x = packed(low_of(v.x) * scale, high_of(v.x) * scale), y = packed(low_of(v.y) * scale, high_of(v.y) * scale);
            *(uint2 *)(s.x + t * X_ROW + (c * THREADS + threadIdx.x) * 4) =
                make_uint2(packed(low_of(x) * low_of(w.x), high_of(x) * high_of(w.x)),
                           packed(low_of(y) * low_of(w.y), high_of(y) * high_of(w.y)));
        }
    }
    __syncthreads();
}

// What the rotation of one head takes: the norm's weights and the angles of four dimensions a lane (2 lane, 2 lane + 1
// and those D / 2 on).
struct Turn {
    u32 weight_low, weight_high, cosine, sine;

    __device__ __forceinline__ void angles(const u16 *cosines, const u16 *sines, u64 position) {
        const int at = (threadIdx.x & 31) * 2;
        cosine = *(const u32 *)(cosines + position * D + at), sine = *(const u32 *)(sines + position * D + at);
    }

    __device__ __forceinline__ void weights(const u16 *weight) {
        const int at = (threadIdx.x & 31) * 2;
        if (weight) weight_low = *(const u32 *)(weight + at), weight_high = *(const u32 *)(weight + D / 2 + at);
    }

    // The head normalised and rotated, to float32 in shared memory; to `stored` too, where there is one.
    __device__ __forceinline__ void head(const u16 *from, bool norm, float epsilon, float *to, u16 *stored) const {
        const int at = (threadIdx.x & 31) * 2;
        const u32 low = load_far_pair(from + at), high = load_far_pair(from + D / 2 + at);
        float a[2] = {low_of(low), high_of(low)}, b[2] = {low_of(high), high_of(high)};
        if (norm) {
            const float square = over_warp(a[0] * a[0] + a[1] * a[1] + b[0] * b[0] + b[1] * b[1]);
            const float scale = rsqrt_of(square / D + epsilon);
            a[0] = rounded(rounded(a[0] * scale) * low_of(weight_low));
            a[1] = rounded(rounded(a[1] * scale) * high_of(weight_low));
            b[0] = rounded(rounded(b[0] * scale) * low_of(weight_high));
            b[1] = rounded(rounded(b[1] * scale) * high_of(weight_high));
        }
        float x[2], y[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const float c = j ? high_of(cosine) : low_of(cosine), n = j ? high_of(sine) : low_of(sine);
            x[j] = rounded(rounded(a[j] * c) - rounded(b[j] * n));
            y[j] = rounded(rounded(b[j] * c) + rounded(a[j] * n));
        }
        *(float2 *)(to + at) = make_float2(x[0], x[1]);
        *(float2 *)(to + D / 2 + at) = make_float2(y[0], y[1]);
        if (stored) {
            *(u32 *)(stored + at) = packed(x[0], x[1]);
            *(u32 *)(stored + D / 2 + at) = packed(y[0], y[1]);
        }
    }
};

struct Running { // softmax over some tokens for all query rows of a key head, eight dimensions a lane
    float top[R], total[R], out[R][8];
};

__device__ __forceinline__ void unpack(const uint4 &v, float *to) {
    to[0] = low_of(v.x), to[1] = high_of(v.x), to[2] = low_of(v.y), to[3] = high_of(v.y);
    to[4] = low_of(v.z), to[5] = high_of(v.z), to[6] = low_of(v.w), to[7] = high_of(v.w);
}

// N tokens more: their keys and values, eight dimensions a lane of a half-warp each.
template <int N>
__device__ __forceinline__ void take(Running &run, const float query[R][8], const float key[N][8], const float value[N][8],
                                     const bool seen[N][R], float scale) {
#pragma unroll
    for (int r = 0; r < R; r++) {
        float score[N], top = run.top[r];
#pragma unroll
        for (int n = 0; n < N; n++) {
            float dot = 0.0f;
#pragma unroll
            for (int d = 0; d < 8; d++) dot += query[r][d] * key[n][d];
#pragma unroll
            for (int apart = 8; apart > 0; apart /= 2) dot += __shfl_xor_sync(0xffffffff, dot, apart);
            score[n] = seen[n][r] ? dot * scale : MINUS_INFINITY;
            top = fmaxf(top, score[n]);
        }
        const float shift = top == MINUS_INFINITY ? 0.0f : top, rescale = exp2_of(run.top[r] - shift);
        run.total[r] *= rescale;
#pragma unroll
        for (int d = 0; d < 8; d++) run.out[r][d] *= rescale;
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float weight = exp2_of(score[n] - shift);
            run.total[r] += weight;
#pragma unroll
            for (int d = 0; d < 8; d++) run.out[r][d] += weight * value[n][d];
        }
        run.top[r] = top;
    }
}

// A share of one row's tokens for one key head.
struct Share {
    static constexpr int N = 4; // tokens of a half-warp that are on their way at once
    int split, count, group, b, start, begin, stop, position[Q]; // count: shares that are not empty
    u64 offset;
    bool real[Q];
    u64 slot[Q];
    u16 *keys, *values;
    uint4 k[N], v[N];
    Turn turn;

    __device__ __forceinline__ int role() const { return threadIdx.x / 32; }
    __device__ __forceinline__ bool last() const { return split == count - 1; }

    __device__ __forceinline__ void fetch(int at) {
        const int half = threadIdx.x >> 4 & 1, d = (threadIdx.x & 15) * 8;
#pragma unroll
        for (int n = 0; n < N; n++) {
            const int from = at + (n * WARPS + (int)threadIdx.x / 32) * 2 + half;
            k[n] = v[n] = make_uint4(0, 0, 0, 0);
            if (from < stop) {
                k[n] = *(const uint4 *)(keys + (u64)from * D + d);
                v[n] = *(const uint4 *)(values + (u64)from * D + d);
            }
        }
    }

    // Which share of which row; the same in all layers.
    __device__ __forceinline__ void place(int item, int splits, const long long *positions, const long long *slots,
                                          const long long *rows, const u16 *cosines, const u16 *sines, int first_row, int width) {
        split = item % splits, group = item / splits % G, b = item / splits / G;
        offset = ((rows ? rows[b] : first_row + b) * G + group) * (u64)width * D;
        start = 0x7fffffff;
#pragma unroll
        for (int j = 0; j < Q; j++) {
            position[j] = (int)positions[b * Q + j], slot[j] = slots[b * Q + j], real[j] = slot[j] != width - 1;
            if (real[j]) start = min(start, position[j]);
        }
        if (start == 0x7fffffff) start = 0;
        const int size = max(LEAST_SHARE, (start + splits - 1) / splits);
        count = max(1, (start + size - 1) / size);
        begin = split * size, stop = min(start, begin + size);
        if (role() < R + Q) turn.angles(cosines, sines, positions[b * Q + (role() < R ? role() / REPEAT : role() - R)]);
    }

    // What no block writes while the layers are computed.
    __device__ __forceinline__ void prepare(const Layer &l) {
        keys = l.keys + offset, values = l.values + offset;
        if (split >= count) return;
        if (role() < R + Q) turn.weights(role() < R ? l.query_norm : l.key_norm);
        fetch(begin);
    }

    __device__ __forceinline__ void attend(Shared &s, const u16 *qkv, u16 *heads, float *shares, float *lse, u32 *came, bool norm,
                                           float epsilon, float scale) {
        if (split >= count) return;
        const int lane = threadIdx.x & 31, half = lane >> 4, d0 = (lane & 15) * 8;
        const u16 *mine = qkv + (u64)b * Q * (H + 2 * G) * D;
        if (role() < R) {
            const int head = group * REPEAT + role() % REPEAT;
            turn.head(mine + (role() / REPEAT * (H + 2 * G) + head) * D, norm, epsilon, s.attention.query[role()], 0);
        } else if (role() < R + Q && last()) {
            const int j = role() - R;
            const u16 *key = mine + (j * (H + 2 * G) + H + group) * D;
            const u32 low = load_far_pair(key + G * D + lane * 2), high = load_far_pair(key + G * D + D / 2 + lane * 2);
            const bool kept = Q > 1 && j ? real[Q - 1] : real[0];
            const u64 to = (Q > 1 && j ? slot[Q - 1] : slot[0]) * D;
            turn.head(key, norm, epsilon, s.attention.key[j], kept ? keys + to : 0);
            *(float2 *)(s.attention.value[j] + lane * 2) = make_float2(low_of(low), high_of(low));
            *(float2 *)(s.attention.value[j] + D / 2 + lane * 2) = make_float2(low_of(high), high_of(high));
            if (kept) {
                *(u32 *)(values + to + lane * 2) = low;
                *(u32 *)(values + to + D / 2 + lane * 2) = high;
            }
        }
        __syncthreads();
        float query[R][8];
        Running run;
#pragma unroll
        for (int r = 0; r < R; r++) {
            run.top[r] = MINUS_INFINITY, run.total[r] = 0.0f;
#pragma unroll
            for (int d = 0; d < 8; d++) query[r][d] = s.attention.query[r][d0 + d], run.out[r][d] = 0.0f;
        }
        for (int at = begin; at < stop; at += 2 * WARPS * N) {
            float key[N][8], value[N][8];
            bool seen[N][R];
#pragma unroll
            for (int n = 0; n < N; n++) {
                unpack(k[n], key[n]), unpack(v[n], value[n]);
#pragma unroll
                for (int r = 0; r < R; r++) seen[n][r] = at + (n * WARPS + role()) * 2 + half < stop;
            }
            fetch(at + 2 * WARPS * N);
            take<N>(run, query, key, value, seen, scale);
        }
        if (last() && role() == 0) { // a new token a half-warp
            const int j = min(half, Q - 1);
            float key[1][8], value[1][8];
            bool seen[1][R];
#pragma unroll
            for (int r = 0; r < R; r++)
                seen[0][r] = half < Q && (half ? real[Q - 1] : real[0]) &&
                             (half ? position[Q - 1] : position[0]) <= position[r / REPEAT];
#pragma unroll
            for (int d = 0; d < 8; d++) key[0][d] = s.attention.key[j][d0 + d], value[0][d] = s.attention.value[j][d0 + d];
            take<1>(run, query, key, value, seen, scale);
        }
#pragma unroll
        for (int r = 0; r < R; r++) { // both halves of the warp
            const float other = __shfl_xor_sync(0xffffffff, run.top[r], 16), top = fmaxf(run.top[r], other);
            const float shift = top == MINUS_INFINITY ? 0.0f : top, rescale = exp2_of(run.top[r] - shift);
            float total = run.total[r] * rescale;
            total += __shfl_xor_sync(0xffffffff, total, 16);
#pragma unroll
            for (int d = 0; d < 8; d++) {
                float out = run.out[r][d] * rescale;
                out += __shfl_xor_sync(0xffffffff, out, 16);
                if (half == 0) s.attention.out[role()][r][d0 + d] = out;
            }
            if (lane == 0) s.attention.top[role()][r] = top, s.attention.total[role()][r] = total;
        }
        __syncthreads();
        for (int at = threadIdx.x; at < R * D; at += THREADS) {
            const int r = at / D, d = at % D;
            float top = MINUS_INFINITY, total = 0.0f, out = 0.0f;
#pragma unroll
            for (int i = 0; i < WARPS; i++) top = fmaxf(top, s.attention.top[i][r]);
            const float shift = top == MINUS_INFINITY ? 0.0f : top;
#pragma unroll
            for (int i = 0; i < WARPS; i++) {
                const float weight = exp2_of(s.attention.top[i][r] - shift);
                total += s.attention.total[i][r] * weight;
                out += s.attention.out[i][r][d] * weight;
            }
            const int head = (b * Q + r / REPEAT) * H + group * REPEAT + r % REPEAT;
            out = total == 0.0f ? 0.0f : out / total;
            if (count == 1) {
                heads[head * D + d] = to_bits(out);
            } else {
                shares[(head * MOST_SHARES + split) * D + d] = out;
                if (d == 0) lse[head * MOST_SHARES + split] = total == 0.0f ? MINUS_INFINITY : top + log2f(total);
            }
        }
        if (count > 1) merge(s, heads, shares, lse, came + b * G + group);
    }

    // The block that comes last adds the shares of its heads up.
    __device__ __forceinline__ void merge(Shared &s, u16 *heads, const float *shares, const float *lse, u32 *came) {
        __syncthreads();
        if (threadIdx.x == 0) {
            s.attention.before = count_before(came);
            if (s.attention.before == count - 1) *came = 0;
        }
        __syncthreads();
        if (s.attention.before != count - 1) return;
        for (int at = threadIdx.x; at < R * D; at += THREADS) {
            const int r = at / D, d = at % D, head = (b * Q + r / REPEAT) * H + group * REPEAT + r % REPEAT;
            float one[MOST_SHARES], part[MOST_SHARES], top = MINUS_INFINITY, total = 0.0f, out = 0.0f;
#pragma unroll
            for (int i = 0; i < MOST_SHARES; i++) {
                const int from = head * MOST_SHARES + min(i, count - 1);
                one[i] = load_far_one(lse + from), part[i] = load_far_one(shares + from * D + d);
            }
#pragma unroll
            for (int i = 0; i < MOST_SHARES; i++)
                if (i < count) top = fmaxf(top, one[i]);
            const float shift = top == MINUS_INFINITY ? 0.0f : top;
#pragma unroll
            for (int i = 0; i < MOST_SHARES; i++) {
                const float weight = i < count ? exp2_of(one[i] - shift) : 0.0f;
                total += weight, out += weight * part[i];
            }
            heads[head * D + d] = to_bits(total == 0.0f ? 0.0f : out / total);
        }
    }
};

__device__ __forceinline__ int items_of(int all) {
    return (int)blockIdx.x < all ? (all - (int)blockIdx.x + GRID - 1) / GRID : 0;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    decoder_layers(const Layer *table, u16 *stream, float *squares, const long long *positions, const long long *slots,
                   const long long *rows, const u16 *cosines, const u16 *sines, u16 *qkv, u16 *heads, float *shares, float *lse,
                   u16 *mlp, u16 *added, u32 *counters, u32 *came, int first_row, int width, int B, int splits,
                   float norm_epsilon, float head_epsilon, float scale) {
    Shared &s = shared();
    const int T = B * Q, shares_in_all = B * G * splits;
    for (int at = threadIdx.x; at < LAYERS * (int)(sizeof(Layer) / 8); at += THREADS)
        ((u64 *)s.layers)[at] = ((const u64 *)table)[at];
    if (threadIdx.x < SLOTS) make_barrier(s.full + threadIdx.x);
    __syncthreads();
    Next next = {0, 0, (int)blockIdx.x, 0, 0, SLOTS};
    for (int slot = 0; slot < SLOTS; slot++) next.issue(s);
    for (int at = threadIdx.x; at < TOKENS * E / 8; at += THREADS)
        *(uint4 *)(s.residual + at * 8) = at < T * E / 8 ? load_far(stream + at * 8) : make_uint4(0, 0, 0, 0);
    NormWeight weight;
    weight.load(s.layers[0].input_norm);
    Share share;
    const bool attends = blockIdx.x < shares_in_all;
    if (attends) share.place(blockIdx.x, splits, positions, slots, rows, cosines, sines, first_row, width);
    __syncthreads();
    int used = 0, barrier = 0;
    const int qkv_items = items_of(QKV_ITEMS), o_items = items_of(O_ITEMS), mlp_items = items_of(MLP_ITEMS),
              down_items = items_of(DOWN_ITEMS);
    for (int layer = 0; layer < LAYERS; layer++) {
        const Layer &l = s.layers[layer];
        add_and_norm(s, layer ? added : 0, weight, norm_epsilon, T);
        multiply<AT_MOST(QKV_ITEMS), E / UNIT>(s, next, used, qkv_items, 0, T);
        store(s, qkv, (H + 2 * G) * D, qkv_items, T);
        arrive(counters, barrier);
        if (attends) share.prepare(l);
        next.some(s);
        wait(counters, barrier++);
        if (attends) share.attend(s, qkv, heads, shares, lse, came, l.query_norm != 0, head_epsilon, scale);
        for (int item = blockIdx.x + GRID; item < shares_in_all; item += GRID) { // more rows and heads than blocks
            __syncthreads();                                                     // all have read what is overwritten
            share.place(item, splits, positions, slots, rows, cosines, sines, first_row, width);
            share.prepare(l);
            share.attend(s, qkv, heads, shares, lse, came, l.query_norm != 0, head_epsilon, scale);
            if (item + GRID >= shares_in_all)
                share.place(blockIdx.x, splits, positions, slots, rows, cosines, sines, first_row, width);
        }
        arrive(counters, barrier);
        next.some(s);
        wait(counters, barrier++);
        if (o_items) {
            multiply<AT_MOST(O_ITEMS), H * D / UNIT>(s, next, used, o_items, heads, T);
            store(s, added, E, o_items, T);
        }
        arrive(counters, barrier);
        weight.load(l.mlp_norm);
        next.some(s);
        wait(counters, barrier++);
        add_and_norm(s, added, weight, norm_epsilon, T);
        multiply<AT_MOST(MLP_ITEMS), E / UNIT>(s, next, used, mlp_items, 0, T);
        for (int at = threadIdx.x; at < mlp_items * (ROWS / 2) * TOKENS; at += THREADS) {
            const int r = at % (ROWS / 2), t = at / (ROWS / 2) % TOKENS, i = at / (ROWS / 2) / TOKENS;
            const float gate = rounded(summed(s, i, r, t)), up = rounded(summed(s, i, r + ROWS / 2, t));
            const float silu = rounded(gate / (1.0f + exp2_of(-1.4426950408889634f * gate)));
            if (t < T) mlp[(u64)t * I + (blockIdx.x + i * GRID) * (ROWS / 2) + r] = to_bits(silu * up);
        }
        arrive(counters, barrier);
        next.some(s);
        wait(counters, barrier++);
        if (down_items) {
            multiply<AT_MOST(DOWN_ITEMS), I / UNIT>(s, next, used, down_items, mlp, T);
            store(s, added, E, down_items, T);
        }
        arrive(counters, barrier);
        weight.load(s.layers[layer + 1 < LAYERS ? layer + 1 : 0].input_norm);
        next.some(s);
        wait(counters, barrier++);
    }
    if (blockIdx.x != 0) return;
    add_and_norm(s, added, weight, norm_epsilon, T); // x is not used
    for (int at = threadIdx.x; at < T * E / 8; at += THREADS) *(uint4 *)(stream + at * 8) = *(uint4 *)(s.residual + at * 8);
    if (threadIdx.x < T) squares[threadIdx.x] = s.total[threadIdx.x];
}
