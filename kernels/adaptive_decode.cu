// The decoder of the profile `adaptive`, and what checks its objects.
//
// A head's codes are gathered from the planes into shared memory, a word for 8 tokens of a channel;
// then every row of threads rebuilds 8 tokens at a time.
struct Shared {
    u64 words[PAGE / 8][DIM];
    float low[DIM], half_range[DIM];
    float by[PAGE];  // what a token's values are multiplied with
    float rows[PAIRED || !PAIRS ? 1 : ROWS][PAIRED || !PAIRS ? 1 : DIM];
    Channels c;
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "SHARED_BYTES");

// SCALED: multiply by s.by; else it is already in `low` and `half_range`.
template <bool FINE, bool KEYS, bool SCALED> DEVICE void rebuild(
    const Cache& cache, Shared& s, const u8* section, const u8* correction, u8* to, i64 first,
    const float* cos, const float* sin, int head, int length)
{
    constexpr int R = FINE ? RESIDUAL_BITS : 0;
    const int lane = threadIdx.x % LANES, row = threadIdx.x / LANES;
    const int star = section[AT_STARS + head], rows = (length * R + 7) / 8;
    float low[MINE], half_range[MINE], step[MINE];
    u32 width[MINE], mask[MINE];
#pragma unroll
    for (int e = 0; e < MINE; ++e) {
        const int c = has(lane, e) ? channel_of(lane, e) : 0;
        low[e] = s.low[c], half_range[e] = s.half_range[c], width[e] = s.c.width[c];
        mask[e] = (1u << width[e]) - 1;
        step[e] = power_of_two(-((int)width[e] + R));
    }
#pragma unroll 1
    for (int group = row; group < (length + 7) / 8; group += ROWS) {
        u64 word[MINE];
        u32 rest[MINE][REST_WORDS] = {};
        struct Row { u32 w[(BESIDE + 3) / 4]; };
        Row found[R ? R : 1][APART];
#pragma unroll
        for (int r = 0; r < R; ++r)
#pragma unroll
            for (int g = 0; g < APART; ++g) {
                found[r][g] = Row{};
                if (group * R + r < rows && has(lane, g * BESIDE))
                    found[r][g] = load_as<BESIDE, Row>(correction + (i64)(group * R + r) * CHANNELS + channel_of(lane, g * BESIDE));
            }
#pragma unroll
        for (int e = 0; e < MINE; ++e) {
            word[e] = has(lane, e) ? s.words[group][channel_of(lane, e)] : 0;
#pragma unroll
            for (int r = 0; r < R; ++r)
                rest[e][r / 4] |= (found[r][e / BESIDE].w[e % BESIDE / 4] >> (8 * (e % BESIDE % 4)) & 255) << (8 * (r % 4));
        }
        u32 codes[MINE];  // of 4 tokens
#pragma unroll 4
        for (int i = 0; i < 8; ++i) {
            const int t = group * 8 + i;
            if (i % 4 == 0)
#pragma unroll
                for (int e = 0; e < MINE; ++e) codes[e] = (u32)(i ? word[e] >> (4 * width[e]) : word[e]);
            u32 extra[MINE];
            float x[MINE];
#pragma unroll
            for (int e = 0; e < MINE; ++e) {
                u32 q = codes[e] & mask[e];
                codes[e] >>= width[e];
                if (R) {
                    extra[e] = rest[e][0] & ((1u << R) - 1);
                    rest[e][0] = REST_WORDS == 2 ? __funnelshift_r(rest[e][0], rest[e][REST_WORDS - 1], R) : rest[e][0] >> R;
                    if (REST_WORDS == 2) rest[e][REST_WORDS - 1] >>= R;
                    q = q << R | extra[e];
                }
                // 2(q + 1/2)·2^-bits - 1, exactly; half of the range makes up for twice the value.
                const float z = __fmaf_rn(__uint_as_float(q | 0x4B000000u) - 8388608.0f, step[e] + step[e], step[e] - 1.0f);
#if CURVED
                const float twice = z * (ONE_LESS + BETA * fabsf(z)) + 1.0f;
#else
                const float twice = z + 1.0f;
#endif
                x[e] = low[e] + twice * half_range[e];
                if (SCALED) x[e] *= s.by[KEYS ? 0 : t];
            }
            if (KEYS) rotate<false>(x, cos + t * PAIRS, sin + t * PAIRS, lane, s.rows[PAIRED || !PAIRS ? 0 : row]);
            if (t >= length) continue;
            if (t == star) {
                const float bottom = bf16_to_float(get_u16(section + AT_ROW_LOW + 2 * head));
                const float range = bf16_to_float(get_u16(section + AT_ROW_RANGE + 2 * head));
#pragma unroll
                for (int e = 0; e < MINE; ++e) {
                    u32 q = section[AT_ROWS + head * DIM + (has(lane, e) ? channel_of(lane, e) : 0)];
                    if (FINE) q = q << RESIDUAL_BITS | (R ? extra[e] : 0);
                    x[e] = bottom + ((float)q + 0.5f) * power_of_two(-(8 + (FINE ? RESIDUAL_BITS : 0))) * range;
                }
            }
#if DTYPE == 1
#pragma unroll
            for (int e = 0; e < MINE; ++e) x[e] = fminf(fmaxf(x[e], -MAX_ABS), MAX_ABS);
#endif
            const i64 at = cache.token(first + t);
            if (at >= 0) store_token(to + at * ELEMENT_BYTES, x, lane);
        }
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

    if (threadIdx.x < MAX_WIDTH) s.c.all[threadIdx.x] = s.c.before[threadIdx.x] = 0;
    __syncthreads();
    for (int i = warp * 32; i < CHANNELS; i += THREADS) {
        const int c = i + threadIdx.x % 32;
        int width = 0, of = 0;
        if (c < CHANNELS) {
            width = (section[AT_WIDTHS + c / 2] >> (4 * (c & 1)) & 7) + 1;
            of = c / DIM;
            if (of == head) s.c.width[c - head * DIM] = width;
        }
        const u32 same = __match_any_sync(FULL, width * 2 + (of < head));
        if (width && (same & ((1u << (threadIdx.x % 32)) - 1)) == 0) {
            atomicAdd(&s.c.all[width - 1], __popc(same));
            if (of < head) atomicAdd(&s.c.before[width - 1], __popc(same));
        }
    }
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
    for (int c = threadIdx.x; c < DIM; c += THREADS) {
        s.low[c] = half_to_float(reinterpret_cast<const u16*>(section)[head * DIM + c]) * factor;
        s.half_range[c] = 0.5f * half_to_float(reinterpret_cast<const u16*>(section + AT_RANGES)[head * DIM + c]) * factor;
    }
    __syncthreads();
    if (warp == 0) sort_by_width(s.c);
    __syncthreads();
    place_planes(s.c, values, length);
    constexpr int SLICES = THREADS / DIM > 1 ? THREADS / DIM : 1;
    for (int i = threadIdx.x; i < DIM * SLICES; i += THREADS) {
        const int c = s.c.order[i % DIM], slice = i / DIM, width = s.c.width[c];
        const u32 columns = s.c.all[width - 1];
        u32 from = s.c.plane[width - 1] + s.c.place[c] + slice * width * columns;
#pragma unroll 4
        for (int group = slice; group < groups; group += SLICES) {
            u32 low = 0, high = 0;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (j < width) low |= (u32)__ldg(section + from + j * columns) << (8 * j);
            if (width > 4)
#pragma unroll
                for (int j = 4; j < MAX_WIDTH; ++j)
                    if (j < width) high |= (u32)__ldg(section + from + j * columns) << (8 * (j - 4));
            s.words[group][c] = (u64)high << 32 | low;
            from += SLICES * width * columns;
        }
    }
    __syncthreads();
    const float* cos = all_cos + (i64)table[layer] * 256 * PAIRS;
    const float* sin = all_sin + (i64)table[layer] * 256 * PAIRS;
    const u8* correction = residual + plan.residual(layer, part, page) + head * DIM;
    u8* to = cache.unit(unit) + (i64)head * cache.d * ELEMENT_BYTES;
    const i64 first = (i64)page * PAGE;
    if (values) rebuild<FINE, false, true>(cache, s, section, correction, to, first, cos, sin, head, length);
    else if (fold) rebuild<FINE, true, false>(cache, s, section, correction, to, first, cos, sin, head, length);
    else rebuild<FINE, true, true>(cache, s, section, correction, to, first, cos, sin, head, length);
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
