// The decoder of the profile `adaptive`, and what checks its objects.
//
// A head's codes are gathered from the planes into shared memory, then every row of threads rebuilds
// 8 tokens at a time. What a channel needs for that stays in registers over all tokens of the page.
//
// A code under an exponent of 2^23, as bits 1.. of a mantissa, is a float without a conversion; the
// fused multiplications that follow are exact, so that they round as separate operations would.
#define UNIT 0x4B000000u  // 2^23, whose last bit is worth 1

struct Shared {
    u32 words[2][PAGE / 8][DIM];  // the first and the last 32 bits of 8 tokens' codes
    float low[DIM], half_range[DIM];
    __align__(16) float by[PAGE];  // what a token's values are multiplied with
#if BLOCK
    i64 at[PAGE];  // where a token goes, bytes from the unit's start; negative: nowhere
#endif
    float rows[PAIRED || !PAIRS ? 1 : ROWS][PAIRED || !PAIRS ? 1 : DIM];
    u32 counts[WARPS_HERE][2][MAX_WIDTH];
    Channels c;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "SHARED_BYTES");

// Rows of the residual's plane with 8 tokens' codes of a thread's channels, and the codes of each.
struct Rows { struct Row { u32 w[(BESIDE + 3) / 4]; } of[8][APART]; };
template <int R> DEVICE Rows load_rest(const u8* correction, int group, int rows, int lane) {
    Rows found;
#pragma unroll
    for (int r = 0; r < 8; ++r)
#pragma unroll
        for (int g = 0; g < APART; ++g) {
            found.of[r][g] = {};
            if (r < R && group * R + r < rows && has(lane, g * BESIDE))
                found.of[r][g] = load_as<BESIDE, Rows::Row>(correction + (i64)(group * R + r) * CHANNELS + channel_of(lane, g * BESIDE));
        }
    return found;
}
template <int R> DEVICE void take_rest(u32 (&rest)[MINE][2], const Rows& found) {
#pragma unroll
    for (int e = 0; e < MINE; ++e)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int g = e / BESIDE, w = e % BESIDE / 4, b = e % BESIDE % 4;
            const u32 pick = b | (4 + b) << 4;
            const u32 one = __byte_perm(found.of[4 * h][g].w[w], found.of[4 * h + 1][g].w[w], pick);
            const u32 two = __byte_perm(found.of[4 * h + 2][g].w[w], found.of[4 * h + 3][g].w[w], pick);
            rest[e][h] = 4 * h < R ? __byte_perm(one, two, 0x5410) : 0;
        }
}

// A thread's channels of one of the two words of 8 tokens' codes.
DEVICE void load_words(u32 (&word)[MINE], const u32* row, int lane) {
    constexpr int N = BESIDE < 4 ? BESIDE : 4;
    struct Few { u32 w[N]; };
#pragma unroll
    for (int e = 0; e < MINE; e += N) {
        Few few = {};
        if (has(lane, e)) few = load_as<4 * N, Few>(row + channel_of(lane, e));
#pragma unroll
        for (int i = 0; i < N; ++i) word[e + i] = few.w[i];
    }
}

// `to`: the head's first channel of token t, in a tensor; of the unit's first element, in pages.
DEVICE void put_token(const Shared& s, u8* to, int t, int length, float (&x)[MINE], int lane) {
#if DTYPE == 1
#pragma unroll
    for (int e = 0; e < MINE; ++e) x[e] = fminf(fmaxf(x[e], -MAX_ABS), MAX_ABS);
#endif
#if BLOCK
    const i64 at = s.at[t];
    store_token(at >= 0, to + at, x, lane);
#else
    store_token(t < length, to, x, lane);
#endif
}

// The row apart: a channel's upper 8 bits lie in the section, the others where its codes would.
template <bool FINE> DEVICE void rebuild_row(const Cache& cache, const Shared& s, const u8* section,
                                             const u8* correction, u8* to, int head, int star,
                                             int length, int lane) {
    constexpr int R = FINE ? RESIDUAL_BITS : 0;
    const float bottom = bf16_to_float(get_u16(section + AT_ROW_LOW + 2 * head));
    const float range = bf16_to_float(get_u16(section + AT_ROW_RANGE + 2 * head));
    const int group = star / 8, i = star % 8;
    u32 rest[MINE][2];
    take_rest<R>(rest, load_rest<R>(correction, group, (length * R + 7) / 8, lane));
    float x[MINE];
#pragma unroll
    for (int e = 0; e < MINE; ++e) {
        const int c = has(lane, e) ? channel_of(lane, e) : 0, width = s.c.width[c];
        const u64 codes = (u64)s.words[1][group][c] << 32 | s.words[0][group][c];
        const u64 extra = (u64)rest[e][1] << 32 | rest[e][0];
        u32 q = section[AT_ROWS + head * DIM + c] << width | ((u32)(codes >> (i * width)) & ((1u << width) - 1));
        q = q << R | ((u32)(extra >> (i * R)) & ((1u << R) - 1));
        x[e] = bottom + ((float)q + 0.5f) * power_of_two(-(8 + width + R)) * range;
    }
    put_token(s, to + star * (BLOCK ? 0 : cache.c * ELEMENT_BYTES), star, length, x, lane);
}

// SCALED: multiply by s.by; else it is already in `low` and `half_range`.
template <bool FINE, bool KEYS, bool SCALED> DEVICE void rebuild(
    const Cache& cache, Shared& s, const u8* section, const u8* correction, u8* to,
    const float* cos, const float* sin, int head, int length)
{
    constexpr int R = FINE ? RESIDUAL_BITS : 0;
    const int lane = threadIdx.x % LANES, row = threadIdx.x / LANES;
    const int star = section[AT_STARS + head], rows = (length * R + 7) / 8;
    float low[MINE], half_range[MINE], step[MINE], fine[MINE], shift[MINE];
    u32 width[MINE], mask[MINE], unit = UNIT | 1;
    keep(unit);
#pragma unroll
    for (int e = 0; e < MINE; ++e) {
        const int c = has(lane, e) ? channel_of(lane, e) : 0;
        low[e] = s.low[c], half_range[e] = s.half_range[c], width[e] = s.c.width[c];
        mask[e] = (2u << width[e]) - 2;
        step[e] = power_of_two(-(int)width[e]);
        // Of 2(q + 1/2)·2^-bits - 1 what does not depend on the codes, with 2^23 taken off them.
        fine[e] = power_of_two(-(int)width[e] - R);
        shift[e] = (R ? -8388608.0f * fine[e] : fine[e]) - 1.0f - 8388608.0f * step[e];
        keep(mask[e]), keep(step[e]), keep(fine[e]), keep(shift[e]);
    }
    Rows next = load_rest<R>(correction, row, rows, lane);  // a group ahead
    // Angles of two tokens ahead; FINE has no registers left for them.
    Angles early[2];
    const auto ask_early = [&](int t) {
        early[0] = angles_of(cos, sin, t < PAGE ? t : 0, lane);
        early[1] = angles_of(cos, sin, t < PAGE ? t + 1 : 0, lane);
    };
    if (KEYS && !FINE) ask_early(row * 8);
#pragma unroll 1
    for (int group = row; group < (length + 7) / 8; group += ROWS) {
        u32 upper[MINE], codes[MINE], rest[MINE][2];
        load_words(codes, s.words[0][group], lane);
        load_words(upper, s.words[1][group], lane);
        take_rest<R>(rest, next);
        next = load_rest<R>(correction, group + ROWS, rows, lane);
        const i64 step_to = BLOCK ? 0 : cache.c * ELEMENT_BYTES;
        u8* at = to + group * 8 * step_to;
#pragma unroll 1
        for (int half = 0; half < 8; half += 4) {
            if (half) {
#pragma unroll
                for (int e = 0; e < MINE; ++e) {
                    codes[e] = __funnelshift_rc(codes[e], upper[e], 4 * width[e]);
                    if (R) rest[e][0] = __funnelshift_r(rest[e][0], rest[e][1], 4 * R);
                }
            }
            u32 left[MINE];
            Angles angles[4];
#pragma unroll
            for (int i = 0; KEYS && i < 4; ++i)
                angles[i] = !FINE && i < 2 ? early[i] : angles_of(cos, sin, group * 8 + half + i, lane);
            struct Four { float of[4]; };
            const Four by = SCALED && !KEYS ? load_as<16, Four>(s.by + group * 8 + half) : Four{};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int t = group * 8 + half + i;
                float x[MINE];
#pragma unroll
                for (int e = 0; e < MINE; ++e) {
                    left[e] = i == 0 ? codes[e] : left[e] >> (i == 1 ? width[e] - 1 : width[e]);
                    const u32 code = i == 0 ? left[e] << 1 : left[e];
                    float z = __fmaf_rn(__uint_as_float(masked(code, mask[e], UNIT)), step[e], shift[e]);
                    if (R) {
                        const u32 extra = i == 0 ? rest[e][0] << 1 : rest[e][0] >> (i * R - 1);
                        z = __fmaf_rn(__uint_as_float(masked(extra, (2u << R) - 2, unit)), fine[e], z);
                    }
#if CURVED
                    const float twice = z * (ONE_LESS + BETA * fabsf(z)) + 1.0f;
#else
                    const float twice = z + 1.0f;
#endif
                    x[e] = low[e] + twice * half_range[e];
                    if (SCALED) x[e] *= KEYS ? s.by[0] : by.of[i];
                }
                if (KEYS && !FINE && i == 2) ask_early(half ? (group + ROWS) * 8 : group * 8 + 4);
                if (KEYS) rotate<false>(x, angles[i], lane, s.rows[PAIRED || !PAIRS ? 0 : row]);
                put_token(s, at, t, length, x, lane);
                at += step_to;
            }
        }
    }
    if (row == star / 8 % ROWS) rebuild_row<FINE>(cache, s, section, correction, to, head, star, length, lane);
}

// Brings a later block's share of its page's sections into the L2 cache: byte by byte from the
// device's memory, its planes would keep it waiting.
#define AHEAD 400  // blocks that run before it, or beside this one
template <bool FINE> DEVICE void ask_ahead(const Plan& plan, const u8* anchor, const u8* residual) {
    const int number = blockIdx.x + AHEAD;
    if (number >= gridDim.x) return;
    const int head = number % HEADS, page = number / HEADS % plan.pages, unit = number / HEADS / plan.pages;
    const i64 bytes = plan.anchor_bytes(unit % KV, page);
    const u8* from = anchor + plan.anchor(unit / KV, unit % KV, page);
    for (i64 at = bytes * head / HEADS + threadIdx.x % 32 * 128; at < bytes * (head + 1) / HEADS; at += 32 * 128)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(from + at));
    if (!FINE) return;
    const i64 rest = CHANNELS * ((plan.length(page) * RESIDUAL_BITS + 7) / 8);
    from = residual + plan.residual(unit / KV, unit % KV, page);
    for (i64 at = rest * head / HEADS + threadIdx.x % 32 * 128; at < rest * (head + 1) / HEADS; at += 32 * 128)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(from + at));
}

// This head's widths; a warp's share of how many channels of all heads, and of those before it, have
// each.
DEVICE void count_widths(Channels& s, u32 (&counts)[WARPS_HERE][2][MAX_WIDTH], const u8* widths, int head) {
    const int lane = threadIdx.x % 32;
    u64 all = 0, before = 0;  // 8 counts each
    for (int i = threadIdx.x; i < (CHANNELS + 1) / 2; i += THREADS) {
        const u32 pair = widths[i];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const int c = 2 * i + n - head * DIM;
            const u32 width = pair >> (4 * n) & 7;
            const u64 one = CHANNELS % 2 == 0 || 2 * i + n < CHANNELS ? 1ull << (8 * width) : 0;
            all += one;
            if (c < 0) before += one;
            else if (c < DIM) s.width[c] = width + 1;
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // sums of a warp need 16 bits each
        const u64 mine = i ? before : all, even = mine & 0x00FF00FF00FF00FFull, odd = mine >> 8 & 0x00FF00FF00FF00FFull;
        const u32 a = __reduce_add_sync(FULL, (u32)even), b = __reduce_add_sync(FULL, (u32)(even >> 32));
        const u32 c = __reduce_add_sync(FULL, (u32)odd), d = __reduce_add_sync(FULL, (u32)(odd >> 32));
        const u32 sums = lane & 4 ? (lane & 1 ? d : b) : (lane & 1 ? c : a);
        if (lane < MAX_WIDTH) counts[threadIdx.x / 32][i][lane] = sums >> (lane & 2 ? 16 : 0) & 0xFFFF;
    }
}

template <bool FINE> DEVICE void decode(
    const Cache& cache, const Plan& plan, const float* all_cos, const float* all_sin,
    const u8* __restrict__ table, const u8* __restrict__ anchor, const u8* __restrict__ residual,
    const u32* gate)
{
    if (gate && *gate) return;
    extern __shared__ uint4 shared[];
    Shared& s = *reinterpret_cast<Shared*>(shared);
    const int warp = threadIdx.x / 32;
    const int head = blockIdx.x % HEADS, page = blockIdx.x / HEADS % plan.pages;
    const int unit = blockIdx.x / HEADS / plan.pages, layer = unit / KV, part = unit % KV;
    const bool values = KV == 2 && part == 1;
    const int length = plan.length(page), groups = (length + 7) / 8;
    const u8* section = anchor + plan.anchor(layer, part, page);

    count_widths(s.c, s.counts, section + AT_WIDTHS, head);
    // A power of two far from the limits of float32 can go into the scales.
    const int exponent = (signed char)section[AT_EXPONENTS + head];
    const bool fold = !values && exponent >= -60 && exponent <= 60;
    const float factor = fold ? power_of_two(exponent) : 1.0f;
    if (values) {
        for (int t = threadIdx.x; t < length; t += THREADS) {
            const int i = t * HEADS + head;
            const int n = exponent - (section[AT_STEPS + i / 2] >> (4 * (i & 1)) & 15);
            s.by[t] = quarters[n & 3] * power_of_two(n >> 2);
        }
    } else if (threadIdx.x == 0) {
        s.by[0] = power_of_two(exponent);
    }
#if BLOCK
    for (int t = threadIdx.x; t < PAGE; t += THREADS)
        s.at[t] = t < length ? cache.token((i64)page * PAGE + t) * ELEMENT_BYTES : -1;
#endif
    for (int c = threadIdx.x; c < DIM; c += THREADS) {
        s.low[c] = half_to_float(reinterpret_cast<const u16*>(section)[head * DIM + c]) * factor;
        s.half_range[c] = 0.5f * half_to_float(reinterpret_cast<const u16*>(section + AT_RANGES)[head * DIM + c]) * factor;
    }
    sort_by_width(s.c, [&] {
        const int of = threadIdx.x % 32;
        if (of >= 2 * MAX_WIDTH) return;
        u32 sum = 0;
        for (int w = 0; w < WARPS_HERE; ++w) sum += s.counts[w][of / MAX_WIDTH][of % MAX_WIDTH];
        (of < MAX_WIDTH ? s.c.all : s.c.before)[of % MAX_WIDTH] = sum;
        __syncwarp((1u << 2 * MAX_WIDTH) - 1);
        place_planes(s.c, values, length);
    });
    for_columns(s.c, [&](int c, int width, int j, u32 start, u32 step) {
        const u8* from = section + start;
        u8* word = reinterpret_cast<u8*>(&s.words[j / 4][0][c]) + j % 4;
#pragma unroll 32
        for (int group = 0; group < groups; ++group) {
            *word = __ldg(from);
            word += 4 * DIM;
            from += step;
        }
    });
    __syncthreads();
    const float* cos = all_cos + (i64)table[layer] * 256 * PAIRS;
    const float* sin = all_sin + (i64)table[layer] * 256 * PAIRS;
    const u8* correction = residual + plan.residual(layer, part, page) + head * DIM;
    u8* to = cache.unit(unit) + (i64)head * cache.d * ELEMENT_BYTES;
#if !BLOCK
    to += (i64)page * PAGE * cache.c * ELEMENT_BYTES;
#endif
    if (warp == WARPS_HERE - 1) ask_ahead<FINE>(plan, anchor, residual);
    if (values) rebuild<FINE, false, true>(cache, s, section, correction, to, cos, sin, head, length);
    else if (fold) rebuild<FINE, true, false>(cache, s, section, correction, to, cos, sin, head, length);
    else rebuild<FINE, true, true>(cache, s, section, correction, to, cos, sin, head, length);
}

#define DECODE_ARGS CACHE_ARGS, PLAN_ARGS, const float* __restrict__ cos, const float* __restrict__ sin, \
    const u8* __restrict__ table, const u8* __restrict__ anchor, const u8* __restrict__ residual, const u32* gate

extern "C" __global__ void __launch_bounds__(THREADS, COLUMNS == 1 ? BLOCKS : 1) decode_anchor(DECODE_ARGS) {
    const Cache cache = CACHE;
    const Plan plan = PLAN;
    decode<false>(cache, plan, cos, sin, table, anchor, residual, gate);
}
extern "C" __global__ void __launch_bounds__(THREADS, COLUMNS == 1 ? BLOCKS : 1) decode_both(DECODE_ARGS) {
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
        int wrong = 0;  // a sum: of a bool and |=, ptxas 13.0 made the opposite for 4 heads of 64
        for (int h = 0; h < HEADS; ++h) {
            int total = 0;
            for (int c = h * DIM + threadIdx.x % 32; c < (h + 1) * DIM; c += 32) {
                const float low = half_to_float(reinterpret_cast<const u16*>(section)[c]);
                const float range = half_to_float(reinterpret_cast<const u16*>(section + AT_RANGES)[c]);
                const int nibble = section[AT_WIDTHS + c / 2] >> (4 * (c & 1)) & 15;
                wrong += !(fabsf(low) <= MAX_ABS) + !(MIN_RANGE <= range) + !(range <= MAX_ABS);
                wrong += nibble >> 3;
                total += 1 + nibble;
            }
            wrong += abs((int)__reduce_add_sync(FULL, total) - plan.total(part));
            const int exponent = (signed char)section[AT_EXPONENTS + h];
            const float low = bf16_to_float(get_u16(section + AT_ROW_LOW + 2 * h));
            const float range = bf16_to_float(get_u16(section + AT_ROW_RANGE + 2 * h));
            wrong += max(0, section[AT_STARS + h] + 1 - plan.length(page)) + max(0, abs(exponent) - 120);
            wrong += !(-2 * MAX_ABS <= low) + !(low <= MAX_ABS);
            wrong += !(MIN_ROW_RANGE <= range) + !(range <= 4 * MAX_ABS);
        }
        if (wrong) atomicOr(&scratch->bad, WRONG_SCALES);
    }
    verdict(anchor, anchor_bytes, anchor_digest, residual, residual_bytes, residual_digest, digests,
            scratch, gate, record);
}
