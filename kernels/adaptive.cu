// The profile `adaptive`. Compiled with
//   KV 1 | 2;  ANCHOR_BITS (unused), RESIDUAL_BITS;  PAGE tokens;  PAIRS channels that are rotated;
//   CURVED 0 | 1;  BETA, ONE_LESS, ONE_LESS_SQUARED, FOUR, INVERSE: the curve's constants;
//   PAIRED 0 | 1;  LANES, COLUMNS.
//
// A block is one head's page. Thread (row, lane) keeps 8 tokens of COLUMNS * VEC channels in
// registers. PAIRED: half of a thread's channels are the rotary partners of the other half, which is
// also what the sum of squares adds first.
//
// A width's plane holds the channels of all heads, so a block must know the other heads' widths
// before it can write. Blocks take their work in order from a counter and wait only for blocks that
// began at most HEADS places from them; HEADS is at most what the device runs at once.
#define ROWS (PAGE / 8 > 32 / LANES ? PAGE / 8 : 32 / LANES)
#define THREADS (ROWS * LANES)
#define MINE (COLUMNS * VEC)  // channels of a thread
#define WARP_ROWS (32 / LANES)
#define WARPS_HERE (THREADS / 32)
#define FULL 0xFFFFFFFFu
#define STEP (1 << RESIDUAL_BITS)
#define MIN_RANGE 6.103515625e-05f                    // 2^-14
#define MIN_ROW_RANGE 7.888609052210118e-31f          // 2^-100
#define MIN_POWER 8.673617379884035e-19f              // 2^-60
#define LEAST_EXPONENT (-100)
#define SCALE_STEPS 15
#define MAX_WIDTH 8

__constant__ float quarters[4] = {1.0f, 1.18920707702636718750f, 1.41421353816986083984f, 1.68179285526275634766f};
__constant__ float inverse_quarters[4] = {1.0f, 0.84089642763137817383f, 0.70710676908493041992f, 0.59460353851318359375f};

struct Plan {
    int pages, last, layers;
    int anchor_page[2], anchor_last[2];  // bytes, of keys and values
    i64 anchor_unit[2];
    i64 residual_page, residual_unit;
    int total[2];  // of a head's widths

    DEVICE_MEMBER int length(int page) const { return page == pages - 1 ? last : PAGE; }
    DEVICE_MEMBER i64 anchor(int layer, int kv, int page) const {
        return layer * (anchor_unit[0] + (KV == 2 ? anchor_unit[1] : 0)) + (kv ? anchor_unit[0] : 0) +
               (i64)page * anchor_page[kv];
    }
    DEVICE_MEMBER i64 residual(int layer, int kv, int page) const {
        return (layer * KV + kv) * residual_unit + page * residual_page;
    }
};
#define PLAN_ARGS int pages, int last, int layers, int page_0, int page_1, int last_0, int last_1, \
    i64 unit_0, i64 unit_1, i64 residual_page, i64 residual_unit, int total_0, int total_1
#define PLAN {pages, last, layers, {page_0, page_1}, {last_0, last_1}, {unit_0, unit_1}, \
    residual_page, residual_unit, {total_0, total_1}}

// Offsets in a page's section.
#define AT_RANGES (2 * CHANNELS)
#define AT_WIDTHS (4 * CHANNELS)
#define AT_STARS (AT_WIDTHS + (CHANNELS + 1) / 2)
#define AT_EXPONENTS (AT_STARS + HEADS)
#define AT_ROW_LOW (AT_EXPONENTS + HEADS)
#define AT_ROW_RANGE (AT_ROW_LOW + 2 * HEADS)
#define AT_ROWS (AT_ROW_RANGE + 2 * HEADS)
#define AT_STEPS (AT_ROWS + CHANNELS)
DEVICE int at_planes(bool values, int length) {
    return AT_STEPS + (values ? (length * HEADS + 1) / 2 : 0);
}

DEVICE float power_of_two(int e) { return __int_as_float((e + 127) << 23); }
DEVICE float bf16_to_float(u32 bits) { return __uint_as_float(bits << 16); }
DEVICE u16 bf16_down(float x) {  // bits of the largest bfloat16 <= x; zero is +0
    u32 u = __float_as_uint(x), cut = u & 0xFFFF0000u;
    if (u >> 31 && u != cut) cut += 0x10000u;
    return cut == 0x80000000u ? 0 : cut >> 16;
}
DEVICE u16 get_u16(const u8* at) { return at[0] | at[1] << 8; }
DEVICE void put_u16(u8* at, u32 x) { at[0] = x; at[1] = x >> 8; }
DEVICE int quarter_exponent(float power) {
    u32 u = __float_as_uint(power), mantissa = u & 0x7FFFFF;
    return 2 * ((int)(u >> 23) - 127) + (mantissa >= (__float_as_uint(quarters[1]) & 0x7FFFFF)) +
           (mantissa >= (__float_as_uint(quarters[3]) & 0x7FFFFF));
}

// Channel of a thread's element e, within its head; not below DIM for lanes that have none.
DEVICE int channel_of(int lane, int e) {
#if PAIRED
    return e < VEC / 2 ? lane * (VEC / 2) + e : DIM / 2 + lane * (VEC / 2) + e - VEC / 2;
#else
    return (e / VEC * LANES + lane) * VEC + e % VEC;
#endif
}

struct Tile { Pack x[COLUMNS][8]; };
DEVICE float tile_get(const Tile& tile, int token, int e) {
    return get(tile.x[e / VEC][token], e % VEC);
}

DEVICE void load_tile(Tile& tile, const Cache& cache, int unit, int head, i64 first, int mine,
                      int lane, u32* bad) {
    const u8* from = cache.unit(unit) + (i64)head * cache.d * ELEMENT_BYTES;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        i64 at = i < mine ? cache.token(first + i) : 0;
        if (at < 0) *bad = 1;
        const u8* row = from + at * ELEMENT_BYTES;
#pragma unroll
        for (int k = 0; k < COLUMNS; ++k) {
            Pack p = {};
            if (i < mine && at >= 0) {
#if PAIRED
                constexpr int HALF = VEC / 2 * ELEMENT_BYTES;
                struct Half { u32 w[(HALF + 3) / 4]; };
                Half a = load_as<HALF, Half>(row + channel_of(lane, 0) * ELEMENT_BYTES);
                Half b = load_as<HALF, Half>(row + channel_of(lane, VEC / 2) * ELEMENT_BYTES);
#pragma unroll
                for (int w = 0; w < WORDS; ++w)
                    p.w[w] = WORDS == 1 ? a.w[0] | b.w[0] << 16
                                        : w < WORDS / 2 ? a.w[w] : b.w[w - WORDS / 2];
#else
                if (channel_of(lane, k * VEC) < DIM)
                    p = load_pack(row + channel_of(lane, k * VEC) * ELEMENT_BYTES);
#endif
            }
            tile.x[k][i] = p;
        }
    }
}

// NaN, infinity, or beyond the largest float16?
DEVICE bool is_bad(const Tile& tile) {
    u32 most = 0;
#pragma unroll
    for (int k = 0; k < COLUMNS; ++k)
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
            for (int w = 0; w < WORDS; ++w) most = larger(most, tile.x[k][i].w[w] & ~SIGN_WORD);
    return !(element(PER_WORD == 1 ? most : most & 0xFFFF) <= MAX_ABS &&
             element(PER_WORD == 1 ? most : most >> 16) <= MAX_ABS);
}

// The values of one token of a thread, rotated back (or forth) by the angle of its place.
template <bool BACK> DEVICE void rotate(float (&x)[MINE], const float* cos, const float* sin, int lane) {
#if PAIRS && PAIRED
#pragma unroll
    for (int e = 0; e < VEC / 2; ++e) {
        const int at = lane * (VEC / 2) + e;
        const float c = __ldg(cos + at), s = BACK ? __ldg(sin + at) : -__ldg(sin + at);
        const float a = x[e], b = x[e + VEC / 2];
        x[e] = a * c + b * s;
        x[e + VEC / 2] = b * c - a * s;
    }
#endif
}

// One token of a tile as it is quantized: keys rotated back, else unchanged. Without PAIRED a
// channel's partner is another thread's; it comes through shared memory `row` [DIM] of this row.
DEVICE void token_of(float (&x)[MINE], const Tile& tile, int i, bool keys, const float* cos,
                     const float* sin, int lane, float* row) {
#pragma unroll
    for (int e = 0; e < MINE; ++e) x[e] = tile_get(tile, i, e);
    if (!keys || !PAIRS) return;
#if PAIRED
    rotate<true>(x, cos, sin, lane);
#else
    __syncwarp();
#pragma unroll
    for (int e = 0; e < MINE; ++e)
        if (channel_of(lane, e) < DIM) row[channel_of(lane, e)] = x[e];
    __syncwarp();
#pragma unroll
    for (int e = 0; e < MINE; ++e) {
        const int c = channel_of(lane, e);
        if (c < PAIRS) x[e] = x[e] * cos[c] + row[c + PAIRS] * sin[c];
        else if (c < 2 * PAIRS) x[e] = x[e] * cos[c - PAIRS] - row[c - PAIRS] * sin[c - PAIRS];
    }
#endif
}

// -- encode ----------------------------------------------------------------------------------------

struct Shared {
    u64 best;
    union {
        struct { float low[WARPS_HERE][DIM], high[WARPS_HERE][DIM]; } bounds;
        u64 words[PAGE / 8][DIM];  // a channel's codes of 8 tokens
    };
    float low[DIM], factor[DIM], half_levels[DIM];  // decoding: low, half the range, 2^-bits
    float by[ROWS * 8];                             // what a token's values are multiplied with
    float squares[PAGE];
    float rows[PAIRED || !PAIRS ? 1 : ROWS][DIM];
    u32 place[DIM];  // column of a channel among this head's columns of its width's plane
    u32 count[MAX_WIDTH], before[MAX_WIDTH], all[MAX_WIDTH], plane[MAX_WIDTH];
    int star, exponent, ticket;
    u32 peak;
    u16 order[DIM], ranges[DIM], row_code[DIM];
    u8 width[DIM], steps[PAGE];
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "SHARED_BYTES");

// Sums of squares of a tile's tokens, by halves: element i takes element i + half.
DEVICE void sum_squares(const Tile& tile, Shared& s, int row, int lane) {
    constexpr int W = PAIRED ? VEC / 2 : VEC;
    float sum[8][W];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float part[MINE];
#pragma unroll
        for (int e = 0; e < MINE; ++e) {
            const float x = tile_get(tile, i, e);
            part[e] = x * x;
        }
#pragma unroll
        for (int n = MINE / 2; n >= W; n /= 2)
#pragma unroll
            for (int e = 0; e < n; ++e) part[e] = part[e] + part[e + n];
#pragma unroll
        for (int e = 0; e < W; ++e) sum[i][e] = part[e];
    }
    // Across lanes; each step leaves half of the tokens to the partner.
    int first = 0;
#pragma unroll
    for (int level = 0; level < 5; ++level) {
        const int stride = LANES >> (level + 1);
        if (stride == 0) break;
        const int half = 4 >> level;
        const bool upper = lane & stride;
        if (half > 0) {
#pragma unroll
            for (int i = 0; i < half; ++i)
#pragma unroll
                for (int e = 0; e < W; ++e) {
                    const float send = upper ? sum[i][e] : sum[i + half][e];
                    const float keep = upper ? sum[i + half][e] : sum[i][e];
                    sum[i][e] = keep + __shfl_xor_sync(FULL, send, stride);
                }
            if (upper) first += half;
        } else {
#pragma unroll
            for (int e = 0; e < W; ++e) sum[0][e] += __shfl_xor_sync(FULL, sum[0][e], stride);
        }
    }
    constexpr int HELD = LANES >= 8 ? 1 : 8 / LANES;
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
#pragma unroll
        for (int n = W / 2; n; n /= 2)
#pragma unroll
            for (int e = 0; e < n; ++e) sum[i][e] = sum[i][e] + sum[i][e + n];
        if (row * 8 + first + i < PAGE) s.squares[row * 8 + first + i] = sum[i][0];
    }
}

// A head's widths, from the levels of its channels, by one warp: the threshold of the last bit by
// bisection; of several bits at it the lowest channels have theirs.
DEVICE void set_widths(Shared& s, const u16* ranges, const signed char* priority, int total) {
    constexpr int EACH = (DIM + 31) / 32;
    const int lane = threadIdx.x % 32;
    int level[EACH], low = 1 << 30, high = -(1 << 30);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const int c = i * 32 + lane;
        level[i] = c < DIM ? ranges[c] + 128 * (priority ? priority[c] : 0) : -(1 << 24);
        if (c < DIM) low = min(low, level[i]), high = max(high, level[i]);
    }
    low = __reduce_min_sync(FULL, low) - 1024 * MAX_WIDTH;
    high = __reduce_max_sync(FULL, high);
    while (low < high) {
        const int middle = (low + high + 1) >> 1;
        int count = 0;
#pragma unroll
        for (int i = 0; i < EACH; ++i) count += min(max((level[i] - middle) >> 10, 0), MAX_WIDTH - 1);
        if (__reduce_add_sync(FULL, count) >= total - DIM) low = middle;
        else high = middle - 1;
    }
    int width[EACH], excess = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        const bool mine = i * 32 + lane < DIM;
        width[i] = mine ? 1 + min(max((level[i] - low) >> 10, 0), MAX_WIDTH - 1) : 0;
        excess += width[i];
    }
    excess = __reduce_add_sync(FULL, excess) - total;
#pragma unroll
    for (int i = EACH - 1; i >= 0; --i) {
        const int above = level[i] - low;
        const bool last = width[i] && (above & 1023) == 0 && above >= 1024 && above <= 1024 * (MAX_WIDTH - 1);
        const u32 lasts = __ballot_sync(FULL, last);
        if (last && __popc(lasts >> lane >> 1) < excess) --width[i];
        excess -= __popc(lasts);
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i)
        if (i * 32 + lane < DIM) s.width[i * 32 + lane] = width[i];
    __syncwarp();
}

// Where a head's channels lie in its part of the planes, from s.width, by one warp.
DEVICE void sort_by_width(Shared& s) {
    const int lane = threadIdx.x % 32;
    if (lane < MAX_WIDTH) s.count[lane] = 0;
    __syncwarp();
    for (int i = 0; i < DIM; i += 32) {
        const int c = i + lane, width = c < DIM ? s.width[c] : 0;
        const u32 same = __match_any_sync(FULL, width);
        const u32 ahead = __popc(same & ((1u << lane) - 1));
        u32 start = 0;
        if (width) start = s.count[width - 1];
        __syncwarp();
        if (width) {
            s.place[c] = start + ahead;
            if (ahead == 0) s.count[width - 1] = start + __popc(same);
        }
        __syncwarp();
    }
    for (int c = lane; c < DIM; c += 32) {
        u32 at = s.place[c];
        for (int w = MAX_WIDTH; w > s.width[c]; --w) at += s.count[w - 1];
        s.order[at] = c;
    }
    __syncwarp();
}

// Four counts as a word that is never zero.
DEVICE u64 counts_word(const u32* count) {
    return 1ull << 63 | (u64)count[3] << 45 | (u64)count[2] << 30 | (u64)count[1] << 15 | count[0];
}
DEVICE u32 count_in(u64 word, int i) { return (u32)(word >> (15 * i)) & 0x7FFF; }

// From the counts of all heads: where each width's plane begins, and this head's columns in it.
DEVICE void place_planes(Shared& s, bool values, int length) {
    if (threadIdx.x < MAX_WIDTH) {
        const int width = threadIdx.x + 1, groups = (length + 7) / 8;
        u32 at = at_planes(values, length);
        for (int w = MAX_WIDTH; w > width; --w) at += groups * w * s.all[w - 1];
        s.plane[width - 1] = at + s.before[width - 1];
    }
    __syncthreads();
}

DEVICE float companded(float u) {  // twice the curve's value
#if CURVED
    const float z = u + u - 1.0f;
    const float m = (__fsqrt_rn(ONE_LESS_SQUARED + FOUR * fabsf(z)) - ONE_LESS) * INVERSE;
    return copysignf(m, z) + 1.0f;
#else
    return u + u;
#endif
}

// A tile's codes: the anchor's into s.words, the residual's to where they belong.
#define RUN_BYTES (PAIRED ? VEC / 2 : VEC)  // channels of a thread that lie side by side
#define GRAIN (RUN_BYTES < 4 ? RUN_BYTES : 4)
DEVICE void quantize(const Tile& tile, Shared& s, bool keys, const float* cos, const float* sin,
                     int row, int lane, int length, u8* correction) {
    u32 lower[MINE / GRAIN][8];
    u64 word[MINE];
#pragma unroll
    for (int e = 0; e < MINE; ++e) word[e] = 0;
#pragma unroll
    for (int i = 7; i >= 0; --i) {
        const int t = row * 8 + i;
        float x[MINE];
        token_of(x, tile, i, keys, cos + t * PAIRS, sin + t * PAIRS, lane, s.rows[PAIRED || !PAIRS ? 0 : row]);
        u32 q[MINE];
#pragma unroll
        for (int e = 0; e < MINE; ++e) {
            const int c = channel_of(lane, e) < DIM ? channel_of(lane, e) : 0;
            const float half = s.half_levels[c];
            const float u = (x[e] * s.by[t] - s.low[c]) * s.factor[c];
            const float place = companded(fminf(fmaxf(u, 0.0f), 1.0f)) * half;
            const float whole = fminf(fmaxf(place, 0.0f), half + half - 1.0f);
            q[e] = __float_as_uint(__fadd_rd(whole, 8388608.0f)) & 0x7FFFFF;
            if (t >= length) q[e] = 0;
            else if (t == s.star) q[e] = s.row_code[c] & (STEP - 1);
            word[e] = word[e] << s.width[c] | q[e] >> RESIDUAL_BITS;
        }
#pragma unroll
        for (int g = 0; g < MINE / GRAIN; ++g) {
            u32 joined = q[g * GRAIN] & 255;
            if (GRAIN == 2) joined = __byte_perm(q[g * GRAIN], q[g * GRAIN + 1], 0x7740) & 0xFFFF;
            if (GRAIN == 4) joined = join_bytes(q[g * GRAIN], q[g * GRAIN + 1], q[g * GRAIN + 2], q[g * GRAIN + 3]);
            lower[g][i] = joined & in_each_byte(STEP - 1);
        }
    }
    const int rows = (length * RESIDUAL_BITS + 7) / 8;
#pragma unroll
    for (int e = 0; e < MINE; ++e)
        if (channel_of(lane, e) < DIM && row < PAGE / 8) s.words[row][channel_of(lane, e)] = word[e];
#if RESIDUAL_BITS
#pragma unroll
    for (int g = 0; g < MINE / GRAIN; ++g) {
        u32 out[RESIDUAL_BITS];
        pack_rows<RESIDUAL_BITS>(lower[g], out);
        if (channel_of(lane, g * GRAIN) >= DIM) continue;
#pragma unroll
        for (int r = 0; r < RESIDUAL_BITS; ++r)
            if (row * RESIDUAL_BITS + r < rows)
                store_as<GRAIN>(correction + (i64)(row * RESIDUAL_BITS + r) * CHANNELS +
                                    channel_of(lane, g * GRAIN), out[r]);
    }
#endif
}

// Two nibbles a byte: this head's share of the bytes, from one byte a value.
DEVICE void put_nibbles(u8* to, const u8* from, int count, int head) {
    const int bytes = (count + 1) / 2;
    const int first = (i64)bytes * head / HEADS, end = (i64)bytes * (head + 1) / HEADS;
    for (int i = first + threadIdx.x; i < end; i += THREADS)
        to[i] = __ldcg(from + 2 * i) | (2 * i + 1 < count ? __ldcg(from + 2 * i + 1) << 4 : 0);
}

// `exchange`: a counter of work taken, then two words for each layer, page, kv and head; zero at
// first. `published`: widths less one [layer, page, kv, channel] and steps [layer, page, token, head].
extern "C" __global__ void __launch_bounds__(THREADS, COLUMNS == 1 && THREADS <= 512 ? 1024 / THREADS : 1)
encode(CACHE_ARGS, PLAN_ARGS, const float* __restrict__ all_cos, const float* __restrict__ all_sin,
       const u8* __restrict__ table, const signed char* __restrict__ priority, u64* exchange,
       u8* published, Scratch* scratch, u8* __restrict__ anchor, u8* __restrict__ residual)
{
    const Cache cache = CACHE;
    const Plan plan = PLAN;
    extern __shared__ uint4 shared[];
    Shared& s = *reinterpret_cast<Shared*>(shared);
    const int lane = threadIdx.x % LANES, row = threadIdx.x / LANES, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) s.ticket = atomicAdd(reinterpret_cast<u32*>(exchange), 1);
    __syncthreads();
    const int head = s.ticket % HEADS, place = s.ticket / HEADS, page = place % pages, layer = place / pages;
    const int length = plan.length(page), mine = length - row * 8;
    const i64 first = (i64)page * PAGE + row * 8;
    const float* cos = all_cos + (i64)table[layer] * 256 * PAIRS;
    const float* sin = all_sin + (i64)table[layer] * 256 * PAIRS;
    u8* steps = published + (i64)layers * pages * KV * CHANNELS + (i64)place * PAGE * HEADS;

#pragma unroll 1
    for (int part = KV - 1; part >= 0; --part) {
        const bool values = KV == 2 && part == 1;
        const int unit = layer * KV + part;
        u8* section = anchor + plan.anchor(layer, part, page);
        u8* widths = published + ((i64)place * KV + part) * CHANNELS;
        Tile tile;
        load_tile(tile, cache, unit, head, first, mine, lane, &scratch->bad);
        if (is_bad(tile)) scratch->bad = 1;
        if (part == KV - 1) {  // the row: the token with the smallest values, the first among equals
            sum_squares(tile, s, row, lane);
            __syncthreads();
            if (warp == 0) {
                u64 best = ~0ull;
                for (int t = threadIdx.x; t < length; t += 32) {
                    const u64 rank = (u64)__float_as_uint(s.squares[t]) << 32 | t;
                    best = rank < best ? rank : best;
                }
                for (int step = 16; step; step /= 2) {
                    const u64 other = __shfl_xor_sync(FULL, best, step);
                    best = other < best ? other : best;
                }
                if (threadIdx.x == 0) s.star = (u32)best;
            }
        }
        if (threadIdx.x == 0) s.exponent = -1000, s.peak = 0;
        if (threadIdx.x < MAX_WIDTH) s.all[threadIdx.x] = s.before[threadIdx.x] = 0;
        __syncthreads();
        const int star = s.star;
        if (values) {
            for (int t = threadIdx.x; t < length; t += THREADS)
                if (t != star || length == 1)
                    atomicMax(&s.exponent, quarter_exponent(fmaxf(divide(s.squares[t], (float)DIM), MIN_POWER)));
            __syncthreads();
            for (int t = threadIdx.x; t < length; t += THREADS) {
                const int e = quarter_exponent(fmaxf(divide(s.squares[t], (float)DIM), MIN_POWER));
                const int below = t == star ? 0 : min(s.exponent - e, SCALE_STEPS), n = s.exponent - below;
                s.by[t] = inverse_quarters[n & 3] * power_of_two(-(n >> 2));
                steps[t * HEADS + head] = below;
            }
        } else {
            for (int t = threadIdx.x; t < PAGE; t += THREADS) s.by[t] = 1.0f;
        }
        __syncthreads();

        // Bounds of every channel.
        float low[MINE], high[MINE];
#pragma unroll
        for (int e = 0; e < MINE; ++e) {
            low[e] = __uint_as_float(0x7F800000u);
            high[e] = -low[e];
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int t = row * 8 + i;
            float x[MINE];
            token_of(x, tile, i, !values, cos + t * PAIRS, sin + t * PAIRS, lane, s.rows[PAIRED || !PAIRS ? 0 : row]);
            if (t < length && t != star) {
#pragma unroll
                for (int e = 0; e < MINE; ++e) {
                    const float y = x[e] * s.by[t];
                    low[e] = fminf(low[e], y);
                    high[e] = fmaxf(high[e], y);
                }
            }
        }
#pragma unroll
        for (int e = 0; e < MINE; ++e) {
#pragma unroll
            for (int step = LANES; step < 32; step *= 2) {
                low[e] = fminf(low[e], __shfl_xor_sync(FULL, low[e], step));
                high[e] = fmaxf(high[e], __shfl_xor_sync(FULL, high[e], step));
            }
            if (threadIdx.x % 32 < LANES && channel_of(lane, e) < DIM) {
                s.bounds.low[warp][channel_of(lane, e)] = low[e];
                s.bounds.high[warp][channel_of(lane, e)] = high[e];
            }
        }
        __syncthreads();
        for (int c = threadIdx.x; c < DIM; c += THREADS) {
            float bottom = s.bounds.low[0][c], top = s.bounds.high[0][c];
            for (int w = 1; w < WARPS_HERE; ++w) {
                bottom = fminf(bottom, s.bounds.low[w][c]);
                top = fmaxf(top, s.bounds.high[w][c]);
            }
            if (length == 1) bottom = top = 0;
            s.bounds.low[0][c] = bottom;
            s.bounds.high[0][c] = top;
            if (!values) atomicMax(&s.peak, __float_as_uint(fmaxf(fabsf(bottom), fabsf(top))));
        }
        __syncthreads();
        if (!values && threadIdx.x == 0)
            s.exponent = s.peak ? max((int)(s.peak >> 23) - 126, LEAST_EXPONENT) : LEAST_EXPONENT;
        __syncthreads();
        const float scale = values ? 1.0f : power_of_two(-s.exponent);
        if (!values)
            for (int t = threadIdx.x; t < PAGE; t += THREADS) s.by[t] = scale;
        for (int c = threadIdx.x; c < DIM; c += THREADS) {
            const int at = head * DIM + c;
            const u16 low16 = half_down(s.bounds.low[0][c] * scale);
            const float bottom = half_to_float(low16);
            const float span = fmaxf(-half_to_float(half_down(bottom - s.bounds.high[0][c] * scale)), MIN_RANGE);
            s.ranges[c] = half_down(span);  // exact
            reinterpret_cast<u16*>(section)[at] = low16;
            reinterpret_cast<u16*>(section + AT_RANGES)[at] = s.ranges[c];
            s.low[c] = bottom;
            s.factor[c] = divide(1.0f, span);
        }
        __syncthreads();
        if (warp == 0) {
            set_widths(s, s.ranges, values ? nullptr : priority + ((i64)layer * HEADS + head) * DIM,
                       plan.total[part]);
            sort_by_width(s);
        }
        if (warp == (WARPS_HERE > 1 ? 1 : 0)) {  // the row itself
            const u8* from = cache.unit(unit) + (i64)head * cache.d * ELEMENT_BYTES;
            const i64 at = cache.token((i64)page * PAGE + star);
            float lowest = __uint_as_float(0x7F800000u), highest = -lowest;
            for (int c = threadIdx.x % 32; at >= 0 && c < DIM; c += 32) {
                const float x = element(reinterpret_cast<const Bits<ELEMENT_BYTES>::T*>(from)[at + c]);
                lowest = fminf(lowest, x);
                highest = fmaxf(highest, x);
            }
            for (int step = 16; step; step /= 2) {
                lowest = fminf(lowest, __shfl_xor_sync(FULL, lowest, step));
                highest = fmaxf(highest, __shfl_xor_sync(FULL, highest, step));
            }
            const u16 low16 = bf16_down(lowest);
            const float bottom = bf16_to_float(low16);
            const float span = fmaxf(-bf16_to_float(bf16_down(bottom - highest)), MIN_ROW_RANGE);
            const float most = (float)((256 << RESIDUAL_BITS) - 1);
            for (int c = threadIdx.x % 32; at >= 0 && c < DIM; c += 32) {
                const float x = element(reinterpret_cast<const Bits<ELEMENT_BYTES>::T*>(from)[at + c]);
                const float q = floorf(divide(x - bottom, span) * (most + 1.0f));
                s.row_code[c] = (u16)fminf(fmaxf(q, 0.0f), most);
                section[AT_ROWS + head * DIM + c] = s.row_code[c] >> RESIDUAL_BITS;
            }
            if (threadIdx.x % 32 == 0) {
                section[AT_STARS + head] = star;
                section[AT_EXPONENTS + head] = s.exponent;
                put_u16(section + AT_ROW_LOW + 2 * head, low16);
                put_u16(section + AT_ROW_RANGE + 2 * head, __float_as_uint(span) >> 16);
            }
        }
        __syncthreads();

        // Widths to the other heads, and theirs.
        for (int c = threadIdx.x; c < DIM; c += THREADS) {
            widths[head * DIM + c] = s.width[c] - 1;
            s.half_levels[c] = power_of_two(s.width[c] + RESIDUAL_BITS - 1);
        }
        __threadfence();
        __syncthreads();
        volatile u64* counts = exchange + 1 + 2 * HEADS * ((i64)place * KV + part);
        if (threadIdx.x < 2) counts[2 * head + threadIdx.x] = counts_word(s.count + 4 * threadIdx.x);
        for (int h = threadIdx.x; h < 2 * HEADS; h += THREADS) {
            u64 found;
            while (!(found = counts[h])) __nanosleep(20);
            for (int i = 0; i < 4; ++i) {
                const u32 n = count_in(found, i);
                if (n) atomicAdd(&s.all[h % 2 * 4 + i], n);
                if (n && h / 2 < head) atomicAdd(&s.before[h % 2 * 4 + i], n);
            }
        }
        __threadfence();
        __syncthreads();
        place_planes(s, values, length);
        put_nibbles(section + AT_WIDTHS, widths, CHANNELS, head);
        if (values) put_nibbles(section + AT_STEPS, steps, length * HEADS, head);

        u8* correction = residual + plan.residual(layer, part, page);
        quantize(tile, s, !values, cos, sin, row, lane, length, correction + head * DIM);
        __syncthreads();
        const int groups = (length + 7) / 8;
        for (int i = threadIdx.x; i < DIM * groups; i += THREADS) {
            const int c = s.order[i % DIM], group = i / DIM, width = s.width[c];
            const u32 columns = s.all[width - 1];
            u64 word = s.words[group][c];
            u8* to = section + s.plane[width - 1] + s.place[c] + (u32)(group * width) * columns;
            for (int j = 0; j < width; ++j) {
                *to = (u8)word;
                to += columns;
                word >>= 8;
            }
        }
        if (head == 0 && threadIdx.x == 0) {  // zeros to a multiple of 8
            int end = page == pages - 1 ? plan.anchor_last[part] : plan.anchor_page[part];
            for (int at = at_planes(values, length) + groups * HEADS * plan.total[part]; at < end; ++at) section[at] = 0;
            for (int at = CHANNELS * ((length * RESIDUAL_BITS + 7) / 8); at % 8; ++at) correction[at] = 0;
        }
        __syncthreads();
    }
}

// -- decode ----------------------------------------------------------------------------------------

template <bool FINE> DEVICE void decode(
    const Cache& cache, const Plan& plan, const float* all_cos, const float* all_sin,
    const u8* __restrict__ table, const u8* __restrict__ anchor, const u8* __restrict__ residual,
    const u32* gate)
{
    if (gate && *gate) return;
    extern __shared__ uint4 shared[];
    Shared& s = *reinterpret_cast<Shared*>(shared);
    constexpr int R = FINE ? RESIDUAL_BITS : 0;
    const int lane = threadIdx.x % LANES, row = threadIdx.x / LANES, warp = threadIdx.x / 32;
    const int head = blockIdx.x % HEADS, page = blockIdx.x / HEADS % plan.pages;
    const int unit = blockIdx.x / HEADS / plan.pages, layer = unit / KV, part = unit % KV;
    const bool values = KV == 2 && part == 1;
    const int length = plan.length(page), groups = (length + 7) / 8;
    const u8* section = anchor + plan.anchor(layer, part, page);
    const u8* correction = residual + plan.residual(layer, part, page) + head * DIM;

    u32 rest[MINE / GRAIN][R ? R : 1] = {};
    const int rows = (length * R + 7) / 8;
#pragma unroll
    for (int g = 0; g < (R ? MINE / GRAIN : 0); ++g)
#pragma unroll
        for (int r = 0; r < R; ++r)
            if (row * R + r < rows && channel_of(lane, g * GRAIN) < DIM)
                rest[g][r] = load_as<GRAIN, u32>(correction + (i64)(row * R + r) * CHANNELS + channel_of(lane, g * GRAIN));

    if (threadIdx.x < MAX_WIDTH) s.all[threadIdx.x] = s.before[threadIdx.x] = 0;
    __syncthreads();
    for (int i = warp * 32; i < CHANNELS; i += THREADS) {
        const int c = i + threadIdx.x % 32;
        int width = 0, of = 0;
        if (c < CHANNELS) {
            width = (section[AT_WIDTHS + c / 2] >> (4 * (c & 1)) & 7) + 1;
            of = c / DIM;
            if (of == head) s.width[c - head * DIM] = width;
        }
        const u32 same = __match_any_sync(FULL, width * 2 + (of < head));
        if (width && (same & ((1u << (threadIdx.x % 32)) - 1)) == 0) {
            atomicAdd(&s.all[width - 1], __popc(same));
            if (of < head) atomicAdd(&s.before[width - 1], __popc(same));
        }
    }
    __syncthreads();
    if (warp == 0) sort_by_width(s);
    const int exponent = (signed char)section[AT_EXPONENTS + head];
    for (int t = threadIdx.x; t < length; t += THREADS) {
        const int i = t * HEADS + head;
        const int n = exponent - (values ? section[AT_STEPS + i / 2] >> (4 * (i & 1)) & 15 : 0);
        s.by[t] = values ? quarters[n & 3] * power_of_two(n >> 2) : power_of_two(exponent);
    }
    for (int c = threadIdx.x; c < DIM; c += THREADS) {
        s.low[c] = half_to_float(reinterpret_cast<const u16*>(section)[head * DIM + c]);
        s.factor[c] = 0.5f * half_to_float(reinterpret_cast<const u16*>(section + AT_RANGES)[head * DIM + c]);
        s.half_levels[c] = power_of_two(-(s.width[c] + R));
    }
    __syncthreads();
    place_planes(s, values, length);
#pragma unroll 2
    for (int i = threadIdx.x; i < DIM * groups; i += THREADS) {
        const int c = s.order[i % DIM], group = i / DIM, width = s.width[c];
        const u32 columns = s.all[width - 1];
        const u8* from = section + s.plane[width - 1] + s.place[c] + (u32)(group * width) * columns;
        u32 low = 0, high = 0;
#pragma unroll
        for (int j = 0; j < MAX_WIDTH; ++j)
            if (j < width) (j < 4 ? low : high) |= (u32)__ldg(from + j * columns) << (8 * (j & 3));
        s.words[group][c] = (u64)high << 32 | low;
    }
    __syncthreads();
    const int mine = length - row * 8;
#if PAIRED || !PAIRS
    if (mine <= 0) return;
#endif
    const float* cos = all_cos + (i64)table[layer] * 256 * PAIRS;
    const float* sin = all_sin + (i64)table[layer] * 256 * PAIRS;
    const int star = section[AT_STARS + head];
    u8* to = cache.unit(unit) + (i64)head * cache.d * ELEMENT_BYTES;
    u64 word[MINE];
#pragma unroll
    for (int e = 0; e < MINE; ++e) {
        const int c = channel_of(lane, e);
        word[e] = c < DIM && mine > 0 ? s.words[row][c] : 0;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int t = row * 8 + i;
        float x[MINE];
        u32 extra[MINE / GRAIN];
#pragma unroll
        for (int g = 0; g < MINE / GRAIN; ++g) extra[g] = unpack_row<R>(rest[g], i);
#pragma unroll
        for (int e = 0; e < MINE; ++e) {
            const int c = channel_of(lane, e) < DIM ? channel_of(lane, e) : 0, width = s.width[c];
            u32 q = (u32)word[e] & ((1u << width) - 1);
            word[e] >>= width;
            if (R) q = q << R | (extra[e / GRAIN] >> (8 * (e % GRAIN)) & 255);
            // 2(q + 1/2)·2^-bits - 1, which is exact; half of s.factor makes up for the missing half.
            const float step = s.half_levels[c];
            const float z = __fmaf_rn(__uint_as_float(q | 0x4B000000u) - 8388608.0f, step + step, step - 1.0f);
#if CURVED
            const float w = z * (ONE_LESS + BETA * fabsf(z)) + 1.0f;
#else
            const float w = z + 1.0f;
#endif
            x[e] = (s.low[c] + w * s.factor[c]) * (t < length ? s.by[t] : 0.0f);
        }
        if (!values && PAIRS) {
#if PAIRED
            rotate<false>(x, cos + t * PAIRS, sin + t * PAIRS, lane);
#elif PAIRS
            float* shared_row = s.rows[row];
            __syncwarp();
#pragma unroll
            for (int e = 0; e < MINE; ++e)
                if (channel_of(lane, e) < DIM) shared_row[channel_of(lane, e)] = x[e];
            __syncwarp();
#pragma unroll
            for (int e = 0; e < MINE; ++e) {
                const int c = channel_of(lane, e), at = (t < PAGE ? t : 0) * PAIRS + c;
                if (c < PAIRS) x[e] = x[e] * cos[at] - shared_row[c + PAIRS] * sin[at];
                else if (c < 2 * PAIRS)
                    x[e] = x[e] * cos[at - PAIRS] + shared_row[c - PAIRS] * sin[at - PAIRS];
            }
#endif
        }
        if (i >= mine) continue;
        if (t == star) {
            const float low = bf16_to_float(get_u16(section + AT_ROW_LOW + 2 * head));
            const float range = bf16_to_float(get_u16(section + AT_ROW_RANGE + 2 * head));
#pragma unroll
            for (int e = 0; e < MINE; ++e) {
                const int c = channel_of(lane, e) < DIM ? channel_of(lane, e) : 0;
                u32 q = section[AT_ROWS + head * DIM + c];
                if (FINE) q = q << RESIDUAL_BITS | (R ? extra[e / GRAIN] >> (8 * (e % GRAIN)) & 255 : 0);
                x[e] = low + ((float)q + 0.5f) * power_of_two(-(8 + (FINE ? RESIDUAL_BITS : 0))) * range;
            }
        }
        const i64 at = cache.token((i64)page * PAGE + t);
        if (at < 0) continue;
#if DTYPE == 1
#pragma unroll
        for (int e = 0; e < MINE; ++e) x[e] = fminf(fmaxf(x[e], -MAX_ABS), MAX_ABS);
#endif
#pragma unroll
        for (int k = 0; k < COLUMNS; ++k) {
            float part_of[VEC];
#pragma unroll
            for (int v = 0; v < VEC; ++v) part_of[v] = x[k * VEC + v];
            const Pack out = to_pack(part_of);
#if PAIRED
            constexpr int HALF = VEC / 2 * ELEMENT_BYTES;
            struct Half { u32 w[(HALF + 3) / 4]; };
            Half a, b;
#pragma unroll
            for (int w = 0; w < (HALF + 3) / 4; ++w) {
                a.w[w] = out.w[w];
                b.w[w] = WORDS == 1 ? out.w[0] >> 16 : out.w[w + WORDS / 2];
            }
            store_as<HALF>(to + (at + channel_of(lane, 0)) * ELEMENT_BYTES, a);
            store_as<HALF>(to + (at + channel_of(lane, VEC / 2)) * ELEMENT_BYTES, b);
#else
            if (channel_of(lane, k * VEC) < DIM)
                store_pack(to + (at + channel_of(lane, k * VEC)) * ELEMENT_BYTES, out);
#endif
        }
    }
}

#define DECODE_ARGS CACHE_ARGS, PLAN_ARGS, const float* __restrict__ cos, const float* __restrict__ sin, \
    const u8* __restrict__ table, const u8* __restrict__ anchor, const u8* __restrict__ residual, const u32* gate
#define DECODE_BOUNDS __launch_bounds__(THREADS, COLUMNS == 1 && THREADS <= 512 ? 1024 / THREADS : 1)

extern "C" __global__ void DECODE_BOUNDS decode_anchor(DECODE_ARGS) {
    const Cache cache = CACHE;
    const Plan plan = PLAN;
    decode<false>(cache, plan, cos, sin, table, anchor, residual, gate);
}
extern "C" __global__ void DECODE_BOUNDS decode_both(DECODE_ARGS) {
    const Cache cache = CACHE;
    const Plan plan = PLAN;
    decode<true>(cache, plan, cos, sin, table, anchor, residual, gate);
}

// -- verify ----------------------------------------------------------------------------------------

// Checks digests and that scales, widths and rows are such as an encoder writes: see digest.cu.
extern "C" __global__ void __launch_bounds__(32 * (WARPS + 1)) verify(
    PLAN_ARGS, const u8* anchor, i64 anchor_bytes, u64 anchor_digest, const u8* residual,
    i64 residual_bytes, u64 residual_digest, u64* digests, Scratch* scratch, u32* gate, u64* record)
{
    const Plan plan = PLAN;
    const i64 blocks = blocks_of(anchor_bytes) + blocks_of(residual_bytes);
    const i64 number = (blockIdx.x - blocks) * (WARPS + 1) + threadIdx.x / 32;
    if (blockIdx.x >= blocks && number < (i64)layers * KV * pages) {
        const int unit = number / pages, page = number % pages, part = unit % KV;
        const u8* section = anchor + plan.anchor(unit / KV, part, page);
        bool wrong = false;
        for (int h = 0; h < HEADS; ++h) {
            int total = 0;
            for (int c = h * DIM + threadIdx.x % 32; c < (h + 1) * DIM; c += 32) {
                const float low = half_to_float(reinterpret_cast<const u16*>(section)[c]);
                const float range = half_to_float(reinterpret_cast<const u16*>(section + AT_RANGES)[c]);
                const int nibble = section[AT_WIDTHS + c / 2] >> (4 * (c & 1)) & 15;
                wrong |= !(-MAX_ABS <= low && low <= MAX_ABS && MIN_RANGE <= range && range <= MAX_ABS);
                wrong |= nibble >= MAX_WIDTH;
                total += 1 + nibble;
            }
            wrong |= (int)__reduce_add_sync(FULL, total) != plan.total[part];
            const int exponent = (signed char)section[AT_EXPONENTS + h];
            const float low = bf16_to_float(get_u16(section + AT_ROW_LOW + 2 * h));
            const float range = bf16_to_float(get_u16(section + AT_ROW_RANGE + 2 * h));
            wrong |= section[AT_STARS + h] >= plan.length(page) || exponent < -120 || exponent > 120;
            wrong |= !(-2 * MAX_ABS <= low && low <= MAX_ABS && MIN_ROW_RANGE <= range && range <= 4 * MAX_ABS);
        }
        if (wrong) atomicOr(&scratch->bad, WRONG_SCALES);
    }
    verdict(anchor, anchor_bytes, anchor_digest, residual, residual_bytes, residual_digest, digests,
            scratch, gate, record);
}
