// What the kernels of the profile `adaptive` share. Compiled with
//   KV 1 | 2;  RESIDUAL_BITS;  PAGE tokens;  PAIRS of channels that are rotated;
//   CURVED 0 | 1;  BETA, ONE_LESS, ONE_LESS_SQUARED, FOUR, INVERSE: the curve's constants;
//   THREADS of a block, LANES of a row of threads, COLUMNS vectors of a thread;  PAIRED 0 | 1.
//
// A block is one head's page. A row of LANES threads takes 8 tokens at a time, every thread COLUMNS
// vectors of VEC channels of them; 8 tokens of b bits are b bytes, so that no byte has two writers.
// PAIRED: the upper half of a thread's channels are the rotary partners of the lower half, which is
// also what the sum of squares adds first.
#define ROWS (THREADS / LANES)
#define MINE (COLUMNS * VEC)  // channels of a thread
#define WARPS_HERE (THREADS / 32)
#define FULL 0xFFFFFFFFu
#define MIN_RANGE 6.103515625e-05f        // 2^-14
#define MIN_ROW_RANGE 7.888609052210118e-31f  // 2^-100
#define MIN_POWER 8.673617379884035e-19f  // 2^-60
#define LEAST_EXPONENT (-100)
#define SCALE_STEPS 15
#define MAX_WIDTH 8
#define BESIDE (PAIRED ? VEC / 2 : VEC)   // channels of a vector that lie side by side
#define APART (MINE / BESIDE)
#define REST_WORDS (RESIDUAL_BITS > 4 ? 2 : 1)

__constant__ float quarters[4] = {1.0f, 1.18920707702636718750f, 1.41421353816986083984f, 1.68179285526275634766f};
__constant__ float inverse_quarters[4] = {1.0f, 0.84089642763137817383f, 0.70710676908493041992f, 0.59460353851318359375f};

struct Plan {
    int pages, last, layers;
    int page_0, page_1, last_0, last_1;  // bytes of a page of keys and of values, of the last ones
    i64 unit_0, unit_1;                  // bytes of all pages of a layer's keys, of its values
    i64 residual_page, residual_unit;
    int total_0, total_1;                // sum of a head's widths

    DEVICE_MEMBER int length(int page) const { return page == pages - 1 ? last : PAGE; }
    DEVICE_MEMBER i64 anchor(int layer, int kv, int page) const {
        return layer * (unit_0 + (KV == 2 ? unit_1 : 0)) + (kv ? unit_0 : 0) +
               (i64)page * (kv ? page_1 : page_0);
    }
    DEVICE_MEMBER int anchor_bytes(int kv, int page) const {
        return page == pages - 1 ? (kv ? last_1 : last_0) : (kv ? page_1 : page_0);
    }
    DEVICE_MEMBER i64 residual(int layer, int kv, int page) const {
        return (layer * KV + kv) * residual_unit + page * residual_page;
    }
    DEVICE_MEMBER int total(int kv) const { return kv ? total_1 : total_0; }
};
#define PLAN_ARGS int pages, int last, int layers, int page_0, int page_1, int last_0, int last_1, \
    i64 unit_0, i64 unit_1, i64 residual_page, i64 residual_unit, int total_0, int total_1
#define PLAN {pages, last, layers, page_0, page_1, last_0, last_1, unit_0, unit_1, residual_page, \
    residual_unit, total_0, total_1}

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
// The lanes of this thread's row, for what they do together.
DEVICE u32 row_lanes() {
    return LANES == 32 ? FULL : ((1u << LANES % 32) - 1) << (threadIdx.x % 32 / LANES * LANES);
}
DEVICE bool has(int lane, int e) { return PAIRED || channel_of(lane, e) < DIM; }

// A token's elements of a thread, from and to its head's channels in memory.
struct Beside { u32 w[(BESIDE * ELEMENT_BYTES + 3) / 4]; };
DEVICE void load_token(float (&x)[MINE], const u8* row, int lane, u32* most) {
#pragma unroll
    for (int g = 0; g < APART; ++g) {
        Beside p = {};
        if (has(lane, g * BESIDE)) p = load_as<BESIDE * ELEMENT_BYTES, Beside>(row + channel_of(lane, g * BESIDE) * ELEMENT_BYTES);
        if (most)
#pragma unroll
            for (int w = 0; w < (int)(sizeof(p) / 4); ++w) *most = larger_size(*most, p.w[w]);
#pragma unroll
        for (int v = 0; v < BESIDE; ++v)
#if DTYPE == 0
            x[g * BESIDE + v] = __uint_as_float(v & 1 ? p.w[v / 2] & 0xFFFF0000u : p.w[v / 2] << 16);
#else
            x[g * BESIDE + v] = element(PER_WORD == 1 ? p.w[v] : (p.w[v / PER_WORD] >> (16 * (v & 1))) & 0xFFFFu);
#endif
    }
}
DEVICE void store_token(bool really, u8* row, const float (&x)[MINE], int lane) {
#pragma unroll
    for (int g = 0; g < APART; ++g) {
        Beside p = {};
#pragma unroll
        for (int w = 0; w < (int)(sizeof(p) / 4); ++w) {
#if DTYPE == 2
            p.w[w] = __float_as_uint(x[g * BESIDE + w]);
#else
            p.w[w] = two_halves(x[g * BESIDE + 2 * w], BESIDE == 1 ? 0.0f : x[g * BESIDE + (BESIDE == 1 ? 0 : 2 * w + 1)]);
#endif
        }
        store_if<BESIDE * ELEMENT_BYTES>(really && has(lane, g * BESIDE), row + channel_of(lane, g * BESIDE) * ELEMENT_BYTES, p);
    }
}

// What a token's pairs are turned by, of a thread's pairs. PAIRED: loaded for several tokens at once,
// so that a thread waits once.
struct Angles {
#if PAIRS && PAIRED
    struct Some { float of[BESIDE]; } cos, sin;
#else
    const float *cos, *sin;  // [PAIRS] of the token
#endif
};
DEVICE Angles angles_of(const float* cos, const float* sin, int t, int lane) {
#if PAIRS && PAIRED
    return {load_as<4 * BESIDE, Angles::Some>(cos + t * PAIRS + lane * BESIDE),
            load_as<4 * BESIDE, Angles::Some>(sin + t * PAIRS + lane * BESIDE)};
#else
    return {cos + t * PAIRS, sin + t * PAIRS};
#endif
}

// Turns a token's pairs by the angles of its place, or back. Without PAIRED a channel's partner is
// another thread's: it comes through `row` [DIM], which this row of threads has.
template <bool BACK> DEVICE void rotate(float (&x)[MINE], const Angles& by, int lane, float* row) {
#if PAIRS && PAIRED
#pragma unroll
    for (int e = 0; e < BESIDE; ++e) {
        const float c = by.cos.of[e], s = BACK ? by.sin.of[e] : -by.sin.of[e];
        const float a = x[e], b = x[e + BESIDE];
        x[e] = a * c + b * s;
        x[e + BESIDE] = b * c - a * s;
    }
#elif PAIRS
    __syncwarp(row_lanes());
#pragma unroll
    for (int e = 0; e < MINE; ++e)
        if (has(lane, e)) row[channel_of(lane, e)] = x[e];
    __syncwarp(row_lanes());
#pragma unroll
    for (int e = 0; e < MINE; ++e) {
        const int c = channel_of(lane, e);
        if (c < PAIRS) {
            const float turned = BACK ? row[c + PAIRS] * by.sin[c] : -(row[c + PAIRS] * by.sin[c]);
            x[e] = x[e] * by.cos[c] + turned;
        } else if (c < 2 * PAIRS) {
            const float turned = row[c - PAIRS] * by.sin[c - PAIRS];
            x[e] = x[e] * by.cos[c - PAIRS] - (BACK ? turned : -turned);
        }
    }
#endif
}

// What both directions know of a head's channels.
struct Channels {
    u32 place[DIM];  // column among this head's columns of its width's plane
    u32 count[MAX_WIDTH], before[MAX_WIDTH], all[MAX_WIDTH], plane[MAX_WIDTH];
    u32 wider[MAX_WIDTH], earlier[(DIM + 31) / 32][MAX_WIDTH];  // channels: of a larger width, of one in earlier warps
    u16 order[DIM];  // channels by falling width
    u8 width[DIM];
};

// Where a head's channels lie in its part of the planes, from s.width. Warp 0 also calls `also()`.
template <typename Also> DEVICE void sort_by_width(Channels& s, Also also) {
    const int lane = threadIdx.x % 32;
    __syncthreads();
    for (int first = threadIdx.x - lane; first < DIM; first += THREADS) {
        const int c = first + lane, width = c < DIM ? s.width[c] : 0;
        u32* count = s.earlier[first / 32];
        if (lane < MAX_WIDTH) count[lane] = 0;
        __syncwarp();
        const u32 same = __match_any_sync(FULL, width);
        const u32 ahead = __popc(same & ((1u << lane) - 1));
        if (width) s.place[c] = ahead;
        if (width && ahead == 0) count[width - 1] = __popc(same);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        u32 sum = 0;
        for (int i = 0; lane < MAX_WIDTH && i < (DIM + 31) / 32; ++i) {
            const u32 here = s.earlier[i][lane];
            s.earlier[i][lane] = sum;
            sum += here;
        }
        u32 from = sum;  // of this width and all larger ones
        for (int step = 1; step < MAX_WIDTH; step *= 2) from += __shfl_down_sync(FULL, from, step);
        if (lane < MAX_WIDTH) s.count[lane] = sum, s.wider[lane] = from - sum;
        also();
    }
    __syncthreads();
    for (int c = threadIdx.x; c < DIM; c += THREADS) {
        const int width = s.width[c];
        const u32 at = s.place[c] += s.earlier[c / 32][width - 1];
        s.order[s.wider[width - 1] + at] = c;
    }
    __syncthreads();
}

// Calls `move(channel, width, byte, offset in the section, groups' step there)` for every byte of 8
// tokens' codes, for the first group. Neighbouring lanes have neighbouring columns of a plane.
template <typename Move> DEVICE void for_columns(const Channels& s, Move move) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int first = warp;  // rows of these 32 channels are the warps' in turn
    for (int k = 0; k < DIM; k += 32) {
        const int c = s.order[k + lane < DIM ? k + lane : DIM - 1], width = k + lane < DIM ? s.width[c] : 0;
        const u32 columns = s.all[s.width[c] - 1], start = s.plane[s.width[c] - 1] + s.place[c];
        const int widest = s.width[s.order[k]];
        int j = first;
        for (; j < widest; j += WARPS_HERE)
            if (j < width) move(c, width, j, start + j * columns, width * columns);
        first = j - widest;
    }
}

// From the counts of all heads: where each width's plane begins, and this head's columns in it; by
// MAX_WIDTH threads.
DEVICE void place_planes(Channels& s, bool values, int length) {
    if (threadIdx.x >= MAX_WIDTH) return;
    const int width = threadIdx.x + 1, groups = (length + 7) / 8;
    u32 at = at_planes(values, length);
    for (int w = MAX_WIDTH; w > width; --w) at += groups * w * s.all[w - 1];
    s.plane[width - 1] = at + s.before[width - 1];
}
